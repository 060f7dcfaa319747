//! Classify and plan: what kind of step it is, and the cheapest way to serve it that is allowed.
//!
//! The thinking is the planner's; here its inputs are put together and the mode is obeyed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use planner::{
    ActionSet, AdmissionDecision, AdmissionRequest, BarredLink, Decision, DisabledFeatures, Plan, PlanningError,
    PlanningInputs, PlanningRequest, Policy, RankMemory, SelectionRule, StepFacts, StepKind, TransferObstacle,
    TransferPermission, classify as kind_of,
};
use vocabulary::{KvIndexState, Tokens, WorkerId, WorkerView};

use super::kv_reservation::{KvReservation, OccupancyGuard, OccupancyTracker};
use super::locate::LocatedRequest;
use super::resume_blocker::{ResumeBlocker, resume_blocker};
use super::routing::RoutingMode;
use crate::app_state::AppState;
use crate::config::{Config, ResumeConfig};
use crate::error::{ApiError, truncated};
use crate::guardrail::Arm;
use crate::outliers::{Outliers, Trials};
use crate::prefix_replication::PrefixReplicator;
use crate::retries::{RetryBudget, TenantShare};

/// The two policies that may be in force for a step, and what is kept between steps.
#[derive(Debug)]
pub struct RoutingPolicies {
    planner: Policy,
    bypass: Policy,
    round_robin: AtomicU64,
    occupancy: OccupancyTracker,
    /// What tries after the first may cost.
    pub retries: RetryBudget,
    /// Workers whose requests fail.
    pub outliers: Arc<Mutex<Outliers>>,
    /// What may be sent before a step asks for it.
    pub prefix_replication: PrefixReplicator,
    /// Which broken streams go on elsewhere.
    pub resume: ResumeConfig,
}

impl RoutingPolicies {
    /// As configured: the planner's policy, and the rule that routes where the planner does not. One tenant gets `share` of the
    /// tries after the first.
    pub fn new(config: &Config, share: TenantShare) -> Self {
        let policy = &config.planner;
        let planner = Policy { rule: SelectionRule::Own, ..policy.clone() };
        let bypass = Policy { rule: config.steering.bypass, ..policy.clone() };
        Self {
            planner,
            bypass,
            round_robin: AtomicU64::new(0),
            occupancy: OccupancyTracker::new(policy.admission),
            retries: RetryBudget::new(config.retries, share),
            outliers: Arc::new(Mutex::new(Outliers::new(config.outliers))),
            prefix_replication: PrefixReplicator::new(config.ahead),
            resume: config.resume,
        }
    }

    /// The planner's own.
    pub fn planner_policy(&self) -> &Policy {
        &self.planner
    }

    /// The account of whose KV lies where, and who waits because of it.
    pub fn occupancy(&self) -> &OccupancyTracker {
        &self.occupancy
    }
}

/// A step with its kind.
#[derive(Debug)]
pub struct ClassifiedStep {
    /// The step.
    pub located: LocatedRequest,
    /// Its kind.
    pub kind: StepKind,
    /// What is asked of the workers.
    pub ask: PlanningRequest,
    /// Who decides for it.
    pub mode: RoutingMode,
    /// On which side of the guardrail's comparison its session is.
    pub arm: Option<Arm>,
    /// Actions that are switched off at run time.
    pub disabled: ActionSet,
    /// What keeps a broken answer from going on elsewhere.
    pub resume_blocker: Option<ResumeBlocker>,
    /// Links that are barred.
    pub barred_links: Vec<BarredLink>,
}

/// What a step is to be done by.
#[derive(Debug)]
pub struct PlannedStep {
    /// What is carried out.
    pub plan: Plan,
    /// The planner's decision, where it was asked; in mode `shadow` its plan is not the one that is carried out.
    pub decision: Option<Decision>,
    /// What the planner was asked in place of the step's own lengths, which were only guessed.
    pub shortened_ask: Option<PlanningRequest>,
    /// Who was left out: who had failed before in this request, and who is ejected.
    pub excluded: Vec<WorkerId>,
    /// Of these, who is ejected.
    pub ejected: Vec<WorkerId>,
    /// What the account said of whose KV would be pushed out.
    pub rank_memory: Vec<RankMemory>,
    /// What starting would cost others, where the planner was asked, and what it said to that where a step may wait.
    pub admission: Option<(AdmissionRequest, Option<AdmissionDecision>)>,
    /// Who finds out by it whether they are well; none where nobody does.
    pub trials: Option<Trials>,
    /// The step's place in the account of whose KV lies where; none while it is to wait.
    pub reservation: Option<KvReservation>,
}

