//! `/ownerserve/v1/mode` and `/decisions`: the dial, and why steps were served as they were.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{RequestId, SessionId};

use super::input::{Asked, Named, Told};
use super::paging::limit;
use super::problem::Problem;
use super::words::{RequestWord, SessionWord};
use crate::gateway::Gateway;
use crate::pipeline::receipt::Receipt;
use crate::pipeline::steering::{Mode, Percent, Steering};

/// Who decides where a step goes.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how Mode is written")]
enum ModeWord {
    /// Plans are made and recorded; the bypass policy routes.
    Shadow,
    /// The bypass policy routes; nothing is planned and the ledger is not asked.
    Sticky,
    /// The planner routes.
    Own,
}

/// The dial.
#[derive(Serialize, ToSchema)]
pub(super) struct Dial {
    #[schema(value_type = ModeWord, inline)]
    mode: Mode,
    /// In mode `own`, the share of sessions whose steps the planner routes.
    #[schema(value_type = u8, maximum = 100)]
    rollout_percent: Percent,
}

impl From<Steering> for Dial {
    fn from(steering: Steering) -> Self {
        Self { mode: steering.mode, rollout_percent: steering.rollout_percent }
    }
}

/// A change of the dial; what is left out stays.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Change {
    #[schema(value_type = Option<ModeWord>, inline)]
    mode: Option<Mode>,
    #[serde(default, deserialize_with = "share")]
    #[schema(value_type = Option<u8>, maximum = 100)]
    rollout_percent: Option<Percent>,
}

/// A share of sessions; what is none is told what one is, not what its type could hold.
fn share<'de, D: Deserializer<'de>>(given: D) -> Result<Option<Percent>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(given)? else { return Ok(None) };
    let share = number.as_u64().and_then(|share| u8::try_from(share).ok()).and_then(|share| share.try_into().ok());
    let wrong = || D::Error::custom(format!("{number} is not accepted here: accepted is a whole number from 0 to 100"));
    share.map(Some).ok_or_else(wrong)
}

/// Mode and rollout share of this router.
#[utoipa::path(get, path = "/ownerserve/v1/mode", tag = "steering",
    responses((status = 200, description = "How the dial stands.", body = Dial)))]
pub(super) async fn mode(State(gateway): State<Arc<Gateway>>) -> Json<Dial> {
    Json(gateway.steering.get().into())
}

/// Turns the dial of this router, until its next start.
#[utoipa::path(put, path = "/ownerserve/v1/mode", tag = "steering", request_body = Change,
    responses((status = 200, description = "How the dial stands now.", body = Dial)))]
pub(super) async fn set_mode(
    State(gateway): State<Arc<Gateway>>,
    told: Result<Told<Change>, Problem>,
) -> Result<Json<Dial>, Problem> {
    let accepted = "accepted is {\"mode\": \"shadow\" | \"sticky\" | \"own\", \"rollout_percent\": 0 to 100}";
    let Told(change) = told.map_err(|problem| problem.and(accepted))?;
    let before = gateway.steering.get();
    let after = Steering {
        mode: change.mode.unwrap_or(before.mode),
        rollout_percent: change.rollout_percent.unwrap_or(before.rollout_percent),
    };
    gateway.steering.set(after);
    tracing::info!(?before, ?after, "an operator changed the mode");
    Ok(Json(after.into()))
}

/// The same, by another method.
#[utoipa::path(patch, path = "/ownerserve/v1/mode", tag = "steering", request_body = Change,
    responses((status = 200, description = "How the dial stands now.", body = Dial)))]
pub(super) async fn patch_mode(
    gateway: State<Arc<Gateway>>,
    told: Result<Told<Change>, Problem>,
) -> Result<Json<Dial>, Problem> {
    set_mode(gateway, told).await
}

/// Which decisions are asked for.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DecisionQuery {
    /// Most of them.
    #[serde(default, deserialize_with = "limit")]
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u16>,
    /// Of this session.
    #[param(value_type = Option<SessionWord>)]
    session: Option<SessionId>,
}

/// Receipts, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct Decisions {
    /// Each with what was known, every candidate with its price, the choice, every attempt, and what was seen then.
    #[schema(value_type = Vec<Object>)]
    decisions: Vec<Arc<Receipt>>,
}

/// The newest decisions of this router.
#[utoipa::path(get, path = "/ownerserve/v1/decisions", tag = "steering", params(DecisionQuery),
    responses((status = 200, description = "Receipts, the newest first.", body = Decisions)))]
pub(super) async fn decisions(
    State(gateway): State<Arc<Gateway>>,
    Asked(query): Asked<DecisionQuery>,
) -> Result<Json<Decisions>, Problem> {
    let limit = query.limit.unwrap_or(100);
    let wanted = |receipt: &Receipt| query.session.is_none_or(|session| receipt.known.session == session);
    Ok(Json(Decisions { decisions: gateway.receipts.newest(limit.into(), wanted) }))
}

/// One decision, by the id that the client saw in `x-request-id`.
#[utoipa::path(get, path = "/ownerserve/v1/decisions/{request}", tag = "steering",
    params(("request" = RequestWord, Path)),
    responses((status = 200, description = "The receipt, whole.", body = Object)))]
pub(super) async fn decision(
    State(gateway): State<Arc<Gateway>>,
    Named(request): Named<RequestId>,
) -> Result<Json<Arc<Receipt>>, Problem> {
    let missing = || Problem::not_found(format!("No decision for {request} is kept. The newest ones only are."));
    gateway.receipts.of(request).map(Json).ok_or_else(missing)
}
