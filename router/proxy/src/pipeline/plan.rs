//! Classify and plan: determines the kind of a step, and the cheapest permitted way to serve it.
//!
//! The planner crate decides; this module assembles its inputs and applies the routing mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use planner::{
    AdmissionRequest, DisabledFeatures, PlanningError, PlanningInputs, Policy, RequestProfile, RequestTransferBlocker,
    SelectionRule, TransferPermission, classify as kind_of,
};
use prometheus::HistogramVec;
use vocabulary::{KvIndexState, Tokens, WorkerId, WorkerView};

use super::ResumeConfig;
use super::resume_blocker::resume_blocker;
use crate::error::ApiError;
use crate::kv_reservation::{KvReservation, LockedOccupancy, OccupancyTracker};
use crate::outliers::{SharedOutlierDetector, TrialGuard};
use crate::prefix_replication::{PrefixReplicationConfig, PrefixReplicator};
use crate::request_states::{ClassifiedStep, LocatedRequest, PlannedStep, step_facts};
use crate::retries::{RetryBudget, RetryBudgetConfig, TenantShare};
use crate::routing::LiveRouting;
use crate::telemetry::metrics::RequestMetrics;
use crate::tenant_isolation::TenantIsolation;
use crate::transfer_check::TransferCheckState;
use crate::worker_client::WorkerClient;
use vocabulary::RoutingMode;
use vocabulary::truncated;

/// The planner's policy, and the state that is kept between steps. Clones share it.
#[derive(Clone, Debug)]
pub struct PlannerState {
    planner: Arc<Policy>,
    occupancy: OccupancyTracker,
    /// Budget for retries.
    pub retries: Arc<RetryBudget>,
    /// Detector of workers whose requests fail.
    pub outliers: SharedOutlierDetector,
    /// Decides which prefixes are replicated before a step asks for them.
    pub prefix_replication: Arc<PrefixReplicator>,
}

/// Sections of the configuration that the planner's state is built from.
#[derive(Clone, Copy, Debug)]
pub struct PlannerStateConfig<'a> {
    /// Prices and switches of the planner.
    pub planner: &'a Policy,
    /// Budget for retries.
    pub retries: RetryBudgetConfig,
    /// When a prefix is replicated before a step asks for it.
    pub prefix_replication: PrefixReplicationConfig,
}

impl PlannerState {
    /// Builds the state as configured. One tenant gets `share` of the retry budget.
    pub fn new(settings: PlannerStateConfig<'_>, share: TenantShare, outliers: SharedOutlierDetector) -> Self {
        let policy = settings.planner;
        Self {
            planner: Arc::new(Policy { policy: SelectionRule::LowestCost, ..policy.clone() }),
            occupancy: OccupancyTracker::new(policy.admission),
            retries: Arc::new(RetryBudget::new(settings.retries, share)),
            outliers,
            prefix_replication: Arc::new(PrefixReplicator::new(settings.prefix_replication)),
        }
    }

    /// Returns the planner's policy.
    pub fn planner_policy(&self) -> &Arc<Policy> {
        &self.planner
    }

    /// Returns the occupancy tracker, which includes the admission queue.
    pub fn occupancy(&self) -> &OccupancyTracker {
        &self.occupancy
    }
}

/// What classifying a step reads.
#[derive(Debug)]
pub struct ClassifyStage {
    pub(super) planner: Arc<Policy>,
    pub(super) occupancy: OccupancyTracker,
    pub(super) routing: Arc<LiveRouting>,
    pub(super) transfer_checks: Arc<TransferCheckState>,
    /// Which broken streams resume at another worker.
    pub(super) resume: ResumeConfig,
}

/// What planning a step reads, and what a plan takes.
#[derive(Debug)]
pub struct PlanStage {
    pub(super) planner: Arc<Policy>,
    /// The rule for steps that the planner does not route.
    pub(super) bypass: Policy,
    pub(super) round_robin: AtomicU64,
    pub(super) occupancy: OccupancyTracker,
    pub(super) outliers: SharedOutlierDetector,
    pub(super) client: WorkerClient,
    pub(super) isolation: TenantIsolation,
    pub(super) retries: Arc<RetryBudget>,
    pub(super) requests: RequestMetrics,
    /// How long steps waited for admission.
    pub(super) admission_wait: HistogramVec,
}

