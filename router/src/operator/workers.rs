//! `/ownerserve/v1/workers`: each worker as the planner sees it, with its lease and what came of its events.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use ownership::View;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use vocabulary::{
    Bytes, Capacity, Health, Incarnation, Knowledge, Link, Load, ModelId, Role, Speeds, WorkerId, WorkerView,
};
use workers_shim::events::{Doubt, EventCounts, SourceCount};
use workers_shim::fleet::{Confidence, SpeedConfidence};

use super::fresh::{Fresh, FreshQuery, Seen};
use super::input::{Asked, Named};
use super::leases::LeaseLine;
use super::paging::{Listed, PageQuery};
use super::problem::Problem;
use super::words::{HealthWord, KnowledgeWord, RoleWord, WorkerWord};
use crate::foretelling::Foretold;
use crate::gateway::Gateway;
use crate::membership::Source;
use crate::outliers::Ejected;

/// One worker: what is seen of it, what the ledger holds of it, and what came of its events.
#[derive(Serialize, ToSchema)]
struct WorkerLine {
    #[serde(flatten)]
    seen: SeenLine,
    /// What it can do and does.
    #[serde(flatten)]
    able: AbleLine,
    /// Its lease; none when the ledger does not know it.
    lease: Option<LeaseLine>,
    /// Where it tells its events: one place a rank.
    event_sources: SourceLine,
    /// Why its blocks are not known exactly, and what to do about it; none where they are.
    doubt: Option<String>,
    /// What came of its events since this process started.
    events: Option<EventLine>,
    /// That it takes no requests, or is on trial, because requests failed there; none of one that is well.
    ejected: Option<EjectedLine>,
    /// Whether its first tokens come when prices say; none before its first step.
    foretold: Option<Foretold>,
}

