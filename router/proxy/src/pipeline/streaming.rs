//! State of a step whose answer has begun, until it ends or breaks off.

use std::time::Instant;

use http::StatusCode;
use vocabulary::{Tokens, WorkerId};
use workers_shim::engine_api::{StreamFacts, TokenUsage};
use workers_shim::fleet::InFlightGuard;

use super::blame::{UnattributedFailures, WorkerFailures};
use super::plan::PlanGuards;
use super::planning::{AttemptLog, InterruptedAnswer, LastFailure, Planning, StreamBreak};
use super::request_end::{DeliveredAnswer, RequestEnd};
use crate::receipt::{Attempt, AttemptEvent, RequestOutcome};
use crate::request_states::{ClassifiedStep, LocatedRequest, PlannedStep};

/// A step that is being answered.
pub struct Streaming {
    /// The classified step.
    pub step: ClassifiedStep,
    /// The plan that serves it.
    pub planned: Box<PlannedStep>,
    pub(super) guards: PlanGuards,
    /// Of its attempts, the last one is running.
    pub(super) history: AttemptLog,
    /// Workers that have failed inside the answer so far.
    pub(super) failures: WorkerFailures,
    /// The request as counted in the target's load.
    pub(super) in_flight: InFlightGuard,
    /// When the first byte of the answer arrived.
    pub(super) first_byte: Instant,
    /// Status of the answer.
    pub(super) status: u16,
    /// What the client has of an interrupted answer that this one continues.
    pub(super) interrupted: Option<InterruptedAnswer>,
}

/// How an answer ended.
#[derive(Clone, Copy, Debug)]
pub struct AnswerEnd {
    /// In which state.
    pub state: AnswerCompletion,
    /// Answer tokens delivered, counted by events where the engine does not report them.
    pub delivered: Tokens,
    /// What the engine counted.
    pub usage: Option<TokenUsage>,
}

/// How far an answer was delivered when it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AnswerCompletion {
    /// Delivered whole, with this status.
    Whole(StatusCode),
    /// A stream whose end was delivered.
    Complete,
    /// A stream that broke off, or that reported an error.
    Interrupted,
    /// A stream that had not ended when the client left.
    Unfinished,
}

impl AnswerCompletion {
    /// Returns how far a stream was delivered that nobody reads any more.
    pub fn of(facts: &StreamFacts) -> Self {
        match (&facts.error, facts.done) {
            (Some(_), _) => Self::Interrupted,
            (None, true) => Self::Complete,
            (None, false) => Self::Unfinished,
        }
    }

    /// Returns how the request ended.
    pub fn outcome(self) -> RequestOutcome {
        match self {
            Self::Whole(status) if status.is_success() => RequestOutcome::Complete,
            Self::Whole(_) => RequestOutcome::Rejected,
            Self::Complete => RequestOutcome::Complete,
            Self::Interrupted => RequestOutcome::Interrupted,
            Self::Unfinished => RequestOutcome::ClientDisconnected,
        }
    }
}

impl Streaming {
    /// Returns the worker that answers.
    pub fn target(&self) -> WorkerId {
        self.planned.plan.target()
    }

    /// Returns the running attempt.
    pub fn attempt(&self) -> Option<&Attempt> {
        self.history.attempts.last()
    }

    /// Number of times that the answer was resumed.
    pub fn resume_count(&self) -> usize {
        self.history.attempts.iter().filter(|attempt| attempt.resume.is_some()).count()
    }

    /// Records that the first token of this worker has arrived.
    pub fn record_first_token(&mut self) {
        self.in_flight.record_first_token();
    }

    /// Records a failure of the answering worker. Whether it is at fault is decided at the end of the request.
    pub fn record_failure(&mut self) {
        if let Some(sent_at) = self.attempt().map(|attempt| attempt.asked) {
            let (worker, trials) = (self.target(), self.guards.trials.take());
            self.failures.push((worker, sent_at, trials));
        }
    }

