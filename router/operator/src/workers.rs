//! `/ownerserve/v1/workers`: each worker as the planner sees it, with its lease and the state of its KV events.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use ownership::LedgerView;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{
    Bytes, EngineSpeed, Incarnation, KvIndexState, KvLink, KvLinkCapability, ModelId, Tokens, WorkerCapacity,
    WorkerHealth, WorkerId, WorkerLoad, WorkerRole, WorkerView,
};
use workers_shim::events::{EventCounts, EventSourceCount, InexactReason};
use workers_shim::fleet::{Confidence, SpeedConfidence};

use super::consistency::{ConsistencyQuery, LedgerResponse, ReadView};
use super::extractors::{PathId, QueryParams};
use super::leases::LeaseStatus;
use super::paging::{PageMeta, PageQuery};
use super::problem::Problem;
use super::schemas::{HealthSchema, KvIndexStateSchema, WorkerIdSchema, WorkerRoleSchema};
use super::sources::FleetSources;
use proxy::calibration::PredictionAccuracy;
use proxy::discovery::WorkerSource;
use proxy::outliers::Ejection;
use vocabulary::TimeSpan;

/// One worker as this router sees it, with its lease and its KV events.
#[derive(Serialize, ToSchema)]
#[schema(as = Worker)]
struct WorkerResource {
    #[serde(flatten)]
    seen: WorkerSummary,
    /// Load, capacity and speed.
    #[serde(flatten)]
    able: WorkerPerformance,
    /// Its lease; null when the ledger does not know the worker.
    lease: Option<LeaseStatus>,
    /// Where it publishes its KV events: one source for each rank.
    kv_event_sources: EventSourceCounts,
    /// Why the index of its blocks is not exact, and what to do; null where it is exact.
    kv_index_reason: Option<String>,
    /// Counts of its KV events since this process started.
    kv_event_counts: Option<EventStatistics>,
    /// Its ejection because requests failed there; null of a healthy worker.
    ejection: Option<EjectionStatus>,
    /// How well its time to first token is predicted; null before its first step.
    ttft_prediction: Option<PredictionAccuracy>,
}

/// Ejection of a worker whose requests failed.
#[derive(Serialize, ToSchema)]
#[schema(as = Ejection)]
struct EjectionStatus {
    /// `consecutive_failures`, `failure_percentage` or `trial_failed`.
    #[schema(value_type = String)]
    reason: &'static str,
    /// Number of ejections; it decreases while the worker is healthy.
    count: u32,
    /// Whether trial requests find out now if it is healthy.
    probing: bool,
    /// Time until the next trial may begin.
    next_probe_in: TimeSpan,
}

impl From<Ejection> for EjectionStatus {
    fn from(ejection: Ejection) -> Self {
        Self {
            reason: ejection.reason.into(),
            count: ejection.ejections,
            probing: ejection.is_on_trial(),
            next_probe_in: TimeSpan::whole_millis(ejection.time_to_trial(Instant::now())),
        }
    }
}

/// Sources of a worker's KV events.
#[derive(Serialize, ToSchema)]
struct EventSourceCounts {
    /// Configured, or reported by the worker; 0 while it is not reached, or reports none that can be used.
    configured: usize,
    /// Of these, those that are connected.
    connected: usize,
}

impl From<EventSourceCount> for EventSourceCounts {
    fn from(EventSourceCount { configured, connected }: EventSourceCount) -> Self {
        Self { configured, connected }
    }
}

/// Identity and health of a worker.
#[derive(Serialize, ToSchema)]
struct WorkerSummary {
    #[schema(value_type = WorkerIdSchema)]
    id: WorkerId,
    /// Its base URL.
    endpoint: Arc<str>,
    /// Source that lists it.
    source: WorkerSource,
    /// Incarnation of the worker.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    #[schema(value_type = WorkerRoleSchema)]
    role: WorkerRole,
    /// Models and adapters that it serves.
    #[schema(value_type = Vec<String>)]
    models: Arc<[ModelId]>,
    /// Data-parallel ranks.
    ranks: u16,
    /// Whether it accepts work.
    #[schema(value_type = HealthSchema)]
    health: WorkerHealth,
    /// How reliable the index of its blocks is.
    #[schema(value_type = KvIndexStateSchema)]
    kv_index_state: KvIndexState,
}

