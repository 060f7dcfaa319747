//! The steps that wait, and whose turn it is.

use vocabulary::{Micros, Tokens};

use super::{AdmissionDecision, AdmissionLimits, AdmissionReason, displaced_compute};
use crate::{Decision, PlanningInputs};

/// Steps that wait, by the caller's names for them.
#[derive(Clone, Debug)]
pub struct StepQueue<K> {
    limits: AdmissionLimits,
    steps: Vec<QueuedStep<K>>,
}

#[derive(Clone, Copy, Debug)]
struct QueuedStep<K> {
    step: K,
    prompt: Tokens,
    since: Micros,
}

/// What counts of a step for whether it waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionRequest {
    /// The length of its prompt.
    pub prompt: Tokens,
    /// What starting as planned would cost others.
    pub displaced_compute: Micros,
    /// The time, on a clock that only goes forward.
    pub now: Micros,
}

impl AdmissionRequest {
    /// Of a step as it was just planned.
    pub fn of(inputs: &PlanningInputs<'_>, decision: &Decision) -> Self {
        let displaced_compute = displaced_compute(inputs, decision);
        Self { prompt: inputs.request.prompt, displaced_compute, now: inputs.occupancy.now }
    }
}

impl<K: Copy + Eq> StepQueue<K> {
    /// Nobody waits.
    pub fn new(limits: AdmissionLimits) -> Self {
        Self { limits, steps: Vec::new() }
    }

    /// Whether a step, new or waiting, starts as it was just planned. One that has waited for the longest time starts, and
    /// so does one for which no place is left in the queue.
    pub fn admit(&mut self, step: K, asking: AdmissionRequest) -> AdmissionDecision {
        let AdmissionRequest { prompt, displaced_compute: costs_others, now } = asking;
        let AdmissionLimits { tolerated, longest, most } = self.limits;
        let place = self.steps.iter().position(|waiting| waiting.step == step);
        let is_full = self.steps.len() >= most;
        let starts = match place {
            _ if costs_others <= tolerated || longest == Micros::ZERO => Some(AdmissionReason::Tolerated),
            Some(place) if now - self.steps[place].since >= longest => Some(AdmissionReason::Longest),
            None if is_full => Some(AdmissionReason::NoPlace),
            _ => None,
        };
        match (starts, place) {
            (Some(why), place) => {
                place.map(|place| self.steps.remove(place));
                AdmissionDecision::Start { why }
            }
            (None, place) => {
                if place.is_none() {
                    self.steps.push(QueuedStep { step, prompt, since: now });
                }
                AdmissionDecision::Hold { costs_others }
            }
        }
    }

    /// Whoever wanted this step does so no longer.
    pub fn remove(&mut self, step: K) {
        self.steps.retain(|waiting| waiting.step != step);
    }

    /// Who is asked in which order once there may be room: short prompts first, since more of them fit; of equal ones the
    /// first that came.
    pub fn admission_order(&self) -> Vec<K> {
        let mut all: Vec<_> = self.steps.iter().collect();
        all.sort_by_key(|waiting| (waiting.prompt, waiting.since));
        all.into_iter().map(|waiting| waiting.step).collect()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl<K: Copy + Eq> Default for StepQueue<K> {
    fn default() -> Self {
        Self::new(AdmissionLimits::default())
    }
}
