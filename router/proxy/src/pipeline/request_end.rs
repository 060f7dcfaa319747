//! The end of a request: one value with its step, plan, attempts, answer and usage, however the request ended. The
//! sinks of `RequestEndSinks` take it, each in a file of its own.

mod commit_sink;
mod guardrail_sink;
mod metrics_sink;
mod observation_sink;
mod occupancy_sink;
mod prompt_sink;
mod quota_sink;
mod receipt_sink;
mod usage_filter;

use std::time::Instant;

use planner::{Action, HandoffKind};
use vocabulary::{Bytes, Micros, Tokens, WorkerId};
use workers_shim::engine_api::TokenUsage;
use workers_shim::fleet::{Fleet, InFlightGuard};

use super::blame::WorkerFailures;
use super::plan::PlanGuards;
use super::step_workers::is_converted_by_guess;
use crate::receipt::{AdmissionWait, Attempt, RequestOutcome};
use crate::request_states::{ClassifiedStep, PlannedStep};
pub(super) use commit_sink::CommitSink;
pub(super) use guardrail_sink::GuardrailSink;
pub(super) use metrics_sink::MetricsSink;
pub(super) use observation_sink::ObservationSink;
pub(super) use occupancy_sink::OccupancySink;
pub(super) use prompt_sink::PromptSink;
pub(super) use quota_sink::QuotaSink;
pub(super) use receipt_sink::ReceiptSink;
pub(super) use usage_filter::ImplausibleUsageFilter;

/// A request that has ended.
#[must_use]
pub struct RequestEnd {
    /// The classified step.
    pub step: ClassifiedStep,
    /// The plan that served the step, or the last one that was to.
    pub planned: PlannedStep,
    /// What the plan still holds: its KV reservation, and trials of ejected workers.
    pub guards: PlanGuards,
    /// The action that the planner chose first, where it was asked.
    pub first_action: Option<Action>,
    /// All attempts, the newest last; none if the client left the queue.
    pub attempts: Vec<Attempt>,
    /// How the step waited for admission, where it did.
    pub admission_wait: Option<AdmissionWait>,
    /// What the client got.
    pub answer: DeliveredAnswer,
    /// The request as counted in the target's load; `None` when no worker serves it.
    pub in_flight: Option<InFlightGuard>,
    /// Workers that have failed and are not judged yet.
    pub(super) failures: WorkerFailures,
    /// How it ended.
    pub outcome: RequestOutcome,
    /// When it ended.
    pub ended_at: Instant,
}

/// What the client got of an answer.
#[derive(Clone, Copy, Debug)]
pub struct DeliveredAnswer {
    /// When the first byte arrived; `None` without an answer, and for a whole answer, whose tokens come together.
    pub first_byte: Option<Instant>,
    /// Status of the answer.
    pub status: u16,
    /// Answer tokens delivered, counted by events where the engine does not report them.
    pub delivered: Tokens,
    /// What the engine counted.
    pub usage: Option<TokenUsage>,
}

impl RequestEnd {
    /// Returns the worker that answers.
    pub fn target(&self) -> WorkerId {
        self.planned.plan.target()
    }

    /// Returns the usage of a complete answer.
    fn complete_usage(&self) -> Option<TokenUsage> {
        self.answer.usage.filter(|_| self.outcome == RequestOutcome::Complete)
    }

    /// Whether more than one worker gave the answer.
    fn is_resumed(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.resume.is_some())
    }

    /// Returns how long the step waited before it started.
    fn admission_time(&self) -> Micros {
        self.admission_wait.map_or(Micros::ZERO, |wait| wait.duration)
    }

    /// Whether the engine that served the request may have converted it differently than this router did.
    fn is_converted_by_guess(&self, fleet: &Fleet) -> bool {
        is_converted_by_guess(fleet, &self.step.located.identified, self.target())
    }

    /// Bytes that the executed plan was to move between workers; zero if the transfer failed.
    fn planned_transfer_bytes(&self) -> Bytes {
        let events = self.attempts.last().map_or(&[][..], |attempt| &attempt.events);
        match events.iter().any(|event| event.prevented_transfer()) {
            false => self.planned.plan.moved_bytes(),
            true => Bytes::ZERO,
        }
    }

    /// Returns the usage from which the target's speed is learned: what was pulled from another worker was not computed
    /// here, whatever the engine then reports as cached.
    fn locally_computed(&self, usage: TokenUsage) -> TokenUsage {
        let plan = &self.planned.plan;
        match plan.sequence.handoff(HandoffKind::RemotePrefill) {
            Some(_) => TokenUsage { cached: Some(usage.prompt - plan.answer_leg().computed_tokens), ..usage },
            None => usage,
        }
    }
}

#[cfg(test)]
mod tests;
