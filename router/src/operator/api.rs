//! `/ownerserve/v1/...`: reads of what this router knows, and the dial.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use vocabulary::{RequestId, SessionId};

use super::Problem;
use crate::gateway::Gateway;
use crate::pipeline::receipt::Receipt;
use crate::pipeline::steering::{Mode, Percent, Steering};

/// A change of the dial; what is left out stays.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    mode: Option<Mode>,
    rollout_percent: Option<Percent>,
}

pub(super) async fn mode(State(gateway): State<Arc<Gateway>>) -> Json<Steering> {
    Json(gateway.steering.get())
}

pub(super) async fn set_mode(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Json<Steering>, Problem> {
    // Browsers send other types across sites without asking; this one they must ask for.
    let kind = headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if !kind.to_ascii_lowercase().starts_with(b"application/json") {
        return Err(Problem::not_json());
    }
    let accepted = "accepted is {\"mode\": \"shadow\" | \"sticky\" | \"own\", \"rollout_percent\": 0 to 100}";
    let change: Change =
        serde_json::from_slice(&body).map_err(|error| Problem::bad_body(format!("{error}; {accepted}")))?;
    let before = gateway.steering.get();
    let after = Steering {
        mode: change.mode.unwrap_or(before.mode),
        rollout_percent: change.rollout_percent.unwrap_or(before.rollout_percent),
    };
    gateway.steering.set(after);
    tracing::info!(?before, ?after, "an operator changed the mode");
    Ok(Json(after))
}

/// Which decisions are asked for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DecisionQuery {
    limit: Option<usize>,
    session: Option<SessionId>,
}

/// The answer to `GET /ownerserve/v1/decisions`, newest first.
#[derive(Serialize)]
pub(super) struct Decisions {
    decisions: Vec<Arc<Receipt>>,
}

/// `GET /ownerserve/v1/decisions?limit=&session=`.
pub(super) async fn decisions(
    State(gateway): State<Arc<Gateway>>,
    query: Result<Query<DecisionQuery>, QueryRejection>,
) -> Result<Json<Decisions>, Problem> {
    let Query(query) = query.map_err(|error| Problem::bad_query(error.body_text()))?;
    let wanted = |receipt: &Receipt| query.session.is_none_or(|session| receipt.known.session == session);
    let decisions = gateway.receipts.newest(query.limit.unwrap_or(100).min(MOST_DECISIONS), wanted);
    Ok(Json(Decisions { decisions }))
}

/// Most decisions in one answer.
const MOST_DECISIONS: usize = 1000;

/// `GET /ownerserve/v1/decisions/{request}`, by the id that the client saw in `x-request-id`.
pub(super) async fn decision(
    State(gateway): State<Arc<Gateway>>,
    Path(request): Path<String>,
) -> Result<Json<Arc<Receipt>>, Problem> {
    let request: RequestId = request.parse().map_err(|error| Problem::bad_id(&error))?;
    let missing = || Problem::not_found(format!("No decision for {request} is kept. The newest ones only are."));
    gateway.receipts.of(request).map(Json).ok_or_else(missing)
}
