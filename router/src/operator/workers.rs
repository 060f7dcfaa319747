//! `/ownerserve/v1/workers`: each worker as the planner sees it, with its lease and the state of its KV events.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use ownership::LedgerView;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{
    Bytes, EngineSpeed, Incarnation, KvIndexState, KvLink, ModelId, WorkerCapacity, WorkerHealth, WorkerId, WorkerLoad,
    WorkerRole, WorkerView,
};
use workers_shim::events::{EventCounts, EventSourceCount, InexactReason};
use workers_shim::fleet::{Confidence, SpeedConfidence};

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{PathId, QueryParams};
use super::leases::LeaseStatus;
use super::paging::{PageCursor, PageQuery};
use super::problem::Problem;
use super::schemas::{HealthSchema, KvIndexStateSchema, RoleSchema, WorkerIdSchema};
use crate::app_state::AppState;
use crate::calibration::PredictionDrift;
use crate::discovery::WorkerSource;
use crate::outliers::Ejection;

/// One worker: what is seen of it, what the ledger holds of it, and what came of its events.
#[derive(Serialize, ToSchema)]
struct WorkerResource {
    #[serde(flatten)]
    seen: WorkerStatus,
    /// What it can do and does.
    #[serde(flatten)]
    able: WorkerPerformance,
    /// Its lease; none when the ledger does not know it.
    lease: Option<LeaseStatus>,
    /// Where it tells its events: one place a rank.
    event_sources: EventSourceCounts,
    /// Why its blocks are not known exactly, and what to do about it; none where they are.
    doubt: Option<String>,
    /// What came of its events since this process started.
    events: Option<EventStatistics>,
    /// That it takes no requests, or is on trial, because requests failed there; none of one that is well.
    ejected: Option<EjectionStatus>,
    /// Whether its first tokens come when prices say; none before its first step.
    foretold: Option<PredictionDrift>,
}

/// A worker that is left out because requests failed there.
#[derive(Serialize, ToSchema)]
struct EjectionStatus {
    /// Why: `consecutive_failures`, `failure_percentage` or `trial_failed`.
    #[schema(value_type = String)]
    cause: &'static str,
    /// How often it was; less the longer it was well in between.
    times: u32,
    /// Whether requests find out just now if it is well.
    on_trial: bool,
    /// How long until the next trial may begin, in milliseconds.
    trial_in_ms: u64,
}

impl From<Ejection> for EjectionStatus {
    fn from(ejected: Ejection) -> Self {
        let Ejection { cause, ejections: times, .. } = ejected;
        let trial_in = ejected.time_to_trial(Instant::now());
        let trial_in_ms = u64::try_from(trial_in.as_millis()).unwrap_or(u64::MAX);
        Self { cause: cause.into(), times, on_trial: ejected.is_on_trial(), trial_in_ms }
    }
}

/// Event sources.
#[derive(Serialize, ToSchema)]
struct EventSourceCounts {
    /// Configured, or told by the worker; 0 while it is not reached, or tells none that can be used.
    configured: usize,
    /// Of these, the ones that are heard.
    connected: usize,
}

impl From<EventSourceCount> for EventSourceCounts {
    fn from(EventSourceCount { configured, connected }: EventSourceCount) -> Self {
        Self { configured, connected }
    }
}

/// Who it is and how it is.
#[derive(Serialize, ToSchema)]
struct WorkerStatus {
    #[schema(value_type = WorkerIdSchema)]
    id: WorkerId,
    /// Its base URL.
    endpoint: Arc<str>,
    /// Who lists it.
    source: WorkerSource,
    /// Which life of it.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    #[schema(value_type = RoleSchema)]
    role: WorkerRole,
    /// Models and adapters that it serves.
    #[schema(value_type = Vec<String>)]
    models: Arc<[ModelId]>,
    /// Data-parallel ranks.
    ranks: u16,
    /// Whether it takes work.
    #[schema(value_type = HealthSchema)]
    health: WorkerHealth,
    /// What is known of its blocks.
    #[schema(value_type = KvIndexStateSchema)]
    knowledge: KvIndexState,
}

/// What it can do and does.
#[derive(Serialize, ToSchema)]
struct WorkerPerformance {
    #[schema(value_type = LoadSchema)]
    load: WorkerLoad,
    #[schema(value_type = CapacitySchema)]
    capacity: WorkerCapacity,
    #[schema(value_type = SpeedsSchema)]
    speeds: EngineSpeed,
    /// KV that a token takes there.
    #[schema(value_type = u64)]
    kv_bytes_per_token: Bytes,
    /// How it receives KV; none when it cannot.
    #[schema(value_type = Option<LinkSchema>)]
    link: Option<KvLink>,
    /// How sure speeds and link are.
    confidence: EstimateConfidence,
}

