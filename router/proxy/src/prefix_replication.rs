//! Prefix replication: while a session is between two steps, its prefix is copied to the worker where its next step
//! would be cheaper.
//!
//! `planner::plan_prefix_replication` decides, with the same prices as for steps. One copy runs at a time, within a
//! bandwidth limit, never from or to a busy worker. It is only a replica: the next step's own commit moves ownership.

mod idle_sessions;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ownership::ledger::LocateQuery;
use parking_lot::Mutex;
use planner::{
    Action, ChosenReplication, DisabledFeatures, OccupancyView, PlanningInputs, Policy, ReplicationLimits,
    ReplicationSkipReason, SessionView, StepFootprint, plan_prefix_replication,
};
use vocabulary::{Blocks, ByteCount, Owner, SessionId, Tokens, WorkerId, WorkerView, transfer_time};
use workers_shim::engine_api::TokenUsage;
use workers_shim::events::SharedIndex;
use workers_shim::fleet::Fleet;

pub use idle_sessions::PredictedStep;
use idle_sessions::ReplicationProgress;

use crate::catalog::Catalog;
use crate::kv_reservation::OccupancyTracker;
use crate::ledger_access::LedgerAccess;
use crate::outliers::SharedOutlierDetector;
use crate::prefix_mover::{PrefixMover, PrefixRelocation};
use crate::prompts::RetainedPrompt;
use crate::receipt::AttemptEvent;
use crate::request_states::ClassifiedStep;
use crate::routing::LiveRouting;
use crate::telemetry::metrics::InterStepKvMetrics;
use crate::transfer_check::TransferCheckState;
use crate::worker_pool::WorkerPool;
use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::RoutingMode;

/// Time between two checks of the sessions.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Sessions examined per check: each costs two plans.
const MAX_SESSIONS_PER_CHECK: usize = 64;

/// Sessions that wait for their next step; `None` where replication is disabled.
#[derive(Debug)]
pub struct PrefixReplicator(Option<Mutex<idle_sessions::IdleSessions>>);

/// A worthwhile copy, and what it is for.
struct ReplicationJob {
    session: SessionId,
    predicted: Arc<PredictedStep>,
    replication: ChosenReplication,
    source: Owner,
    target: Owner,
    /// What the target already holds of it, and the target's capacity.
    footprint: StepFootprint,
}

impl PrefixReplicator {
    /// Creates the replicator as configured.
    pub fn new(config: PrefixReplicationConfig) -> Self {
        Self(config.enabled.then(Mutex::default))
    }

    /// Records that a step has ended, which `worker` answered.
    pub(crate) fn record_step_end(
        &self,
        metrics: &InterStepKvMetrics,
        (step, kept): (&ClassifiedStep, &Arc<RetainedPrompt>),
        (worker, usage): (WorkerId, Option<TokenUsage>),
    ) {
        let Some(gaps) = self.0.as_ref().filter(|_| step.mode == RoutingMode::Active) else { return };
        let mut ask = step.request.clone();
        ask.prompt_tokens += usage.map_or(Tokens::ZERO, |usage| usage.completion);
        let expected = PredictedStep { step: step.kind, request: ask, prompt: kept.clone() };
        let used = gaps.lock().record_step_end(step.located.session.id, (expected, worker), Instant::now());
        let outcome = used.map(|used| if used { "used" } else { "unused" });
        outcome.into_iter().for_each(|outcome| metrics.prefix_replications.with_label_values(&[outcome]).inc());
    }
}

/// The handles that choosing and running copies use.
#[derive(Debug)]
pub struct ReplicationParts {
    /// Sessions that wait for their next step.
    pub replicator: Arc<PrefixReplicator>,
    /// Most bytes of KV that are copied per second, on average.
    pub bandwidth: u64,
    /// The planner's policy.
    pub planner: Arc<Policy>,
    /// KV occupancy of the workers.
    pub occupancy: OccupancyTracker,
    /// Detector of workers whose requests fail.
    pub outliers: SharedOutlierDetector,
    /// Routing mode.
    pub routing: Arc<LiveRouting>,
    /// The ledger.
    pub ledger: LedgerAccess,
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// The listed workers, for their shapes.
    pub listed_workers: Arc<WorkerPool>,
    /// The models.
    pub catalog: Arc<Catalog>,
    /// Which worker holds which blocks.
    pub index: SharedIndex,
    /// Links that are disabled.
    pub transfer_checks: Arc<TransferCheckState>,
    /// Moves the prefixes.
    pub mover: PrefixMover,
    /// Counts copies.
    pub metrics: InterStepKvMetrics,
}

/// Runs worthwhile copies, as long as the router runs.
pub async fn run(task: Arc<ReplicationParts>) {
    let Some(gaps) = &task.replicator.0 else { return };
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        // An operator may have changed the mode meanwhile.
        if task.routing.get().mode != RoutingMode::Active {
            continue;
        }
        let due = gaps.lock().due(MAX_SESSIONS_PER_CHECK, Instant::now());
        let chosen = due.into_iter().filter_map(|(session, expected)| {
            let chosen = choose_replication(&task, session, expected);
            chosen.inspect_err(|why| tracing::debug!(%session, reason = why.as_str(), "nothing is sent ahead")).ok()
        });
        let Some(chosen) = chosen.max_by_key(|chosen| chosen.replication.saves - chosen.replication.costs) else {
            continue;
        };
        let begun = Instant::now();
        let tried = execute(&task, &chosen).await;
        gaps.lock().record_attempt(chosen.session, &chosen.predicted, tried);
        if tried != ReplicationProgress::Failed {
            tokio::time::sleep(transfer_time(chosen.replication.bytes, task.bandwidth).saturating_sub(begun.elapsed()))
                .await;
        }
    }
}

