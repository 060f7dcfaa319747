//! State of a step whose legs are being sent, until the first byte of its answer.

use std::time::Instant;

use vocabulary::Micros;

use super::blame::{AnswerOutcome, OutlierReporter, SuspectPair, UnattributedFailures, culprit};
use super::end_guard::RequestState;
use super::plan::PlanGuards;
use super::planning::{AttemptLog, GivenUpStep, InterruptedAnswer, LastFailure, Planning, UnansweredStep};
use super::request_end::RequestEnd;
use super::streaming::Streaming;
use crate::leg_outcome::{FailedAttempt, LegResponse, StartedAnswer};
use crate::outliers::TrialGuard;
use crate::receipt::{RequestOutcome, StreamResumption};
use crate::request_states::{ClassifiedStep, PlannedStep};

/// Maximum number of plans for one request.
const MAX_ATTEMPTS: usize = 3;

/// A step whose plan is being executed.
pub struct Dispatched {
    /// The classified step.
    pub step: ClassifiedStep,
    /// The plan.
    pub planned: Box<PlannedStep>,
    pub(super) guards: PlanGuards,
    pub(super) history: AttemptLog,
    pub(super) blame: UnattributedFailures,
    /// The answer that the plan is to go on with, where one broke off.
    pub(super) interrupted: Option<InterruptedAnswer>,
    /// When the plan was made.
    pub(super) sent_at: Instant,
}

impl Dispatched {
    /// The answer has begun. Returns it, and what its end will need.
    pub(super) fn started(self, reporter: &OutlierReporter, started: StartedAnswer) -> (LegResponse, Streaming) {
        let Self { step, planned, guards, mut history, mut blame, interrupted, .. } = self;
        let StartedAnswer { response, in_flight, sent_at, first_byte, events } = started;
        let failed_worker = culprit(&planned.plan, &events, Ok(&response));
        let healthy_worker = response.status().is_success().then_some(planned.plan.target());
        blame.resolve_suspects(healthy_worker);
        blame.failures.extend(failed_worker.map(|worker| (worker, sent_at, None)));
        let mut failures = blame.failures;
        match healthy_worker {
            // The request was refused: that is the client's error, whatever failed before.
            None => reporter.settle_failures(&step, std::mem::take(&mut failures), AnswerOutcome::Unanswered),
            Some(_) if interrupted.is_none() => {
                reporter.settle_failures(&step, std::mem::take(&mut failures), AnswerOutcome::Answered);
            }
            // Of a resumed answer only the end shows whether the worker is healthy.
            Some(_) => {}
        }
        guards.trials.iter().for_each(TrialGuard::record_answer_started);
        history.record(&step, &planned, (sent_at, events));
        if let (Some(partial), Some(attempt)) = (&interrupted, history.attempts.last_mut()) {
            let duration = Micros::of(first_byte - partial.broke_at);
            attempt.resume = Some(StreamResumption { kept_tokens: partial.kept_tokens, duration });
        }
        let (first_byte, status) = match interrupted {
            None => (first_byte, response.status().as_u16()),
            Some(partial) => (partial.first_byte, partial.status),
        };
        (response, Streaming { step, planned, guards, history, failures, in_flight, first_byte, status, interrupted })
    }

    /// The attempt failed before its first byte. Ends the step when no other attempt is worthwhile.
    pub(super) fn failed(self, reporter: &OutlierReporter, failed: FailedAttempt) -> Result<Planning, GivenUpStep> {
        let Self { step, planned, mut guards, mut history, mut blame, interrupted, .. } = self;
        let FailedAttempt { sent_at, events, exclude, error: cause } = failed;
        tracing::warn!(worker = %exclude, error = %cause, "a plan failed before its first byte");
        let suspects = SuspectPair::of(&planned.plan, (&events, &cause), sent_at);
        let failed_worker = match suspects {
            Some(_) => None,
            None => culprit(&planned.plan, &events, Err(&cause)),
        };
        blame.resolve_suspects(None);
        let trials = guards.trials.take();
        match (suspects, failed_worker) {
            (Some(suspects), _) => blame.suspects = Some((suspects, trials)),
            // A request can make engines fail, or close their connections.
            (None, Some(worker)) if cause.may_be_the_requests() => blame.failures.push((worker, sent_at, trials)),
            // Silence is the worker's fault, whatever the request is.
            (None, Some(worker)) => reporter.outliers.record_failure(&step.located.workers, (worker, sent_at)),
            (None, None) => {}
        }
        history.record(&step, &planned, (sent_at, events));
        history.excluded.push(exclude);
        if let Some(reservation) = guards.reservation.take() {
            reservation.mark_failed();
        }
        let error = cause.client_error();
        let attempts = history.attempts.len() - interrupted.map_or(0, |partial| partial.attempts_before);
        if attempts >= MAX_ATTEMPTS || !cause.retryable() {
            let status = error.status().as_u16();
            let unanswered = UnansweredStep { step, planned, guards, history, blame, partial: interrupted };
            return Err(GivenUpStep { error, end: Some(Box::new(unanswered.ended(RequestOutcome::Failed, status))) });
        }
        let failure = LastFailure { planned, event: cause.attempt_event(), error };
        Ok(Planning::again(step, (interrupted, failure), history, blame))
    }
}

impl RequestState for Dispatched {
    /// The attempt ran, and its result is not known.
    fn into_end(self, _: RequestOutcome) -> Option<RequestEnd> {
        let Self { step, planned, guards, mut history, blame, interrupted, sent_at } = self;
        history.record(&step, &planned, (sent_at, Vec::new()));
        Some(UnansweredStep { step, planned, guards, history, blame, partial: interrupted }.abandoned())
    }
}