/// What a plan holds until its attempt is over: nothing while its step waits.
#[derive(Debug, Default)]
pub struct PlanGuards {
    /// The step's KV reservation; `None` where its worker has left the fleet.
    pub reservation: Option<KvReservation>,
    /// Trials of ejected workers that the plan contains; `None` where there are none.
    pub trials: Option<TrialGuard>,
}

/// Determines the kind of the step.
pub fn classify(stage: &ClassifyStage, located: LocatedRequest) -> ClassifiedStep {
    let identified = &located.identified;
    let prompt = identified.total_tokens();
    let step = kind_of(&step_facts(&located), &stage.planner.thresholds);
    let request = &identified.request;
    let ask = RequestProfile {
        model: request.model.clone(),
        adapter: None,
        prompt_tokens: prompt,
        longest_prompt_tokens: (!identified.other_chains.is_empty()).then(|| identified.longest_prompt()),
        expected_output_tokens: stage.occupancy.expected_answer(located.session.id, request.max_answer),
        expected_growth_tokens: stage.occupancy.expected_growth(),
        block_size: identified.prompt.chain.block,
        transfers: transfers(&located),
    };
    let routing = stage.routing.get();
    let (mode, arm) = (routing.mode_of(located.affinity_key), routing.arm_of(located.affinity_key));
    let disabled_links = stage.transfer_checks.disabled_links();
    let resume_blocker = resume_blocker(&located.identified, stage.resume);
    ClassifiedStep {
        mode,
        arm,
        disabled: routing.disabled,
        disabled_links,
        kind: step,
        request: ask,
        located,
        resume_blocker,
    }
}

fn transfers(located: &LocatedRequest) -> TransferPermission {
    use prefix::FallbackReason::Multimodal;
    let bar = located.identified.request.transfer_bar.or(match located.identified.fallback_reason() {
        None => None,
        Some(Multimodal) => Some(RequestTransferBlocker::MultimodalContent),
        Some(_) => Some(RequestTransferBlocker::TokenIdsUnavailable),
    });
    bar.map_or(TransferPermission::Allowed, TransferPermission::Forbidden)
}

/// Plans a step, and reserves KV memory for it unless it is to wait. `failed` lists the workers that failed already in
/// this request.
pub fn plan(
    stage: &PlanStage,
    step: &ClassifiedStep,
    failed: &[WorkerId],
) -> Result<(PlannedStep, PlanGuards), ApiError> {
    let barred = stage.isolation.barred_workers();
    match barred.is_empty() {
        true => plan_and_reserve(stage, step, failed),
        false => plan_and_reserve(stage, step, &[failed, &barred].concat()).map_err(|error| match error {
            ApiError::WorkerFailed { .. } if failed.is_empty() => {
                ApiError::SaltsIgnored { model: truncated(&step.request.model.0) }
            }
            error => error,
        }),
    }
}

fn plan_and_reserve(
    stage: &PlanStage,
    step: &ClassifiedStep,
    failed: &[WorkerId],
) -> Result<(PlannedStep, PlanGuards), ApiError> {
    let PlanStage { occupancy: account, outliers, .. } = stage;
    account.reconcile(stage.client.fleet());
    // Planned, admitted and reserved under one lock: the next step sees what this one takes, trials included.
    let mut now = account.lock();
    let mut ejected = outliers.lock().excluded(&step.located.workers, Instant::now());
    ejected.retain(|worker| !failed.contains(worker));
    let mut planned = match ejected.is_empty() {
        true => decide(stage, step, (failed, &now)),
        // An ejected worker is better than none.
        false => decide(stage, step, (&[failed, &ejected].concat(), &now))
            .map(|planned| PlannedStep { ejected, ..planned })
            .or_else(|_| decide(stage, step, (failed, &now))),
    }?;
    if may_queue(step, (failed, &planned))
        && let Some((asking, verdict)) = &mut planned.admission
    {
        *verdict = Some(now.admission_queue().admit(step.located.identified.request.incoming.id, *asking));
    }
    if planned.must_wait() {
        return Ok((planned, PlanGuards::default()));
    }
    let trials = TrialGuard::begin(outliers, planned.plan.workers());
    let reservation = account.reserve(now, step, &planned.plan);
    Ok((planned, PlanGuards { reservation, trials }))
}

