//! `/ownerserve/v1/mode` and `/decisions`: the routing mode, and why steps were served as they were.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use planner::{Action, ActionSet, StepKind};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use vocabulary::{Micros, ModelId, RequestId, SessionId, TenantId, WorkerId};

use super::extractors::{JsonBody, PathId, QueryParams};
use super::paging::parse_limit;
use super::problem::{Problem, ProblemKind};
use super::schemas::{RequestIdSchema, SessionIdSchema, WorkerIdSchema};
use crate::app_state::AppState;
use crate::decisions::DecisionFilter;
use crate::error::truncated;
use crate::guardrail::can_be_disabled;
use crate::pipeline::receipt::RequestOutcome;
use crate::pipeline::routing::{Percent, RoutingMode, RoutingSettings};

/// Who decides where a step goes.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how Mode is written")]
enum RoutingModeSchema {
    /// Plans are made and recorded; the bypass policy routes.
    Shadow,
    /// The bypass policy routes; nothing is planned and the ledger is not asked.
    Bypass,
    /// The planner routes.
    Active,
}

/// The dial.
#[derive(Serialize, ToSchema)]
pub(super) struct RoutingState {
    #[schema(value_type = RoutingModeSchema, inline)]
    mode: RoutingMode,
    /// In mode `active`, the share of sessions whose steps the planner routes.
    #[schema(value_type = u8, maximum = 100)]
    rollout_percent: Percent,
    /// Actions that are switched off at run time, by an operator or because they made sessions slower. Those of
    /// `planner.disabled_actions` in the configuration are off as well, and stay so.
    #[schema(value_type = Vec<ActionSchema>, inline)]
    disabled: ActionSet,
}

impl From<RoutingSettings> for RoutingState {
    fn from(steering: RoutingSettings) -> Self {
        let RoutingSettings { mode, rollout_percent, disabled, .. } = steering;
        Self { mode, rollout_percent, disabled }
    }
}

/// What can be switched off.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "describes how Action is written")]
enum ActionSchema {
    DecodeContinuation,
    RemotePrefill,
    ArtifactFetch,
    TailRecompute,
    StateMigration,
}

/// A change of the dial; what is left out stays.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RoutingPatch {
    #[schema(value_type = Option<RoutingModeSchema>, inline)]
    mode: Option<RoutingMode>,
    #[serde(default, deserialize_with = "parse_percent")]
    #[schema(value_type = Option<u8>, maximum = 100)]
    rollout_percent: Option<Percent>,
    /// Exactly the actions that are switched off from now on; an empty list switches all on again.
    #[serde(default, deserialize_with = "parse_actions")]
    #[schema(value_type = Option<Vec<ActionSchema>>, inline)]
    disabled: Option<ActionSet>,
}

/// Parses actions that can be disabled; any other value is refused with what is accepted.
fn parse_actions<'de, D: Deserializer<'de>>(given: D) -> Result<Option<ActionSet>, D::Error> {
    let Some(words) = Option::<Vec<String>>::deserialize(given)? else { return Ok(None) };
    let switchable = || Action::ALL.into_iter().filter(|action| *action != Action::ColocatedPrefill);
    let off = |word: &String| {
        switchable().find(|action| action.as_str() == word).ok_or_else(|| {
            let accepted = switchable().map(Action::as_str).collect::<Vec<_>>().join(", ");
            let why = match Action::ColocatedPrefill.as_str() == word {
                true => "cannot be switched off, because every step must be servable",
                false => "is not accepted here",
            };
            D::Error::custom(format!("{} {why}: accepted is a list of {accepted}", truncated(word)))
        })
    };
    words.iter().map(off).collect::<Result<_, _>>().map(Some)
}