/// How sure what was learnt of a worker is.
#[derive(Serialize, ToSchema)]
struct EstimateConfidence {
    prefill: ConfidenceInterval,
    decode_step: ConfidenceInterval,
    link_fixed: ConfidenceInterval,
    link_rate: ConfidenceInterval,
}

/// How sure an estimate is.
#[derive(Serialize, ToSchema)]
struct ConfidenceInterval {
    /// What it was learnt from; with none it is the profile's.
    samples: u64,
    /// The truth is within this factor of it, up or down, in 95 of 100 cases; none of fewer than five samples.
    within: Option<f64>,
}

impl From<Confidence> for ConfidenceInterval {
    fn from(Confidence { samples, factor: within }: Confidence) -> Self {
        Self { samples, within }
    }
}

impl From<SpeedConfidence> for EstimateConfidence {
    fn from(SpeedConfidence { prefill, decode_step, link_fixed, link_rate }: SpeedConfidence) -> Self {
        let (prefill, decode_step) = (prefill.into(), decode_step.into());
        Self { prefill, decode_step, link_fixed: link_fixed.into(), link_rate: link_rate.into() }
    }
}

macro_rules! word {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(ToSchema)]
        #[expect(dead_code, reason = "describes how vocabulary writes it; the document is made from its fields")]
        struct $name { $($(#[$field_doc])* $field: $type),* }
    };
}

word! {
    /// The last scrape plus what this router dispatched and saw finished since.
    LoadSchema {
        /// Requests in the batch.
        running: u32,
        /// Requests that wait for a place in it.
        waiting: u32,
        /// Prompt tokens that are still to be computed.
        backlog: u64,
        /// KV blocks in use, 0 to 1.
        kv_usage: f64,
    }
}
word! {
    /// What it can hold; 0 is unknown.
    CapacitySchema {
        /// Tokens of KV in device memory.
        kv: u64,
        /// Tokens in one of the engine's own blocks.
        block: u64,
        /// Longest prompt and answer together.
        context: u64,
    }
}
word! {
    /// How fast it is.
    SpeedsSchema {
        /// Prompt tokens computed a second when nothing else runs.
        prefill_tokens_per_second: f64,
        /// Microseconds of one decode step of a small batch.
        decode_step: u64,
        /// Microseconds that one more running request adds to it.
        decode_slowdown: u64,
    }
}
word! {
    /// How KV comes to it from others.
    LinkSchema {
        /// Workers can exchange KV only when these are equal.
        fabric: String,
        /// Microseconds of any transfer, however small.
        fixed: u64,
        /// Rate after that.
        bytes_per_second: f64,
    }
}

/// Counts of what came over a worker's event stream.
#[derive(Serialize, ToSchema)]
struct EventStatistics {
    batches: u64,
    events: u64,
    gaps: u64,
    replays: u64,
    undecodable: u64,
    unplaced: u64,
    restarts: u64,
    adopted: u64,
    engine_blocks: u64,
    lag_ms: u64,
}

impl From<EventCounts> for EventStatistics {
    fn from(counts: EventCounts) -> Self {
        let EventCounts { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, blocks, lag } =
            counts;
        let (engine_blocks, lag_ms) = (blocks, lag.0 / 1000);
        Self { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, engine_blocks, lag_ms }
    }
}

impl WorkerResource {
    fn new(gateway: &AppState, view: &LedgerView, worker: &WorkerView) -> Self {
        let WorkerView { id, endpoint, incarnation, role, models, ranks, health, .. } = worker.clone();
        let WorkerView { load, capacity, speeds, kv_bytes_per_token, link, .. } = worker.clone();
        // The worker may have left since the snapshot.
        let source = gateway.workers.worker(id).map_or(WorkerSource::Static, |member| member.source);
        let (knowledge, doubt) = knowledge_and_cause(gateway, worker);
        let confidence = gateway.fleet().confidence(id).unwrap_or_default().into();
        Self {
            lease: view.worker(id).map(|record| LeaseStatus::new(view, record)),
            event_sources: gateway.fleet().event_sources(id).unwrap_or_default().into(),
            doubt,
            events: gateway.fleet().events(id).map(EventStatistics::from),
            ejected: gateway.policies.outliers.lock().ejection(worker).map(EjectionStatus::from),
            foretold: gateway.decisions.calibration.of(id),
            seen: WorkerStatus { id, endpoint, source, incarnation, role, models, ranks, health, knowledge },
            able: WorkerPerformance { load, capacity, speeds, kv_bytes_per_token, link, confidence },
        }
    }
}

/// Returns how well a worker's blocks are known, and the most important reason if not exactly.
fn knowledge_and_cause(gateway: &AppState, worker: &WorkerView) -> (KvIndexState, Option<String>) {
    let agreement = &gateway.caches.prefix_cache.tokenizer_drift;
    let doubted = worker.models.iter().find(|model| agreement.is_suspected_mismatch(model, worker.id));
    let doubt = || match worker.health {
        // Further problems show once it answers.
        WorkerHealth::Unreachable => Some(InexactReason::Unreachable.to_string()),
        _ => gateway.fleet().inexact_reason(worker.id).map(|doubt| doubt.to_string()),
    };
    if gateway.isolation.keys().has_several_tenants()
        && let Some(doubt) = gateway.isolation.salt_proofs().problem(worker.id)
    {
        return (KvIndexState::Degraded, Some(doubt.to_owned()));
    }
    match (worker.knowledge, doubted) {
        (KvIndexState::Exact, None) => {
            (KvIndexState::Exact, gateway.isolation.salt_proofs().untold(worker.id).map(str::to_owned))
        }
        (KvIndexState::Exact, Some(model)) => {
            let why = format!(
                "its counts of prompts of {model} are not those that are made here, or it finds more than its events tell, so that \
                 steps of it are planned as guesses: `degraded` of /readyz says which, and what to do"
            );
            (KvIndexState::Fallback, Some(why))
        }
        (knowledge, _) => {
            let all = [gateway.isolation.salt_proofs().untold(worker.id).map(str::to_owned), doubt()];
            (knowledge, all.into_iter().flatten().reduce(|all, next| format!("{all} {next}")))
        }
    }
}

/// Which workers are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WorkerFilter {
    /// Of this role.
    #[param(value_type = Option<RoleSchema>, inline)]
    role: Option<WorkerRole>,
    /// In this state.
    #[param(value_type = Option<HealthSchema>, inline)]
    health: Option<WorkerHealth>,
}

