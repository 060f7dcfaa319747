//! One worker as this step sees it: whether it may take part, how fast it is and how long it makes others wait.

use std::cell::OnceCell;

use vocabulary::{Micros, Owner, Tokens, WorkerHealth, WorkerRole, WorkerView};

use crate::cost::{ExaminedVictimTotals, SharedTargetCost};
use crate::kv_occupancy::{RankHeadroom, SessionLookup};
use crate::recovery_cost::RecoveryCostModel;
use crate::{
    CandidateRefusal, ParallelShape, PlanningInputs, Policy, PrefillTimeModel, RequestProfile,
    cached_prefix::CachedPrefix, micros::micros, rendezvous,
};

/// A worker with sanitized numbers: rates are finite and positive, usage is 0 to 1.
pub(crate) struct WorkerCandidate<'a> {
    pub(crate) view: &'a WorkerView,
    /// Why the worker may not take part at all; `Draining` and `PrefillOnly` are separate, since they only exclude it
    /// as a target.
    pub(crate) refusal: Option<CandidateRefusal>,
    pub(crate) prefix: CachedPrefix,
    pub(crate) speed: SpeedAndLoad,
    /// Cost of getting back KV that was evicted here.
    pub(crate) recovery_cost: RecoveryCostModel,
    /// Parallel shape of the worker, if known.
    pub(crate) shape: Option<ParallelShape>,
    pub(crate) headroom: RankHeadroom<'a>,
    /// Cost of evicting all examined victims, computed on first use.
    pub(crate) victim_totals: OnceCell<ExaminedVictimTotals>,
    /// Part of the cost that all candidates at this target share, computed on first use.
    pub(crate) base_cost: OnceCell<SharedTargetCost>,
    /// Rendezvous weight of the worker for the session.
    pub(crate) rendezvous_weight: u64,
}

/// Speed and queue of a worker, in microseconds.
#[derive(Clone, Copy)]
pub(crate) struct SpeedAndLoad {
    /// Prefill time when nothing else runs.
    pub(crate) rate: PrefillTimeModel,
    /// One decode step of the current batch: step + slowdown x running.
    pub(crate) step: Micros,
    /// Time until new work starts: backlog / prefill rate, plus half of a decode step when the batch is not empty.
    /// Waiting requests are part of the backlog; they join the batch together, not one step after another.
    pub(crate) queue: Micros,
    /// Answers being generated; 0 at a worker that does not decode.
    pub(crate) running_answers: f64,
    /// Share of KV blocks in use; 1 when it is NaN.
    pub(crate) usage: f64,
}

impl<'a> WorkerCandidate<'a> {
    pub(crate) fn new(
        (inputs, session_lookup): (&PlanningInputs<'a>, SessionLookup<'a>),
        view: &'a WorkerView,
        prefix: CachedPrefix,
    ) -> Self {
        let speed = SpeedAndLoad::of(view, inputs.policy);
        let at = Owner { worker: view.id, incarnation: view.incarnation, rank: prefix.rank };
        Self {
            view,
            headroom: session_lookup.headroom(at, view.capacity.kv, prefix.cached),
            victim_totals: OnceCell::new(),
            base_cost: OnceCell::new(),
            refusal: participation_refusal(inputs, view),
            prefix,
            shape: inputs.shape(view.id),
            speed,
            recovery_cost: RecoveryCostModel::of((view, speed.rate), &inputs.policy.tiers, inputs.attention),
            rendezvous_weight: rendezvous::weight(inputs.session.id, view.id),
        }
    }

    /// Returns whether the worker may be a target, possibly as a last resort while draining: it decodes, and nothing
    /// refuses it.
    pub(crate) fn can_serve(&self) -> bool {
        self.refusal.is_none() && self.view.role.decodes()
    }

    /// Returns whether the worker answers prompts that it computed itself.
    pub(crate) fn serves_alone(&self) -> bool {
        serves_alone(self.view)
    }

    /// Expected growth of the session at this worker: zero where it already has KV, and an eighth of the memory at
    /// most.
    pub(crate) fn expected_growth(&self, inputs: &PlanningInputs<'_>) -> Tokens {
        match self.headroom.session_tokens {
            Tokens::ZERO => inputs
                .request
                .expected_growth_tokens
                .min(inputs.policy.max_session_growth_tokens)
                .min(Tokens(self.view.capacity.kv.0 / 8)),
            _ => Tokens::ZERO,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.view.health == WorkerHealth::Draining
    }
}

impl SpeedAndLoad {
    pub(crate) fn of(view: &WorkerView, policy: &Policy) -> Self {
        const MIN_RATE: f64 = 1.0;
        let is_valid = |rate: f64| rate.is_finite() && rate > 0.0;
        let rate = [view.speeds.prefill_tokens_per_second, policy.default_prefill_tokens_per_second];
        let token = 1e6 / rate.into_iter().find(|rate| is_valid(*rate)).unwrap_or(MIN_RATE);
        let load = &view.load;
        let step = view.speeds.decode_step + view.speeds.decode_slowdown * u64::from(load.running);
        let in_flight = u64::from(load.running > 0);
        Self {
            rate: PrefillTimeModel::new(token, policy.attention_cost_doubling_tokens),
            step,
            queue: micros(load.backlog.0 as f64 * token) + Micros(step.0 * in_flight / 2),
            running_answers: if view.role.decodes() { f64::from(load.running) } else { 0.0 },
            usage: if load.kv_usage.is_nan() { 1.0 } else { load.kv_usage.clamp(0.0, 1.0) },
        }
    }
}

/// Returns whether a worker answers prompts that it computed itself.
pub(crate) fn serves_alone(view: &WorkerView) -> bool {
    view.link.as_ref().is_none_or(|link| link.carries.computes_prompts())
}

fn participation_refusal(inputs: &PlanningInputs<'_>, view: &WorkerView) -> Option<CandidateRefusal> {
    let serves = |model| view.models.contains(model);
    if !serves(&inputs.request.model) || !inputs.request.adapter.as_ref().is_none_or(serves) {
        Some(CandidateRefusal::ModelNotServed)
    } else if view.health == WorkerHealth::Unreachable {
        Some(CandidateRefusal::NotReady)
    } else if inputs.excluded.contains(&view.id) {
        Some(CandidateRefusal::FailedEarlierAttempt)
    } else {
        length_refusal(inputs.request, view)
    }
}

/// Returns why prompt and answer exceed the worker's limits, if they do. Unknown limits (0) never do.
pub(crate) fn length_refusal(request: &RequestProfile, view: &WorkerView) -> Option<CandidateRefusal> {
    // A prefill-only worker generates one token per prompt, whatever the answer's length.
    let answer = if view.role == WorkerRole::Prefill { Tokens(1) } else { request.expected_output_tokens };
    let prompt = request.longest_prompt_tokens.unwrap_or(request.prompt_tokens);
    let exceeds = |limit: Tokens| limit > Tokens::ZERO && prompt + answer > limit;
    if exceeds(view.capacity.context) {
        Some(CandidateRefusal::ExceedsContext)
    } else if exceeds(view.capacity.kv) {
        Some(CandidateRefusal::ExceedsKvCapacity)
    } else {
        None
    }
}