/// Parses a percentage of sessions; the error tells the accepted range instead of the type's.
fn parse_percent<'de, D: Deserializer<'de>>(given: D) -> Result<Option<Percent>, D::Error> {
    let Some(number) = Option::<serde_json::Number>::deserialize(given)? else { return Ok(None) };
    let share = number.as_i64().and_then(|share| share.try_into().ok());
    let wrong = || D::Error::custom(format!("{number} is not accepted here: accepted is a whole number from 0 to 100"));
    share.map(Some).ok_or_else(wrong)
}

/// Mode and rollout share of this router.
#[utoipa::path(get, path = "/ownerserve/v1/mode", tag = "steering",
    responses((status = 200, description = "How the dial stands.", body = RoutingState)))]
pub(super) async fn mode(State(gateway): State<Arc<AppState>>) -> Json<RoutingState> {
    Json(gateway.routing.get().into())
}

/// Turns the dial of this router, until its next start.
#[utoipa::path(put, path = "/ownerserve/v1/mode", tag = "steering", request_body = RoutingPatch,
    responses((status = 200, description = "How the dial stands now.", body = RoutingState)))]
pub(super) async fn set_mode(
    State(gateway): State<Arc<AppState>>,
    told: Result<JsonBody<RoutingPatch>, Problem>,
) -> Result<Json<RoutingState>, Problem> {
    let accepted = "accepted is {\"mode\": \"shadow\" | \"bypass\" | \"active\", \"rollout_percent\": 0 to 100, \
                    \"disabled\": [\"artifact_fetch\", ...]}";
    let JsonBody(change) = told.map_err(|problem| problem.with_accepted(accepted))?;
    let before = gateway.routing.get();
    let share = change.rollout_percent.unwrap_or(before.rollout_percent);
    gateway.routing.set(change.mode.unwrap_or(before.mode), share);
    if let Some(disabled) = change.disabled {
        let before = gateway.routing.set_disabled(disabled);
        before.without(disabled).iter().for_each(|action| gateway.decisions.guardrail.reset(action));
    }
    let after = gateway.routing.get();
    if after.mode != RoutingMode::Active || u8::from(after.rollout_percent) == 0 {
        // Nothing is compared any more, so nothing else would end the guardrail's reports about placement.
        let placement = Action::ALL.into_iter().filter(|action| !can_be_disabled(*action));
        placement.for_each(|action| gateway.decisions.guardrail.reset(action));
    }
    tracing::info!(?before, ?after, "an operator changed the mode");
    Ok(Json(after.into()))
}

/// The same, by another method.
#[utoipa::path(patch, path = "/ownerserve/v1/mode", tag = "steering", request_body = RoutingPatch,
    responses((status = 200, description = "How the dial stands now.", body = RoutingState)))]
pub(super) async fn patch_mode(
    gateway: State<Arc<AppState>>,
    told: Result<JsonBody<RoutingPatch>, Problem>,
) -> Result<Json<RoutingState>, Problem> {
    set_mode(gateway, told).await
}

/// Which decisions are asked for; of several filters, all must hold.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DecisionQuery {
    /// Most of them.
    #[serde(default, deserialize_with = "parse_limit")]
    #[param(minimum = 1, maximum = 1000, default = 100)]
    limit: Option<u16>,
    /// Of this session.
    #[param(value_type = Option<SessionIdSchema>)]
    session: Option<SessionId>,
    /// Of this tenant.
    #[param(value_type = Option<String>)]
    tenant: Option<TenantId>,
    /// For this model.
    #[param(value_type = Option<String>)]
    model: Option<ModelId>,
    /// Decided in this mode.
    #[param(value_type = Option<RoutingModeSchema>, inline)]
    mode: Option<RoutingMode>,
    /// Of this kind of step, as `small_increment`.
    #[param(value_type = Option<String>)]
    step: Option<StepKind>,
    /// Served by this action, as `artifact_fetch`.
    #[param(value_type = Option<String>)]
    action: Option<Action>,
    /// With this worker in a leg.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// That ended so: `complete`, `refused`, `broken`, `client_left` or `failed`.
    #[param(value_type = Option<String>)]
    ending: Option<RequestOutcome>,
    /// That arrived at this time or later, milliseconds since 1970.
    #[serde(default, deserialize_with = "parse_number")]
    #[param(minimum = 0)]
    since: Option<u64>,
    /// That arrived at this time or before, milliseconds since 1970.
    #[serde(default, deserialize_with = "parse_number")]
    #[param(minimum = 0)]
    until: Option<u64>,
    /// Whose first token took more than so many microseconds; where there was none, as of an answer that was not streamed,
    /// whose whole time did.
    #[serde(default, deserialize_with = "parse_number")]
    #[param(minimum = 0)]
    slower_than_us: Option<u64>,
}

