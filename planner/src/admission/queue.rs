//! Queue of steps that wait for KV memory, and the order in which they are admitted.

use vocabulary::{Micros, Tokens};

use super::{AdmissionDecision, StepStartReason, displaced_compute};
use crate::AdmissionLimits;
use crate::{Decision, PlanningInputs};

/// Bounded queue of steps that wait for KV memory, identified by keys of the caller.
#[derive(Clone, Debug)]
pub struct StepQueue<K> {
    limits: AdmissionLimits,
    steps: Vec<QueuedStep<K>>,
}

#[derive(Clone, Copy, Debug)]
struct QueuedStep<K> {
    step: K,
    prompt: Tokens,
    queued_at: Micros,
}

/// Facts about a step that decide whether it queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdmissionRequest {
    /// Tokens of its prompt.
    pub prompt: Tokens,
    /// Compute that starting as planned would displace, in microseconds.
    pub displaced_compute: Micros,
    /// Current time, on a monotonic clock.
    pub now: Micros,
}

impl AdmissionRequest {
    /// Builds the request for a step that was just planned.
    pub fn of(inputs: &PlanningInputs<'_>, decision: &Decision) -> Self {
        let displaced_compute = displaced_compute(inputs, decision);
        Self { prompt: inputs.request.prompt_tokens, displaced_compute, now: inputs.occupancy.now }
    }
}

impl<K: Copy + Eq> StepQueue<K> {
    /// Creates an empty queue.
    pub fn new(limits: AdmissionLimits) -> Self {
        Self { limits, steps: Vec::new() }
    }

    /// Decides whether a step, new or queued, starts as it was just planned. A step that has queued for the longest
    /// time starts, and so does a new one when the queue is full. A step that has to wait is added to the queue.
    pub fn admit(&mut self, step: K, request: AdmissionRequest) -> AdmissionDecision {
        let AdmissionRequest { prompt, displaced_compute: costs_others, now } = request;
        let AdmissionLimits { max_displaced_compute, max_wait, max_queue } = self.limits;
        let place = self.steps.iter().position(|waiting| waiting.step == step);
        let is_full = self.steps.len() >= max_queue;
        let starts = match place {
            _ if costs_others <= max_displaced_compute || max_wait == Micros::ZERO => Some(StepStartReason::Tolerated),
            Some(place) if now - self.steps[place].queued_at >= max_wait => Some(StepStartReason::Longest),
            None if is_full => Some(StepStartReason::NoPlace),
            _ => None,
        };
        match (starts, place) {
            (Some(why), place) => {
                place.map(|place| self.steps.remove(place));
                AdmissionDecision::Start { why }
            }
            (None, place) => {
                if place.is_none() {
                    self.steps.push(QueuedStep { step, prompt, queued_at: now });
                }
                AdmissionDecision::Hold { costs_others }
            }
        }
    }

    /// Removes a step that its client no longer wants.
    pub fn remove(&mut self, step: K) {
        self.steps.retain(|waiting| waiting.step != step);
    }

    /// Returns the queued steps in the order in which to try them once memory may be free: shortest prompt first, since
    /// more of them fit, then first come, first served.
    pub fn admission_order(&self) -> Vec<K> {
        let mut all: Vec<_> = self.steps.iter().collect();
        all.sort_by_key(|waiting| (waiting.prompt, waiting.queued_at));
        all.into_iter().map(|waiting| waiting.step).collect()
    }

    /// Returns the number of queued steps.
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Returns whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl<K: Copy + Eq> Default for StepQueue<K> {
    fn default() -> Self {
        Self::new(AdmissionLimits::default())
    }
}
