//! `/ownerserve/v1/...`: reads of what this router knows, and the dial.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use http::HeaderMap;
use http::header::CONTENT_TYPE;
use serde::{Deserialize, Serialize};
use vocabulary::{Health, ModelId, Role, WorkerId};

use super::Problem;
use crate::gateway::Gateway;
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

/// One worker in `GET /ownerserve/v1/workers`.
#[derive(Serialize)]
pub(super) struct WorkerLine {
    id: WorkerId,
    endpoint: Arc<str>,
    role: Role,
    health: Health,
    models: Vec<ModelId>,
}

/// The answer to `GET /ownerserve/v1/workers`.
#[derive(Serialize)]
pub(super) struct WorkerLines {
    workers: Vec<WorkerLine>,
}

pub(super) async fn workers(State(gateway): State<Arc<Gateway>>) -> Json<WorkerLines> {
    let line = |member: &Arc<crate::roster::Member>| WorkerLine {
        id: member.id,
        endpoint: member.config.endpoint().clone(),
        role: member.config.role(),
        health: member.health(),
        models: member.models(),
    };
    Json(WorkerLines { workers: gateway.roster.members().iter().map(line).collect() })
}