/// Parses a whole number in a query; any other value is refused with what is accepted.
fn parse_number<'de, D: Deserializer<'de>>(given: D) -> Result<Option<u64>, D::Error> {
    let asked = String::deserialize(given)?.parse().ok();
    asked.map(Some).ok_or_else(|| D::Error::custom("accepted is a whole number from 0 to 18446744073709551615"))
}

impl DecisionQuery {
    fn filter(self) -> DecisionFilter {
        let Self { session, tenant, model, mode, step, action, worker, ending, since, until, .. } = self;
        let slower_than = self.slower_than_us.map(Micros);
        let request = None;
        DecisionFilter {
            request,
            session,
            tenant,
            model,
            mode,
            step,
            action,
            worker,
            outcome: ending,
            since,
            until,
            slower_than,
        }
    }
}

/// Receipts, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct DecisionList {
    /// Each with what was known, every candidate with its price, the choice, every attempt, and what was seen then.
    #[schema(value_type = Vec<Object>)]
    decisions: Vec<Box<RawValue>>,
    /// Whether all was looked through that is kept, in memory and on disk, or enough was found. Where not, `since` and
    /// `until` narrow what is looked through.
    complete: bool,
}

/// Runs blocking work on a blocking thread.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let failed =
        |_| Problem::new(ProblemKind::Internal, "The search for decisions broke off; the router's log has more.");
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// The newest decisions of this router, from memory and its log on disk; those that ended last come first.
#[utoipa::path(get, path = "/ownerserve/v1/decisions", tag = "steering", params(DecisionQuery),
    responses((status = 200, description = "Receipts, the newest first.", body = DecisionList)))]
pub(super) async fn decisions(
    State(gateway): State<Arc<AppState>>,
    QueryParams(query): QueryParams<DecisionQuery>,
) -> Result<Json<DecisionList>, Problem> {
    let (limit, wanted) = (query.limit.unwrap_or(100).into(), query.filter());
    let decisions = gateway.decisions.clone();
    let found = run_blocking(move || decisions.search(&wanted, limit)).await?;
    Ok(Json(DecisionList { decisions: found.receipts, complete: found.complete }))
}

/// One decision, by the id that the client saw in `x-request-id`.
#[utoipa::path(get, path = "/ownerserve/v1/decisions/{request}", tag = "steering",
    params(("request" = RequestIdSchema, Path)),
    responses((status = 200, description = "The receipt, whole.", body = Object)))]
pub(super) async fn decision(
    State(gateway): State<Arc<AppState>>,
    PathId(request): PathId<RequestId>,
) -> Result<Json<Box<RawValue>>, Problem> {
    let decisions = gateway.decisions.clone();
    let mut found = run_blocking(move || decisions.find_request(request)).await?;
    let why = match found.complete {
        true => {
            "is kept here: a router keeps those of the steps that it served, as many as decision_log.max_size has room for"
        }
        false => "was found before the search was ended after 4 s; `decisions?since=&until=` looks at a part of them",
    };
    let missing = || Problem::not_found(format!("No decision for {request} {why}."));
    found.receipts.pop().map(Json).ok_or_else(missing)
}