/// Whether a step may be queued: not where the fallback policy serves it, after a failed attempt, or where the target's
/// KV index is not exact, so that the cached part of its prompt is only a guess.
fn may_queue(step: &ClassifiedStep, (failed, planned): (&[WorkerId], &PlannedStep)) -> bool {
    let is_exact = |view: &WorkerView| view.id == planned.plan.target() && view.kv_index_state == KvIndexState::Exact;
    step.mode == RoutingMode::Active && failed.is_empty() && step.located.workers.iter().any(is_exact)
}

/// Returns the plan to execute, and the planner's decision where it was asked; reserves nothing.
fn decide(
    stage: &PlanStage,
    step: &ClassifiedStep,
    (excluded, account): (&[WorkerId], &LockedOccupancy<'_>),
) -> Result<PlannedStep, ApiError> {
    let shapes = stage.client.pool().shapes();
    let mut pinned = step.located.session.clone();
    pinned.id = step.located.affinity_key;
    let shortened = std::cell::RefCell::new(None);
    let decide = |policy: &Policy, session, turn| {
        let planned = |request: &RequestProfile| {
            let inputs = PlanningInputs {
                step: step.kind,
                request,
                attention: step.located.identified.model.attention.as_deref(),
                session,
                workers: &step.located.workers,
                shapes: &shapes,
                overlaps: &step.located.overlaps,
                occupancy: planner::OccupancyView { model: account.occupancy(), now: account.now },
                excluded,
                policy,
                disabled: DisabledFeatures { actions: step.disabled, links: &step.disabled_links },
                round_robin_index: turn,
            };
            let decision = planner::plan(&inputs)?;
            let (memory, asking) = match policy.policy {
                SelectionRule::LowestCost => (
                    account.occupancy().recorded_memory(&inputs, &decision),
                    Some(AdmissionRequest::of(&inputs, &decision)),
                ),
                _ => (Vec::new(), None),
            };
            Ok((decision, memory, asking))
        };
        match planned(&step.request) {
            // The token count is only estimated from bytes: let the engine decide whether the prompt fits.
            Err(PlanningError::TooLong { longest }) if step.located.identified.fallback_reason().is_some() => {
                let ask = RequestProfile {
                    prompt_tokens: longest - Tokens(1),
                    longest_prompt_tokens: None,
                    expected_output_tokens: Tokens(1),
                    ..step.request.clone()
                };
                planned(shortened.borrow_mut().insert(ask))
            }
            planned => planned,
        }
        .map_err(|why| no_plan_error(why, step))
    };
    let own = || decide(&stage.planner, &step.located.session, 0);
    let next = || stage.round_robin.fetch_add(1, Ordering::Relaxed);
    let bypass = || decide(&stage.bypass, &pinned, next()).map(|(decision, ..)| decision.plan);
    let (plan, decision) = match step.mode {
        RoutingMode::Active => {
            let own = own()?;
            (own.0.plan, Some(own))
        }
        RoutingMode::Bypass => (bypass()?, None),
        // In shadow mode a planning error must not affect the answer.
        RoutingMode::Shadow => (bypass()?, own().ok()),
    };
    let planned = decision.map(|(decision, memory, asking)| (Some(decision), memory, asking));
    Ok(PlannedStep::of(plan, planned.unwrap_or_default(), (shortened.into_inner(), excluded)))
}

fn no_plan_error(why: PlanningError, step: &ClassifiedStep) -> ApiError {
    match why {
        // Until every worker has been asked once for its models, nobody can say that a model does not exist.
        PlanningError::UnknownModel { model } if all_models_known(&step.located.workers) => {
            ApiError::UnknownModel { model: truncated(&model.0) }
        }
        PlanningError::UnknownModel { model } => ApiError::NoWorker { model: truncated(&model.0) },
        PlanningError::NoneReady => ApiError::NoWorker { model: truncated(&step.request.model.0) },
        PlanningError::AllExcluded => {
            ApiError::WorkerFailed { detail: "every worker that could serve this failed".into() }
        }
        PlanningError::TooLong { longest } => ApiError::TooLong {
            param: step.located.identified.request.endpoint.input(),
            longest,
            prompt: step.request.longest_prompt_tokens.unwrap_or(step.request.prompt_tokens),
        },
    }
}

fn all_models_known(workers: &[WorkerView]) -> bool {
    !workers.is_empty() && workers.iter().all(|worker| !worker.models.is_empty())
}