/// Load, capacity and speed of a worker.
#[derive(Serialize, ToSchema)]
struct WorkerPerformance {
    load: LoadResource,
    capacity: CapacityResource,
    speeds: EngineSpeedResource,
    /// Bytes of KV per token.
    #[schema(value_type = u64)]
    kv_bytes_per_token: Bytes,
    /// How it receives KV from other workers; null when it cannot.
    link: Option<WorkerLinkResource>,
    /// How certain speeds and link are.
    confidence: EstimateConfidence,
}

/// How certain the estimates of a worker are.
#[derive(Serialize, ToSchema)]
struct EstimateConfidence {
    prefill: EstimateUncertainty,
    decode_step: EstimateUncertainty,
    link_latency: EstimateUncertainty,
    link_bandwidth: EstimateUncertainty,
}

/// How certain an estimate is.
#[derive(Serialize, ToSchema)]
struct EstimateUncertainty {
    /// Measurements behind it; with none it is the profile's.
    samples: u64,
    /// In 95 of 100 cases the true value is at most this factor above or below; null with fewer than five samples.
    error_factor_p95: Option<f64>,
}

impl From<Confidence> for EstimateUncertainty {
    fn from(Confidence { samples, factor: error_factor_p95 }: Confidence) -> Self {
        Self { samples, error_factor_p95 }
    }
}

impl From<SpeedConfidence> for EstimateConfidence {
    fn from(SpeedConfidence { prefill, decode_step, link_latency, link_bandwidth }: SpeedConfidence) -> Self {
        let (prefill, decode_step) = (prefill.into(), decode_step.into());
        Self { prefill, decode_step, link_latency: link_latency.into(), link_bandwidth: link_bandwidth.into() }
    }
}

/// Load of a worker: the last scrape, plus what this router dispatched and saw finish since.
#[derive(Serialize, ToSchema)]
#[schema(as = Load)]
struct LoadResource {
    /// Requests in the batch.
    running: u32,
    /// Requests that wait for a place in it.
    waiting: u32,
    /// Prompt tokens that are not computed yet.
    #[schema(value_type = u64)]
    pending_prefill_tokens: Tokens,
    /// Fraction of KV blocks in use, 0 to 1.
    kv_cache_usage: f64,
}

impl From<WorkerLoad> for LoadResource {
    fn from(load: WorkerLoad) -> Self {
        let WorkerLoad { running, waiting, backlog, kv_usage } = load;
        Self { running, waiting, pending_prefill_tokens: backlog, kv_cache_usage: kv_usage }
    }
}

/// Capacity of a worker; 0 is unknown.
#[derive(Serialize, ToSchema)]
#[schema(as = Capacity)]
struct CapacityResource {
    /// Tokens of KV in device memory.
    #[schema(value_type = u64)]
    kv_tokens: Tokens,
    /// Tokens in one of the engine's own blocks.
    #[schema(value_type = u64)]
    block_size: Tokens,
    /// Most tokens of prompt and answer together.
    #[schema(value_type = u64)]
    max_model_len: Tokens,
}

impl From<WorkerCapacity> for CapacityResource {
    fn from(capacity: WorkerCapacity) -> Self {
        let WorkerCapacity { kv, block, context } = capacity;
        Self { kv_tokens: kv, block_size: block, max_model_len: context }
    }
}

/// Speed of a worker: measured where possible, else from its profile.
#[derive(Serialize, ToSchema)]
#[schema(as = Speeds)]
struct EngineSpeedResource {
    /// Prompt tokens computed per second while nothing else runs.
    prefill_tokens_per_second: f64,
    /// Duration of one decode step of a small batch.
    decode_step: TimeSpan,
    /// What each further running request adds to it.
    decode_step_per_request: TimeSpan,
}