/// Workers, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct WorkerPage {
    workers: Vec<WorkerResource>,
    #[serde(flatten)]
    listed: PageCursor,
}

/// The workers that are listed to this router, by id.
#[utoipa::path(get, path = "/ownerserve/v1/workers", tag = "workers", params(WorkerFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of workers as the planner sees them, and where the next one begins.",
        body = LedgerResponse<WorkerPage>)))]
pub(super) async fn workers(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<WorkerFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<WorkerPage>, Problem> {
    let page = page.page::<WorkerId>("workers", &filter, view.applied())?;
    let mut fleet = gateway.fleet().snapshot().to_vec();
    fleet.sort_by_key(|worker| worker.id);
    let behind = fleet.iter().filter(|worker| page.after.is_none_or(|after| worker.id > after));
    let line = |worker: &WorkerView| {
        let accepted = filter.role.is_none_or(|role| worker.role == role)
            && filter.health.is_none_or(|health| worker.health == health);
        (worker.id, accepted.then(|| WorkerResource::new(&gateway, &view, worker)).into_iter().collect())
    };
    let lines: Vec<_> = behind.map(line).collect();
    let (workers, listed) = page.fill(lines.into_iter());
    Ok(LedgerResponse::new(&view, WorkerPage { workers, listed }))
}

/// One worker.
#[derive(Serialize, ToSchema)]
pub(super) struct WorkerResponse {
    worker: WorkerResource,
}

/// One of the workers that are listed to this router.
#[utoipa::path(get, path = "/ownerserve/v1/workers/{id}", tag = "workers",
    params(("id" = WorkerIdSchema, Path), ConsistencyQuery),
    responses((
        status = 200, description = "The worker as the planner sees it, with its lease.",
        body = LedgerResponse<WorkerResponse>)))]
pub(super) async fn worker(
    State(gateway): State<Arc<AppState>>,
    ReadView(view): ReadView,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<WorkerResponse>, Problem> {
    let fleet = gateway.fleet().snapshot();
    let found = fleet.iter().find(|worker| worker.id == id);
    let missing = || {
        let detail =
            format!("{id} is not listed to this router. GET /ownerserve/v1/leases lists all that the ledger knows.");
        Problem::not_found(detail)
    };
    let worker = WorkerResource::new(&gateway, &view, found.ok_or_else(missing)?);
    Ok(LedgerResponse::new(&view, WorkerResponse { worker }))
}
