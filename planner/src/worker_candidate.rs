//! One worker as this step sees it: whether it may take part, how fast it is and how long it makes others wait.

use std::cell::OnceCell;

use vocabulary::{Micros, Owner, Tokens, WorkerHealth, WorkerRole, WorkerView};

use crate::cost::TargetBaseCost;
use crate::eviction_cost::EvictionCost;
use crate::kv_occupancy::{RankHeadroom, SessionLookup};
use crate::pressure::VictimTotals;
use crate::{
    CandidateRefusal, ComputeRate, ParallelShape, PlanningInputs, PlanningRequest, Policy, cached_prefix::CachedPrefix,
    micros::micros, rendezvous,
};

/// A worker, its numbers made safe: rates are finite and positive, usage lies in 0 to 1.
pub(crate) struct WorkerCandidate<'a> {
    pub(crate) view: &'a WorkerView,
    /// Why it may take no part at all; `DrainFlag` and `PrefillOnly` only bar it as a target.
    pub(crate) refusal: Option<CandidateRefusal>,
    pub(crate) prefix: CachedPrefix,
    pub(crate) speed: WorkerSpeed,
    /// What having again costs here what was pushed out.
    pub(crate) eviction_cost: EvictionCost,
    /// Its parallel shape, where it is known.
    pub(crate) shape: Option<ParallelShape>,
    pub(crate) headroom: RankHeadroom<'a>,
    /// What pushing all its victims out costs, once that was asked for.
    pub(crate) victim_totals: OnceCell<VictimTotals>,
    /// What serving there costs however it is done, once it was asked for.
    pub(crate) base_cost: OnceCell<TargetBaseCost>,
    /// Its rendezvous weight for the session.
    pub(crate) rendezvous_weight: u64,
}

/// Speeds and waits, in microseconds.
#[derive(Clone, Copy)]
pub(crate) struct WorkerSpeed {
    /// To compute prompt tokens when nothing else runs.
    pub(crate) rate: ComputeRate,
    /// One decode step of the batch as it is: step + slowdown x running.
    pub(crate) step: Micros,
    /// Until new work is looked at: backlog / prefill rate, and half of the step in flight when the batch is not empty.
    /// What waits is in the backlog; it joins the batch together, not one step after the other.
    pub(crate) queue: Micros,
    /// Answers that are being generated; 0 where none are.
    pub(crate) running_answers: f64,
    /// KV blocks in use; 1 when it is not a number.
    pub(crate) usage: f64,
}

impl<'a> WorkerCandidate<'a> {
    pub(crate) fn new(
        (inputs, visit): (&PlanningInputs<'a>, SessionLookup<'a>),
        view: &'a WorkerView,
        prefix: CachedPrefix,
    ) -> Self {
        let speed = WorkerSpeed::of(view, inputs.policy);
        let at = Owner { worker: view.id, incarnation: view.incarnation, rank: prefix.rank };
        Self {
            view,
            headroom: visit.headroom(at, view.capacity.kv, prefix.cached),
            victim_totals: OnceCell::new(),
            base_cost: OnceCell::new(),
            refusal: participation_refusal(inputs, view),
            prefix,
            shape: inputs.shape(view.id),
            speed,
            eviction_cost: EvictionCost::of((view, speed.rate), &inputs.policy.tiers, inputs.attention),
            rendezvous_weight: rendezvous::weight(inputs.session.id, view.id),
        }
    }

    /// Whether it decodes, is reached, was not excluded and is long enough: a target, be it draining.
    pub(crate) fn can_serve(&self) -> bool {
        self.refusal.is_none() && self.view.role.decodes()
    }

    /// Whether it answers prompts that it computed itself.
    pub(crate) fn serves_alone(&self) -> bool {
        serves_alone(self.view)
    }

    /// What the session is expected to add there later: where it is new, and an eighth of the memory at most.
    pub(crate) fn expected_growth(&self, inputs: &PlanningInputs<'_>) -> Tokens {
        match self.headroom.own {
            Tokens::ZERO => inputs.request.growth.min(inputs.policy.growth).min(Tokens(self.view.capacity.kv.0 / 8)),
            _ => Tokens::ZERO,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.view.health == WorkerHealth::Draining
    }
}

impl WorkerSpeed {
    pub(crate) fn of(view: &WorkerView, policy: &Policy) -> Self {
        const MIN_RATE: f64 = 1.0;
        let known = |rate: f64| rate.is_finite() && rate > 0.0;
        let rate = [view.speeds.prefill_tokens_per_second, policy.unknown_prefill_tokens_per_second];
        let token = 1e6 / rate.into_iter().find(|rate| known(*rate)).unwrap_or(MIN_RATE);
        let load = &view.load;
        let step = view.speeds.decode_step + view.speeds.decode_slowdown * u64::from(load.running);
        let in_flight = u64::from(load.running > 0);
        Self {
            rate: ComputeRate::new(token, policy.attention_doubles_at),
            step,
            queue: micros(load.backlog.0 as f64 * token) + Micros(step.0 * in_flight / 2),
            running_answers: if view.role.decodes() { f64::from(load.running) } else { 0.0 },
            usage: if load.kv_usage.is_nan() { 1.0 } else { load.kv_usage.clamp(0.0, 1.0) },
        }
    }
}

/// Whether a worker answers prompts that it computed itself.
pub(crate) fn serves_alone(view: &WorkerView) -> bool {
    view.link.as_ref().is_none_or(|link| link.carries.computes_prompts())
}

fn participation_refusal(inputs: &PlanningInputs<'_>, view: &WorkerView) -> Option<CandidateRefusal> {
    let serves = |model| view.models.contains(model);
    if !serves(&inputs.request.model) || !inputs.request.adapter.as_ref().is_none_or(serves) {
        Some(CandidateRefusal::WrongModel)
    } else if view.health == WorkerHealth::Unreachable {
        Some(CandidateRefusal::NotReady)
    } else if inputs.excluded.contains(&view.id) {
        Some(CandidateRefusal::Excluded)
    } else {
        length_refusal(inputs.request, view)
    }
}

/// Whether prompt and answer exceed what a worker takes. Unknown limits (0) do not.
pub(crate) fn length_refusal(ask: &PlanningRequest, view: &WorkerView) -> Option<CandidateRefusal> {
    // A prefill-only worker generates one token for the prompt, whatever the answer's length.
    let answer = if view.role == WorkerRole::Prefill { Tokens(1) } else { ask.answer };
    let prompt = ask.longest.unwrap_or(ask.prompt);
    let exceeds = |limit: Tokens| limit > Tokens::ZERO && prompt + answer > limit;
    if exceeds(view.capacity.context) {
        Some(CandidateRefusal::TooLong)
    } else if exceeds(view.capacity.kv) {
        Some(CandidateRefusal::DoesNotFit)
    } else {
        None
    }
}