impl From<EngineSpeed> for EngineSpeedResource {
    fn from(speed: EngineSpeed) -> Self {
        let EngineSpeed { prefill_tokens_per_second, decode_step, decode_slowdown } = speed;
        let decode_step_per_request = decode_slowdown.into();
        Self { prefill_tokens_per_second, decode_step: decode_step.into(), decode_step_per_request }
    }
}

/// How a worker receives KV from other workers.
#[derive(Serialize, ToSchema)]
#[schema(as = Link)]
struct WorkerLinkResource {
    /// Workers can exchange KV only when this is equal.
    fabric: Arc<str>,
    /// Fixed time of any transfer.
    latency: TimeSpan,
    /// Transfer rate after that.
    bytes_per_second: f64,
    #[schema(inline)]
    direction: LinkCapability,
}

/// What a link can transfer.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum LinkCapability {
    /// Prefixes, to the worker and from it.
    Both,
    /// Only whole prompts together with their requests, to the worker.
    WholePrompts,
    /// Prefixes to the worker, and nothing from it.
    ReceiveOnly,
}

impl From<KvLink> for WorkerLinkResource {
    fn from(link: KvLink) -> Self {
        let KvLink { fabric, fixed, bytes_per_second, carries } = link;
        let direction = match carries {
            KvLinkCapability::Prefixes => LinkCapability::Both,
            KvLinkCapability::Prompts => LinkCapability::WholePrompts,
            KvLinkCapability::PrefixesIn => LinkCapability::ReceiveOnly,
        };
        Self { fabric, latency: fixed.into(), bytes_per_second, direction }
    }
}

/// Counts of a worker's KV events.
#[derive(Serialize, ToSchema)]
#[schema(as = KvEventCounts)]
struct EventStatistics {
    /// Messages applied.
    batches: u64,
    /// Events in them.
    events: u64,
    /// Gaps in the sequence, each followed by a replay.
    gaps: u64,
    /// Requested replays.
    replays: u64,
    /// Messages that could not be decoded.
    undecodable: u64,
    /// Stored blocks with an unknown parent, and removals of unknown blocks.
    unknown_blocks: u64,
    /// Detected restarts of the engine process.
    engine_restarts: u64,
    /// Snapshots taken over from other routers.
    peer_snapshots: u64,
    /// Engine blocks in the index now.
    engine_blocks: u64,
    /// Delay between the engine's timestamp in the last message and its receipt.
    lag: TimeSpan,
}

impl From<EventCounts> for EventStatistics {
    fn from(counts: EventCounts) -> Self {
        Self {
            batches: counts.batches,
            events: counts.events,
            gaps: counts.gaps,
            replays: counts.replays,
            undecodable: counts.undecodable,
            unknown_blocks: counts.unknown_blocks,
            engine_restarts: counts.engine_restarts,
            peer_snapshots: counts.peer_snapshots,
            engine_blocks: counts.blocks,
            lag: TimeSpan::whole_millis(counts.lag.duration()),
        }
    }
}

impl WorkerResource {
    fn new(sources: &FleetSources, view: &LedgerView, worker: &WorkerView) -> Self {
        let WorkerView { id, endpoint, incarnation, role, models, ranks, health, .. } = worker.clone();
        let WorkerView { load, capacity, speeds, kv_bytes_per_token, link, .. } = worker.clone();
        // The worker may have left since the snapshot.
        let source = sources.workers.worker(id).map_or(WorkerSource::Static, |member| member.source);
        let (kv_index_state, kv_index_reason) = kv_index_state_and_reason(sources, worker);
        let (load, capacity, speeds) = (load.into(), capacity.into(), speeds.into());
        let link = link.map(WorkerLinkResource::from);
        let confidence = sources.workers.fleet().confidence(id).unwrap_or_default().into();
        Self {
            lease: view.worker(id).map(|record| LeaseStatus::new(view, record)),
            kv_event_sources: sources.workers.fleet().event_sources(id).unwrap_or_default().into(),
            kv_index_reason,
            kv_event_counts: sources.workers.fleet().events(id).map(EventStatistics::from),
            ejection: sources.outliers.lock().ejection(worker).map(EjectionStatus::from),
            ttft_prediction: sources.calibration.of(id),
            seen: WorkerSummary { id, endpoint, source, incarnation, role, models, ranks, health, kv_index_state },
            able: WorkerPerformance { load, capacity, speeds, kv_bytes_per_token, link, confidence },
        }
    }
}