    /// Records how the running attempt broke off, and why its answer cannot resume.
    pub fn record_not_resumable(&mut self, event: AttemptEvent, why: &str) {
        if let Some(attempt) = self.history.attempts.last_mut() {
            attempt.events.push(event);
            attempt.not_resumable_reason = Some(why.into());
        }
    }

    /// The worker refused the rest of an answer: the client has what was delivered before.
    pub fn refused(self) -> RequestEnd {
        let (first_byte, status) = (Some(self.first_byte), self.status);
        let nothing = DeliveredAnswer { first_byte, status, delivered: Tokens::ZERO, usage: None };
        let answer = self.interrupted.map_or(nothing, InterruptedAnswer::record);
        self.into_request_end(RequestOutcome::Interrupted, answer)
    }

    /// The answer has ended.
    pub fn ended(self, end: AnswerEnd) -> RequestEnd {
        let AnswerEnd { state, delivered, usage } = end;
        let first_byte = match state {
            // All tokens came together, so the time of the first one is unknown.
            AnswerCompletion::Whole(_) => None,
            AnswerCompletion::Complete | AnswerCompletion::Interrupted | AnswerCompletion::Unfinished => {
                Some(self.first_byte)
            }
        };
        let answer = DeliveredAnswer { first_byte, status: self.status, delivered, usage };
        self.into_request_end(state.outcome(), answer)
    }

    /// The answer broke off, and is to resume at another worker. `refresh` updates what was located.
    pub fn broke_off(self, broken: StreamBreak, refresh: impl FnOnce(LocatedRequest) -> LocatedRequest) -> Planning {
        let Self { mut step, planned, guards, mut history, failures, first_byte, status, .. } = self;
        let StreamBreak { event, error, kept_tokens, usage, delivered } = broken;
        history.attempts.iter_mut().last().into_iter().for_each(|attempt| attempt.events.push(event));
        if let Some(reservation) = guards.reservation {
            reservation.mark_failed();
        }
        step.located = refresh(step.located);
        // Workers that broke off are excluded: the request itself may be what breaks them.
        history.excluded = history.attempts.iter().filter_map(Attempt::target).collect();
        let (broke_at, attempts_before) = (Instant::now(), history.attempts.len());
        let partial =
            InterruptedAnswer { first_byte, status, broke_at, attempts_before, kept_tokens, usage, delivered };
        let failure = LastFailure { planned, event, error };
        Planning::again(step, (Some(partial), failure), history, UnattributedFailures { suspects: None, failures })
    }

    fn into_request_end(self, outcome: RequestOutcome, answer: DeliveredAnswer) -> RequestEnd {
        let Self { step, planned, guards, history, failures, in_flight, .. } = self;
        let AttemptLog { first_action, attempts, admission_wait, .. } = history;
        RequestEnd {
            step,
            planned: *planned,
            guards,
            first_action,
            attempts,
            admission_wait,
            answer,
            in_flight: Some(in_flight),
            failures,
            outcome,
            ended_at: Instant::now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_an_answer_decides_how_its_request_ended() {
        let of_stream = |facts: StreamFacts| AnswerCompletion::of(&facts).outcome();
        let failed = || StreamFacts { error: Some("no memory".into()), ..StreamFacts::default() };
        assert_eq!(of_stream(StreamFacts::default()), RequestOutcome::ClientDisconnected);
        assert_eq!(of_stream(StreamFacts { done: true, ..StreamFacts::default() }), RequestOutcome::Complete);
        assert_eq!(of_stream(failed()), RequestOutcome::Interrupted);
        assert_eq!(of_stream(StreamFacts { done: true, ..failed() }), RequestOutcome::Interrupted);
        assert_eq!(AnswerCompletion::Whole(StatusCode::OK).outcome(), RequestOutcome::Complete);
        assert_eq!(AnswerCompletion::Whole(StatusCode::UNPROCESSABLE_ENTITY).outcome(), RequestOutcome::Rejected);
    }
}