/// A worker that is left out because requests failed there.
#[derive(Serialize, ToSchema)]
struct EjectedLine {
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

impl From<Ejected> for EjectedLine {
    fn from(ejected: Ejected) -> Self {
        let Ejected { cause, times, .. } = ejected;
        let trial_in = ejected.trial_in(Instant::now());
        let trial_in_ms = u64::try_from(trial_in.as_millis()).unwrap_or(u64::MAX);
        Self { cause: cause.into(), times, on_trial: ejected.is_on_trial(), trial_in_ms }
    }
}

/// Event sources.
#[derive(Serialize, ToSchema)]
struct SourceLine {
    /// Configured, or told by the worker; 0 while it is not reached, or tells none that can be used.
    configured: usize,
    /// Of these, the ones that are heard.
    connected: usize,
}

impl From<SourceCount> for SourceLine {
    fn from(SourceCount { configured, connected }: SourceCount) -> Self {
        Self { configured, connected }
    }
}

/// Who it is and how it is.
#[derive(Serialize, ToSchema)]
struct SeenLine {
    #[schema(value_type = WorkerWord)]
    id: WorkerId,
    /// Its base URL.
    endpoint: Arc<str>,
    /// Who lists it.
    source: Source,
    /// Which life of it.
    #[schema(value_type = u64)]
    incarnation: Incarnation,
    #[schema(value_type = RoleWord)]
    role: Role,
    /// Models and adapters that it serves.
    #[schema(value_type = Vec<String>)]
    models: Arc<[ModelId]>,
    /// Data-parallel ranks.
    ranks: u16,
    /// Whether it takes work.
    #[schema(value_type = HealthWord)]
    health: Health,
    /// What is known of its blocks.
    #[schema(value_type = KnowledgeWord)]
    knowledge: Knowledge,
}

/// What it can do and does.
#[derive(Serialize, ToSchema)]
struct AbleLine {
    #[schema(value_type = LoadWord)]
    load: Load,
    #[schema(value_type = CapacityWord)]
    capacity: Capacity,
    #[schema(value_type = SpeedsWord)]
    speeds: Speeds,
    /// KV that a token takes there.
    #[schema(value_type = u64)]
    kv_bytes_per_token: Bytes,
    /// How it receives KV; none when it cannot.
    #[schema(value_type = Option<LinkWord>)]
    link: Option<Link>,
    /// How sure speeds and link are.
    confidence: SureLine,
}

/// How sure what was learnt of a worker is.
#[derive(Serialize, ToSchema)]
struct SureLine {
    prefill: ConfidenceLine,
    decode_step: ConfidenceLine,
    link_fixed: ConfidenceLine,
    link_rate: ConfidenceLine,
}

/// How sure an estimate is.
#[derive(Serialize, ToSchema)]
struct ConfidenceLine {
    /// What it was learnt from; with none it is the profile's.
    samples: u64,
    /// The truth is within this factor of it, up or down, in 95 of 100 cases; none of fewer than five samples.
    within: Option<f64>,
}

impl From<Confidence> for ConfidenceLine {
    fn from(Confidence { samples, within }: Confidence) -> Self {
        Self { samples, within }
    }
}

impl From<SpeedConfidence> for SureLine {
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
    LoadWord {
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
    CapacityWord {
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
    SpeedsWord {
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
    LinkWord {
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
struct EventLine {
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

impl From<EventCounts> for EventLine {
    fn from(counts: EventCounts) -> Self {
        let EventCounts { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, blocks, lag } =
            counts;
        let (engine_blocks, lag_ms) = (blocks, lag.0 / 1000);
        Self { batches, events, gaps, replays, undecodable, unplaced, restarts, adopted, engine_blocks, lag_ms }
    }
}

impl WorkerLine {
    fn new(gateway: &Gateway, view: &View, worker: &WorkerView) -> Self {
        let WorkerView { id, endpoint, incarnation, role, models, ranks, health, .. } = worker.clone();
        let WorkerView { load, capacity, speeds, kv_bytes_per_token, link, .. } = worker.clone();
        // Between two looks it may have left.
        let source = gateway.worker(id).map_or(Source::Static, |member| member.source);
        let (knowledge, doubt) = known(gateway, worker);
        let confidence = gateway.fleet().confidence(id).unwrap_or_default().into();
        Self {
            lease: view.worker(id).map(|record| LeaseLine::new(view, record)),
            event_sources: gateway.fleet().event_sources(id).unwrap_or_default().into(),
            doubt,
            events: gateway.fleet().events(id).map(EventLine::from),
            ejected: gateway.policies.outliers.lock().ejected(worker).map(EjectedLine::from),
            foretold: gateway.decisions.foretelling.of(id),
            seen: SeenLine { id, endpoint, source, incarnation, role, models, ranks, health, knowledge },
            able: AbleLine { load, capacity, speeds, kv_bytes_per_token, link, confidence },
        }
    }
}

/// How well its blocks are known, and why not better: what is worst of it.
fn known(gateway: &Gateway, worker: &WorkerView) -> (Knowledge, Option<String>) {
    let agreement = &gateway.remembered.identity.agreement;
    let doubted = worker.models.iter().find(|model| agreement.doubts(model, worker.id));
    let doubt = || match worker.health {
        // Whatever else is wrong shows when it answers.
        Health::Unreachable => Some(Doubt::Unreached.to_string()),
        _ => gateway.fleet().doubt(worker.id).map(|doubt| doubt.to_string()),
    };
    if gateway.keys.are_several()
        && let Some(doubt) = gateway.salt_proofs.doubt(worker.id)
    {
        return (Knowledge::Degraded, Some(doubt.to_owned()));
    }
    match (worker.knowledge, doubted) {
        (Knowledge::Exact, None) => (Knowledge::Exact, gateway.salt_proofs.untold(worker.id).map(str::to_owned)),
        (Knowledge::Exact, Some(model)) => {
            let why = format!(
                "its counts of prompts of {model} are not those that are made here, or it finds more than its events tell, so that \
                 steps of it are planned as guesses: `degraded` of /readyz says which, and what to do"
            );
            (Knowledge::Fallback, Some(why))
        }
        (knowledge, _) => {
            let all = [gateway.salt_proofs.untold(worker.id).map(str::to_owned), doubt()];
            (knowledge, all.into_iter().flatten().reduce(|all, next| format!("{all} {next}")))
        }
    }
}

/// Which workers are asked for.
#[derive(Serialize, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WorkerFilter {
    /// Of this role.
    #[param(value_type = Option<RoleWord>, inline)]
    role: Option<Role>,
    /// In this state.
    #[param(value_type = Option<HealthWord>, inline)]
    health: Option<Health>,
}

/// Workers, by id.
#[derive(Serialize, ToSchema)]
pub(super) struct Workers {
    workers: Vec<WorkerLine>,
    #[serde(flatten)]
    listed: Listed,
}

/// The workers that are listed to this router, by id.
#[utoipa::path(get, path = "/ownerserve/v1/workers", tag = "workers", params(WorkerFilter, PageQuery, FreshQuery),
    responses((
        status = 200, description = "A page of workers as the planner sees them, and where the next one begins.",
        body = Fresh<Workers>)))]
pub(super) async fn workers(
    State(gateway): State<Arc<Gateway>>,
    Seen(view): Seen,
    Asked(filter): Asked<WorkerFilter>,
    Asked(page): Asked<PageQuery>,
) -> Result<Fresh<Workers>, Problem> {
    let page = page.page::<WorkerId>("workers", &filter, view.applied())?;
    let mut fleet = gateway.fleet().snapshot().to_vec();
    fleet.sort_by_key(|worker| worker.id);
    let behind = fleet.iter().filter(|worker| page.after.is_none_or(|after| worker.id > after));
    let line = |worker: &WorkerView| {
        let accepted = filter.role.is_none_or(|role| worker.role == role)
            && filter.health.is_none_or(|health| worker.health == health);
        (worker.id, accepted.then(|| WorkerLine::new(&gateway, &view, worker)).into_iter().collect())
    };
    let lines: Vec<_> = behind.map(line).collect();
    let (workers, listed) = page.fill(lines.into_iter());
    Ok(Fresh::new(&view, Workers { workers, listed }))
}

/// One worker.
#[derive(Serialize, ToSchema)]
pub(super) struct OneWorker {
    worker: WorkerLine,
}

/// One of the workers that are listed to this router.
#[utoipa::path(get, path = "/ownerserve/v1/workers/{id}", tag = "workers",
    params(("id" = WorkerWord, Path), FreshQuery),
    responses((
        status = 200, description = "The worker as the planner sees it, with its lease.",
        body = Fresh<OneWorker>)))]
pub(super) async fn worker(
    State(gateway): State<Arc<Gateway>>,
    Seen(view): Seen,
    Named(id): Named<WorkerId>,
) -> Result<Fresh<OneWorker>, Problem> {
    let fleet = gateway.fleet().snapshot();
    let found = fleet.iter().find(|worker| worker.id == id);
    let missing = || {
        let detail =
            format!("{id} is not listed to this router. GET /ownerserve/v1/leases lists all that the ledger knows.");
        Problem::not_found(detail)
    };
    let worker = WorkerLine::new(&gateway, &view, found.ok_or_else(missing)?);
    Ok(Fresh::new(&view, OneWorker { worker }))
}