impl PlannedStep {
    /// Nothing of it is begun or noted.
    fn of(
        plan: Plan,
        (decision, rank_memory, asking): (Option<Decision>, Vec<RankMemory>, Option<AdmissionRequest>),
        (shortened_ask, excluded): (Option<PlanningRequest>, &[WorkerId]),
    ) -> Self {
        let admission = asking.map(|asking| (asking, None));
        let (excluded, ejected, trials, reservation) = (excluded.to_vec(), Vec::new(), None, None);
        Self { plan, decision, shortened_ask, excluded, ejected, rank_memory, admission, trials, reservation }
    }

    /// Whether the step is to wait, and be planned anew.
    pub fn must_wait(&self) -> bool {
        matches!(self.admission, Some((_, Some(AdmissionDecision::Hold { .. }))))
    }
}

/// What makes the kind of a step.
pub fn step_facts(located: &LocatedRequest) -> StepFacts {
    StepFacts {
        prompt: located.identified.total_tokens(),
        reused: located.reused_tokens(),
        relation: located.relation,
        idle: located.idle,
    }
}

/// Gives the step its kind.
pub fn classify(gateway: &AppState, located: LocatedRequest) -> ClassifiedStep {
    let prefixed = &located.identified;
    let prompt = prefixed.total_tokens();
    let step = kind_of(&step_facts(&located), &gateway.policies.planner.thresholds);
    let request = &prefixed.request;
    let ask = PlanningRequest {
        model: request.model.clone(),
        adapter: None,
        prompt,
        longest: (!prefixed.other_chains.is_empty()).then(|| prefixed.longest_prompt()),
        answer: gateway.policies.occupancy.expected_answer(located.session.id, request.max_answer),
        growth: gateway.policies.occupancy.expected_growth(),
        block: prefixed.prompt.chain.block,
        transfers: transfers(&located),
    };
    let steering = gateway.routing.get();
    let (mode, arm) = (steering.mode_of(located.affinity_key), steering.arm_of(located.affinity_key));
    let barred = gateway.decisions.transfer_checks.barred_links();
    let unresumable = resume_blocker(&located.identified, gateway.policies.resume);
    ClassifiedStep {
        mode,
        arm,
        disabled: steering.disabled,
        barred_links: barred,
        kind: step,
        ask,
        located,
        resume_blocker: unresumable,
    }
}

fn transfers(located: &LocatedRequest) -> TransferPermission {
    use prefix::FallbackReason::Multimodal;
    let bar = located.identified.request.transfer_bar.or(match located.identified.fallback_reason() {
        None => None,
        Some(Multimodal) => Some(TransferObstacle::MultimodalContent),
        Some(_) => Some(TransferObstacle::UnknownTokens),
    });
    bar.map_or(TransferPermission::Allowed, TransferPermission::Forbidden)
}

/// Plans a step, and notes where it goes unless it is to wait. `failed` did already in this request.
pub fn plan(gateway: &AppState, step: &ClassifiedStep, failed: &[WorkerId]) -> Result<PlannedStep, ApiError> {
    let barred = gateway.barred_workers();
    match barred.is_empty() {
        true => plan_and_reserve(gateway, step, failed),
        false => plan_and_reserve(gateway, step, &[failed, &barred].concat()).map_err(|error| match error {
            ApiError::WorkerFailed { .. } if failed.is_empty() => {
                ApiError::SaltsIgnored { model: truncated(&step.ask.model.0) }
            }
            error => error,
        }),
    }
}

fn plan_and_reserve(gateway: &AppState, step: &ClassifiedStep, failed: &[WorkerId]) -> Result<PlannedStep, ApiError> {
    let RoutingPolicies { occupancy: account, outliers, .. } = &gateway.policies;
    account.reconcile(gateway.fleet());
    // Planned, admitted and noted at one moment: the next one finds what this one takes, trials included.
    let mut now = account.lock();
    let mut ejected = outliers.lock().excluded(&step.located.workers, Instant::now());
    ejected.retain(|worker| !failed.contains(worker));
    let mut planned = match ejected.is_empty() {
        true => decide(gateway, step, (failed, &now)),
        // Rather one that may be sick than none.
        false => decide(gateway, step, (&[failed, &ejected].concat(), &now))
            .map(|planned| PlannedStep { ejected, ..planned })
            .or_else(|_| decide(gateway, step, (failed, &now))),
    }?;
    if may_queue(step, (failed, &planned))
        && let Some((asking, verdict)) = &mut planned.admission
    {
        *verdict = Some(now.admission_queue().admit(step.located.identified.request.incoming.id, *asking));
    }
    if !planned.must_wait() {
        planned.trials = Trials::begin(outliers, planned.plan.workers());
        planned.reservation = account.reserve(now, step, &planned.plan);
    }
    Ok(planned)
}

