//! One worker as this step sees it: whether it may take part, how fast it is and how long it makes others wait.

use std::cell::OnceCell;

use vocabulary::{Health, Micros, Owner, Role, Tokens, WorkerView};

use crate::again::Again;
use crate::cost::Fixed;
use crate::pressure::Beyond;
use crate::tenancy::{Room, Visit};
use crate::{Ask, ComputeRate, Inputs, ParallelShape, Policy, Refused, holding::Holding, micros::micros, rendezvous};

/// A worker, its numbers made safe: rates are finite and positive, usage lies in 0 to 1.
pub(crate) struct Standing<'a> {
    pub(crate) view: &'a WorkerView,
    /// Why it may take no part at all; `Draining` and `PrefillOnly` only bar it as a target.
    pub(crate) barred: Option<Refused>,
    pub(crate) holding: Holding,
    pub(crate) pace: Pace,
    /// What having again costs here what was pushed out.
    pub(crate) again: Again,
    /// Its parallel shape, where it is known.
    pub(crate) shape: Option<ParallelShape>,
    pub(crate) room: Room<'a>,
    /// What pushing all its victims out costs, once that was asked for.
    pub(crate) beyond: OnceCell<Beyond>,
    /// What serving there costs however it is done, once it was asked for.
    pub(crate) fixed: OnceCell<Fixed>,
    /// Its rendezvous weight for the session.
    pub(crate) weight: u64,
}

/// Speeds and waits, in microseconds.
#[derive(Clone, Copy)]
pub(crate) struct Pace {
    /// To compute prompt tokens when nothing else runs.
    pub(crate) rate: ComputeRate,
    /// One decode step of the batch as it is: step + slowdown x running.
    pub(crate) step: Micros,
    /// Until new work is looked at: backlog / prefill rate, and half of the step in flight when the batch is not empty.
    /// What waits is in the backlog; it joins the batch together, not one step after the other.
    pub(crate) queue: Micros,
    /// Answers that are being generated; 0 where none are.
    pub(crate) decoding: f64,
    /// KV blocks in use; 1 when it is not a number.
    pub(crate) usage: f64,
}

impl<'a> Standing<'a> {
    pub(crate) fn new((inputs, visit): (&Inputs<'a>, Visit<'a>), view: &'a WorkerView, holding: Holding) -> Self {
        let pace = Pace::of(view, inputs.policy);
        let at = Owner { worker: view.id, incarnation: view.incarnation, rank: holding.rank };
        Self {
            view,
            room: visit.room(at, view.capacity.kv, holding.cached),
            beyond: OnceCell::new(),
            fixed: OnceCell::new(),
            barred: barred(inputs, view),
            holding,
            shape: inputs.shape(view.id),
            pace,
            again: Again::of((view, pace.rate), &inputs.policy.tiers, inputs.attention),
            weight: rendezvous::weight(inputs.session.id, view.id),
        }
    }

    /// Whether it decodes, is reached, was not excluded and is long enough: a target, be it draining.
    pub(crate) fn can_serve(&self) -> bool {
        self.barred.is_none() && self.view.role.decodes()
    }

    /// Whether it answers prompts that it computed itself.
    pub(crate) fn serves_alone(&self) -> bool {
        serves_alone(self.view)
    }

    /// What the session is expected to add there later: where it is new, and an eighth of the memory at most.
    pub(crate) fn growth(&self, inputs: &Inputs<'_>) -> Tokens {
        match self.room.own {
            Tokens::ZERO => inputs.ask.growth.min(inputs.policy.growth).min(Tokens(self.view.capacity.kv.0 / 8)),
            _ => Tokens::ZERO,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.view.health == Health::Draining
    }
}

impl Pace {
    pub(crate) fn of(view: &WorkerView, policy: &Policy) -> Self {
        const SLOWEST: f64 = 1.0;
        let known = |rate: f64| rate.is_finite() && rate > 0.0;
        let rate = [view.speeds.prefill_tokens_per_second, policy.unknown_prefill_tokens_per_second];
        let token = 1e6 / rate.into_iter().find(|rate| known(*rate)).unwrap_or(SLOWEST);
        let load = &view.load;
        let step = view.speeds.decode_step + view.speeds.decode_slowdown * u64::from(load.running);
        let in_flight = u64::from(load.running > 0);
        Self {
            rate: ComputeRate::new(token, policy.attention_doubles_at),
            step,
            queue: micros(load.backlog.0 as f64 * token) + Micros(step.0 * in_flight / 2),
            decoding: if view.role.decodes() { f64::from(load.running) } else { 0.0 },
            usage: if load.kv_usage.is_nan() { 1.0 } else { load.kv_usage.clamp(0.0, 1.0) },
        }
    }
}

/// Whether a worker answers prompts that it computed itself.
pub(crate) fn serves_alone(view: &WorkerView) -> bool {
    view.link.as_ref().is_none_or(|link| link.carries.serves_alone())
}

fn barred(inputs: &Inputs<'_>, view: &WorkerView) -> Option<Refused> {
    let serves = |model| view.models.contains(model);
    if !serves(&inputs.ask.model) || !inputs.ask.adapter.as_ref().is_none_or(serves) {
        Some(Refused::WrongModel)
    } else if view.health == Health::Unreachable {
        Some(Refused::NotReady)
    } else if inputs.excluded.contains(&view.id) {
        Some(Refused::Excluded)
    } else {
        too_long(inputs.ask, view)
    }
}

/// Whether prompt and answer exceed what a worker takes. Unknown limits (0) do not.
pub(crate) fn too_long(ask: &Ask, view: &WorkerView) -> Option<Refused> {
    // A prefill-only worker generates one token for the prompt, whatever the answer's length.
    let answer = if view.role == Role::Prefill { Tokens(1) } else { ask.answer };
    let prompt = ask.longest.unwrap_or(ask.prompt);
    let exceeds = |limit: Tokens| limit > Tokens::ZERO && prompt + answer > limit;
    if exceeds(view.capacity.context) {
        Some(Refused::TooLong)
    } else if exceeds(view.capacity.kv) {
        Some(Refused::DoesNotFit)
    } else {
        None
    }
}
