//! `/ownerserve/v1/routing` and `/decisions`: the routing mode, and why steps were served as they were.

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
use super::request_units::DurationInput;
use super::schemas::{RequestIdSchema, SessionIdSchema, WorkerIdSchema};
use super::sources::RoutingSources;
use proxy::decisions::DecisionFilter;
use proxy::guardrail::can_be_disabled;
use proxy::receipt::RequestOutcome;
use proxy::routing::{Percent, RoutingSettings};
use vocabulary::RoutingMode;
use vocabulary::truncated;
use vocabulary::{TimeSpan, UtcTime};

/// Who decides where a step goes.
#[derive(ToSchema)]
#[schema(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes how RoutingMode is written")]
enum RoutingModeSchema {
    /// Plans are made and recorded; the fallback policy routes.
    Shadow,
    /// The fallback policy routes; nothing is planned and the ledger is not asked.
    Bypass,
    /// The planner routes.
    Active,
}

/// The routing mode and what limits it.
#[derive(Serialize, ToSchema)]
#[schema(as = Routing)]
pub(super) struct RoutingResource {
    #[schema(value_type = RoutingModeSchema, inline)]
    mode: RoutingMode,
    /// In mode `active`, the share of sessions whose steps the planner routes.
    #[schema(value_type = u8, maximum = 100)]
    rollout_percent: Percent,
    /// Actions that are disabled at run time, by an operator or because they made sessions slower. Those that the
    /// `planner.disabled_actions` disables are not listed, and stay disabled.
    #[schema(value_type = Vec<DisabledActionSchema>, inline)]
    disabled_actions: ActionSet,
}

impl From<RoutingSettings> for RoutingResource {
    fn from(routing: RoutingSettings) -> Self {
        let RoutingSettings { mode, rollout_percent, disabled, .. } = routing;
        Self { mode, rollout_percent, disabled_actions: disabled }
    }
}

/// What can be disabled.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "describes how Action is written")]
enum DisabledActionSchema {
    DecodeContinuation,
    RemotePrefill,
    ArtifactFetch,
    TailRecompute,
    StateMigration,
}

/// A change of the routing; what is left out stays.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RoutingPatch {
    #[schema(value_type = Option<RoutingModeSchema>, inline)]
    mode: Option<RoutingMode>,
    #[serde(default, deserialize_with = "parse_percent")]
    #[schema(value_type = Option<u8>, maximum = 100)]
    rollout_percent: Option<Percent>,
    /// Exactly the actions that are disabled from now on; an empty list enables all again.
    #[serde(default, deserialize_with = "parse_actions")]
    #[schema(value_type = Option<Vec<DisabledActionSchema>>, inline)]
    disabled_actions: Option<ActionSet>,
}

/// Parses actions that can be disabled; any other value is refused with what is accepted.
fn parse_actions<'de, D: Deserializer<'de>>(given: D) -> Result<Option<ActionSet>, D::Error> {
    let Some(words) = Option::<Vec<String>>::deserialize(given)? else { return Ok(None) };
    let switchable = || Action::ALL.into_iter().filter(|action| *action != Action::ColocatedPrefill);
    let off = |word: &String| {
        switchable().find(|action| action.as_str() == word).ok_or_else(|| {
            let accepted = switchable().map(Action::as_str).collect::<Vec<_>>().join(", ");
            let why = match Action::ColocatedPrefill.as_str() == word {
                true => "cannot be disabled, because every step must be servable",
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

/// Routing mode and rollout share of this router.
#[utoipa::path(get, path = "/ownerserve/v1/routing", tag = "routing",
    responses((status = 200, description = "The routing in force.", body = RoutingResource)))]
pub(super) async fn routing(State(routing): State<RoutingSources>) -> Json<RoutingResource> {
    Json(routing.live.get().into())
}

/// Changes the routing of this router, until its next start.
#[utoipa::path(put, path = "/ownerserve/v1/routing", tag = "routing", request_body = RoutingPatch,
    responses((status = 200, description = "The routing from now on.", body = RoutingResource)))]
pub(super) async fn set_routing(
    State(routing): State<RoutingSources>,
    body: Result<JsonBody<RoutingPatch>, Problem>,
) -> Result<Json<RoutingResource>, Problem> {
    let accepted = "accepted is {\"mode\": \"active\" | \"shadow\" | \"bypass\", \"rollout_percent\": 0 to 100, \
                    \"disabled_actions\": [\"artifact_fetch\", ...]}";
    let JsonBody(change) = body.map_err(|problem| problem.with_accepted(accepted))?;
    let before = routing.live.get();
    let share = change.rollout_percent.unwrap_or(before.rollout_percent);
    routing.live.set(change.mode.unwrap_or(before.mode), share);
    if let Some(disabled) = change.disabled_actions {
        let before = routing.live.set_disabled(disabled);
        before.without(disabled).iter().for_each(|action| routing.guardrail.reset(action));
    }
    let after = routing.live.get();
    if after.mode != RoutingMode::Active || u8::from(after.rollout_percent) == 0 {
        // Nothing is compared any more, so nothing else would end the guardrail's reports about placement.
        let placement = Action::ALL.into_iter().filter(|action| !can_be_disabled(*action));
        placement.for_each(|action| routing.guardrail.reset(action));
    }
    tracing::info!(?before, ?after, "an operator changed the routing");
    Ok(Json(after.into()))
}

/// Changes the routing of this router, as PUT does.
#[utoipa::path(patch, path = "/ownerserve/v1/routing", tag = "routing", request_body = RoutingPatch,
    responses((status = 200, description = "The routing from now on.", body = RoutingResource)))]