/// Chooses the copy for a session's next step.
fn choose_replication(
    task: &ReplicationParts,
    id: SessionId,
    expected: Arc<PredictedStep>,
) -> Result<ReplicationJob, ReplicationSkipReason> {
    let PredictedStep { step, request: ask, prompt: kept } = &*expected;
    let (view, workers) = (task.ledger.directory().view(), task.fleet.snapshot());
    let record = view.session(id).ok_or(ReplicationSkipReason::NoOwner)?;
    if view.intents(id).next().is_some() {
        return Err(ReplicationSkipReason::NotInGap);
    }
    let model = task.catalog.model(&kept.model);
    let query = LocateQuery {
        scope: model.scope(&kept.tenant),
        session: Some(id),
        chain: &kept.chain,
        shared_prefix: Blocks::ZERO,
    };
    let found = view.locate(query);
    let owner = view.session_owner(&record).filter(|owner| view.is_live(*owner));
    let session = SessionView {
        owner,
        epoch: record.epoch,
        sealed: found.known_blocks(),
        replicas: found.sealed.as_ref().map_or_else(Vec::new, |sealed| sealed.holders(owner)),
        ..SessionView::new(id)
    };
    let overlaps = task.index.overlaps_of_chain(&kept.chain);
    let (routing, shapes) = (task.routing.get(), task.listed_workers.shapes());
    let ejected = task.outliers.lock().excluded(&workers, Instant::now());
    let (barred, account) = (task.transfer_checks.disabled_links(), task.occupancy.lock());
    let inputs = PlanningInputs {
        step: *step,
        request: ask,
        attention: model.attention.as_deref(),
        session: &session,
        workers: &workers,
        shapes: &shapes,
        overlaps: &overlaps,
        occupancy: OccupancyView { model: account.occupancy(), now: account.now },
        excluded: &ejected,
        policy: &task.planner,
        disabled: DisabledFeatures { actions: routing.disabled, links: &barred },
        round_robin_index: 0,
    };
    let moving = plan_prefix_replication(&inputs, &ReplicationLimits::default())?;
    drop(account);
    let at = |id: WorkerId| workers.iter().find(|view| view.id == id).ok_or(ReplicationSkipReason::NoTarget);
    let owner = |view: &WorkerView, rank| Owner { worker: view.id, incarnation: view.incarnation, rank };
    let (from, to) = (at(moving.from)?, at(moving.to)?);
    let has = overlaps.iter().filter(|one| (one.worker, one.rank) == (moving.to, moving.to_rank)).map(|one| one.blocks);
    let found = has.max().unwrap_or_default().tokens(ask.block_size);
    let footprint =
        StepFootprint { tokens: moving.blocks.tokens(ask.block_size), cached: found, capacity: to.capacity.kv };
    let (source, target) = (owner(from, moving.from_rank), owner(to, moving.to_rank));
    Ok(ReplicationJob { session: id, predicted: expected, replication: moving, source, target, footprint })
}

/// Copies the prefix, and returns the outcome.
async fn execute(task: &ReplicationParts, chosen: &ReplicationJob) -> ReplicationProgress {
    let ReplicationJob { session, predicted: expected, replication: moving, source, target, footprint } = chosen;
    let relocation = PrefixRelocation {
        blocks: moving.blocks,
        bytes: moving.bytes,
        source: *source,
        target: *target,
        action: Action::ArtifactFetch,
    };
    let event = task.mover.relocate(&expected.prompt, relocation).await;
    let metrics = &task.metrics;
    let (from, to, saves_ms) = (moving.from, moving.to, moving.saves.0 / 1000);
    if let Some(event) = event.filter(|event| *event != AttemptEvent::SourceRecomputed) {
        tracing::info!(%session, %from, %to, event = event.as_ref(), "nothing was sent ahead of a step");
        metrics.prefix_replications.with_label_values(&["failed"]).inc();
        return ReplicationProgress::Failed;
    }
    tracing::debug!(%session, %from, %to, bytes = moving.bytes.0, saves_ms, "a prefix was sent ahead of a step");
    metrics.prefix_replications.with_label_values(&["sent"]).inc();
    metrics.replicated_bytes.inc_by(moving.bytes.0);
    task.occupancy.record_copy(*target, *session, *footprint);
    ReplicationProgress::Sent(moving.to)
}

/// Whether prefixes are replicated between steps, and at which rate.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixReplicationConfig {
    /// Enables replication.
    pub enabled: bool,
    /// Maximum average rate of replicated KV, per second.
    #[default(ByteCount::mebibytes(256))]
    pub bandwidth: ByteCount,
}

impl PrefixReplicationConfig {
    /// Returns the setting that is out of range, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        (!self.bandwidth.is_bandwidth()).then_some(("prefix_replication.bandwidth", ByteCount::ACCEPTED_BANDWIDTH))
    }
}