/// Returns the state of a worker's KV index, and the most important reason if it is not exact.
fn kv_index_state_and_reason(sources: &FleetSources, worker: &WorkerView) -> (KvIndexState, Option<String>) {
    let agreement = &sources.tokenizer_drift;
    let doubted = worker.models.iter().find(|model| agreement.is_suspected_mismatch(model, worker.id));
    let doubt = || match worker.health {
        // Further problems show once it answers.
        WorkerHealth::Unreachable => Some(InexactReason::Unreachable.to_string()),
        _ => sources.workers.fleet().inexact_reason(worker.id).map(|doubt| doubt.to_string()),
    };
    if sources.isolation.keys().has_several_tenants()
        && let Some(doubt) = sources.isolation.salt_support().problem(worker.id)
    {
        return (KvIndexState::Degraded, Some(doubt.to_owned()));
    }
    match (worker.kv_index_state, doubted) {
        (KvIndexState::Exact, None) => {
            (KvIndexState::Exact, sources.isolation.salt_support().untold(worker.id).map(str::to_owned))
        }
        (KvIndexState::Exact, Some(model)) => {
            let why = format!(
                "its counts of prompts of {model} are not those that are made here, or it finds more than its events tell, so that \
                 steps of it are planned as guesses: `degraded` of /readyz says which, and what to do"
            );
            (KvIndexState::Approximate, Some(why))
        }
        (index_state, _) => {
            let all = [sources.isolation.salt_support().untold(worker.id).map(str::to_owned), doubt()];
            (index_state, all.into_iter().flatten().reduce(|all, next| format!("{all} {next}")))
        }
    }
}

/// Filter of workers.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WorkerFilter {
    /// Of this role.
    #[param(value_type = Option<WorkerRoleSchema>, inline)]
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
    listed: PageMeta,
}

/// The workers that are listed to this router, by id.
#[utoipa::path(get, path = "/ownerserve/v1/workers", tag = "workers", params(WorkerFilter, PageQuery, ConsistencyQuery),
    responses((
        status = 200, description = "A page of workers as the planner sees them, and where the next one begins.",
        body = LedgerResponse<WorkerPage>)))]
pub(super) async fn workers(
    State(sources): State<FleetSources>,
    ReadView(view): ReadView,
    QueryParams(filter): QueryParams<WorkerFilter>,
    QueryParams(page): QueryParams<PageQuery>,
) -> Result<LedgerResponse<WorkerPage>, Problem> {
    let page = page.page::<WorkerId>("workers", &filter, view.applied())?;
    let mut fleet = sources.workers.fleet().snapshot().to_vec();
    fleet.sort_by_key(|worker| worker.id);
    let behind = fleet.iter().filter(|worker| page.after.is_none_or(|after| worker.id > after));
    let line = |worker: &WorkerView| {
        let accepted = filter.role.is_none_or(|role| worker.role == role)
            && filter.health.is_none_or(|health| worker.health == health);
        (worker.id, accepted.then(|| WorkerResource::new(&sources, &view, worker)).into_iter().collect())
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
    State(sources): State<FleetSources>,
    ReadView(view): ReadView,
    PathId(id): PathId<WorkerId>,
) -> Result<LedgerResponse<WorkerResponse>, Problem> {
    let fleet = sources.workers.fleet().snapshot();
    let found = fleet.iter().find(|worker| worker.id == id);
    let missing = || {
        let detail =
            format!("{id} is not listed to this router. GET /ownerserve/v1/leases lists all that the ledger knows.");
        Problem::not_found(detail)
    };
    let worker = WorkerResource::new(&sources, &view, found.ok_or_else(missing)?);
    Ok(LedgerResponse::new(&view, WorkerResponse { worker }))
}