pub(super) async fn patch_routing(
    routing: State<RoutingSources>,
    body: Result<JsonBody<RoutingPatch>, Problem>,
) -> Result<Json<RoutingResource>, Problem> {
    set_routing(routing, body).await
}

/// Filter of decisions; all conditions must hold.
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DecisionQuery {
    /// Most decisions in the answer.
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
    step_kind: Option<StepKind>,
    /// Served by this action, as `artifact_fetch`.
    #[param(value_type = Option<String>)]
    action: Option<Action>,
    /// With this worker in a leg.
    #[param(value_type = Option<WorkerIdSchema>)]
    worker: Option<WorkerId>,
    /// With this outcome: `complete`, `rejected`, `interrupted`, `client_disconnected` or `failed`.
    #[param(value_type = Option<String>)]
    outcome: Option<RequestOutcome>,
    /// That arrived at this time or later.
    since: Option<UtcTime>,
    /// That arrived at this time or before.
    until: Option<UtcTime>,
    /// Whose first token took longer; of an answer without a first token, as one that was not streamed, whose whole time did.
    #[param(value_type = Option<TimeSpan>)]
    slower_than: Option<DurationInput>,
}

impl DecisionQuery {
    fn filter(self) -> DecisionFilter {
        let Self { session, tenant, model, mode, step_kind: step, action, worker, outcome, .. } = self;
        let (since, until) = (self.since.map(UtcTime::unix_ms), self.until.map(UtcTime::unix_ms));
        let slower_than = self.slower_than.map(|span| Micros::of(span.0));
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
            outcome,
            since,
            until,
            slower_than,
        }
    }
}

/// Receipts, newest first.
#[derive(Serialize, ToSchema)]
pub(super) struct DecisionList {
    /// Each with what was known, every candidate with its cost, the choice, every attempt, and what was observed.
    #[schema(value_type = Vec<Object>)]
    decisions: Vec<Box<RawValue>>,
    /// Whether everything in memory and on disk was searched, or enough was found. Where not, `since` and `until` narrow the
    /// search.
    search_complete: bool,
}

/// Runs blocking work on a blocking thread.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    let failed =
        |_| Problem::new(ProblemKind::Internal, "The search for decisions broke off; the router's log has more.");
    tokio::task::spawn_blocking(work).await.map_err(failed)
}

/// The newest decisions of this router, from memory and its log on disk; those that ended last come first.
#[utoipa::path(get, path = "/ownerserve/v1/decisions", tag = "routing", params(DecisionQuery),
    responses((status = 200, description = "Receipts, the newest first.", body = DecisionList)))]
pub(super) async fn decisions(
    State(routing): State<RoutingSources>,
    QueryParams(query): QueryParams<DecisionQuery>,
) -> Result<Json<DecisionList>, Problem> {
    let (limit, wanted) = (query.limit.unwrap_or(100).into(), query.filter());
    let decisions = routing.decisions;
    let found = run_blocking(move || decisions.search(&wanted, limit)).await?;
    Ok(Json(DecisionList { decisions: found.receipts, search_complete: found.complete }))
}

/// One decision, by the id that the client saw in `x-request-id`.
#[utoipa::path(get, path = "/ownerserve/v1/decisions/{request}", tag = "routing",
    params(("request" = RequestIdSchema, Path)),
    responses((status = 200, description = "The receipt, whole.", body = Object)))]
pub(super) async fn decision(
    State(routing): State<RoutingSources>,
    PathId(request): PathId<RequestId>,
) -> Result<Json<Box<RawValue>>, Problem> {
    let decisions = routing.decisions;
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