/// Whether a step may be told to wait: not where the bypass serves it, where it has failed already, and where it is only
/// guessed what it finds and so what it takes.
fn may_queue(step: &ClassifiedStep, (failed, planned): (&[WorkerId], &PlannedStep)) -> bool {
    let is_exact = |view: &WorkerView| view.id == planned.plan.target() && view.knowledge == KvIndexState::Exact;
    step.mode == RoutingMode::Own && failed.is_empty() && step.located.workers.iter().any(is_exact)
}

/// What is carried out, and the planner's decision where it was asked; not in the account yet.
fn decide(
    gateway: &AppState,
    step: &ClassifiedStep,
    (excluded, account): (&[WorkerId], &OccupancyGuard<'_>),
) -> Result<PlannedStep, ApiError> {
    let (policies, shapes) = (&gateway.policies, gateway.worker_pool.shapes());
    let mut pinned = step.located.session.clone();
    pinned.id = step.located.affinity_key;
    let shortened = std::cell::RefCell::new(None);
    let decide = |policy: &Policy, session, turn| {
        let planned = |ask: &PlanningRequest| {
            let inputs = PlanningInputs {
                step: step.kind,
                request: ask,
                attention: step.located.identified.model.attention.as_deref(),
                session,
                workers: &step.located.workers,
                shapes: &shapes,
                overlaps: &step.located.overlaps,
                occupancy: planner::OccupancyView { model: account.occupancy(), now: account.now },
                excluded,
                policy,
                disabled: DisabledFeatures { actions: step.disabled, links: &step.barred_links },
                round_robin_index: turn,
            };
            let decision = planner::plan(&inputs)?;
            let (memory, asking) = match policy.rule {
                SelectionRule::Own => (
                    account.occupancy().recorded_memory(&inputs, &decision),
                    Some(AdmissionRequest::of(&inputs, &decision)),
                ),
                _ => (Vec::new(), None),
            };
            Ok((decision, memory, asking))
        };
        match planned(&step.ask) {
            // Tokens were only guessed from bytes: whether they fit is the engine's to say.
            Err(PlanningError::TooLong { longest }) if step.located.identified.fallback_reason().is_some() => {
                let ask = PlanningRequest {
                    prompt: longest - Tokens(1),
                    longest: None,
                    answer: Tokens(1),
                    ..step.ask.clone()
                };
                planned(shortened.borrow_mut().insert(ask))
            }
            planned => planned,
        }
        .map_err(|why| no_plan_error(why, step))
    };
    let own = || decide(&policies.planner, &step.located.session, 0);
    let next = || policies.round_robin.fetch_add(1, Ordering::Relaxed);
    let bypass = || decide(&policies.bypass, &pinned, next()).map(|(decision, ..)| decision.plan);
    let (plan, decision) = match step.mode {
        RoutingMode::Own => {
            let own = own()?;
            (own.0.plan, Some(own))
        }
        RoutingMode::Sticky => (bypass()?, None),
        // Whatever the planner says in the shadow, the answer does not depend on it.
        RoutingMode::Shadow => (bypass()?, own().ok()),
    };
    let told = decision.map(|(decision, memory, asking)| (Some(decision), memory, asking));
    Ok(PlannedStep::of(plan, told.unwrap_or_default(), (shortened.into_inner(), excluded)))
}

fn no_plan_error(why: PlanningError, step: &ClassifiedStep) -> ApiError {
    match why {
        // Before every worker was asked once, nobody can say that a model does not exist.
        PlanningError::UnknownModel { model } if all_models_known(&step.located.workers) => {
            ApiError::UnknownModel { model: truncated(&model.0) }
        }
        PlanningError::UnknownModel { model } => ApiError::NoWorker { model: truncated(&model.0) },
        PlanningError::NoneReady => ApiError::NoWorker { model: truncated(&step.ask.model.0) },
        PlanningError::AllExcluded => {
            ApiError::WorkerFailed { detail: "every worker that could serve this failed".into() }
        }
        PlanningError::TooLong { longest } => ApiError::TooLong {
            param: step.located.identified.request.endpoint.input(),
            longest,
            prompt: step.ask.longest.unwrap_or(step.ask.prompt),
        },
    }
}

fn all_models_known(workers: &[WorkerView]) -> bool {
    !workers.is_empty() && workers.iter().all(|worker| !worker.models.is_empty())
}
