//! State of a step between two plans: it has none yet, waits, or needs another one because the last attempt failed or
//! the answer broke off.

use std::sync::Arc;
use std::time::Instant;

use planner::{Action, AdmissionDecision, StepStartReason};
use vocabulary::{Micros, Tokens, WorkerId, WorkerView};
use workers_shim::engine_api::TokenUsage;

use super::blame::UnattributedFailures;
use super::dispatched::Dispatched;
use super::end_guard::{RequestEndRecorder, RequestState};
use super::plan::{PlanGuards, PlanStage};
use super::request_end::{DeliveredAnswer, RequestEnd};
use crate::admission_queue::QueueTicket;
use crate::error::ApiError;
use crate::receipt::{AdmissionWait, Attempt, AttemptEvent, AttemptLeg, RequestOutcome, WaitOutcome};
use crate::request_states::{ClassifiedStep, PlannedStep};

/// Status that is recorded for a client that left before its answer began, as in nginx logs.
const CLIENT_LEFT: u16 = 499;

/// A step that is to be planned.
pub struct Planning {
    step: ClassifiedStep,
    origin: PlanningOrigin,
    history: AttemptLog,
    blame: UnattributedFailures,
}

/// Why a step is to be planned.
enum PlanningOrigin {
    /// It has just arrived.
    First,
    /// It waits for admission with this plan. Without a ticket it was no longer held when it was to be queued, and is
    /// planned again at once.
    Held(Box<PlannedStep>, Option<QueueTicket>),
    /// The last attempt failed.
    Retry(LastFailure),
    /// The answer broke off, and no other worker has gone on with it yet.
    Resume(InterruptedAnswer, LastFailure),
}

/// A failed attempt after which another worker is tried.
pub(super) struct LastFailure {
    /// The plan that failed.
    pub(super) planned: Box<PlannedStep>,
    /// How it failed.
    pub(super) event: AttemptEvent,
    /// The error for the client when nothing else can be tried.
    pub(super) error: ApiError,
}

/// What was tried for a step so far.
#[derive(Default)]
pub(super) struct AttemptLog {
    /// The action that the planner chose first, where it was asked.
    pub(super) first_action: Option<Action>,
    /// Finished attempts, the newest last.
    pub(super) attempts: Vec<Attempt>,
    /// Workers to exclude from the next plan.
    pub(super) excluded: Vec<WorkerId>,
    /// How the step waited for admission, where it did.
    pub(super) admission_wait: Option<AdmissionWait>,
}

/// An answer that broke off.
#[derive(Debug)]
pub struct StreamBreak {
    /// How it broke off.
    pub event: AttemptEvent,
    /// The error for the client when the answer cannot resume.
    pub error: ApiError,
    /// Answer tokens that are kept.
    pub kept_tokens: Tokens,
    /// Tokens of the prompt and of the delivered part, where they are known.
    pub usage: Option<TokenUsage>,
    /// Answer tokens that were delivered, counted by events.
    pub delivered: Tokens,
}

/// What the client has received of an answer that broke off.
#[derive(Clone, Copy)]
pub(super) struct InterruptedAnswer {
    pub(super) first_byte: Instant,
    pub(super) status: u16,
    pub(super) broke_at: Instant,
    /// Number of attempts before the answer broke off.
    pub(super) attempts_before: usize,
    pub(super) kept_tokens: Tokens,
    pub(super) usage: Option<TokenUsage>,
    pub(super) delivered: Tokens,
}

/// What a plan leads to.
pub enum PlanVerdict {
    /// Its legs are to be sent.
    Start(Box<Dispatched>),
    /// The step waits, and is then planned again.
    Wait(Box<Planning>),
}

/// A step that gets no answer, or none from another worker.
pub struct GivenUpStep {
    /// The error for the client.
    pub error: ApiError,
    /// Its end; `None` where it was never planned. Nothing was announced then, no receipt is filed, its error is
    /// counted by cause, and its quota reservation is given back by its own guard.
    pub end: Option<Box<RequestEnd>>,
}

impl GivenUpStep {
    /// Records the end of the step, where it has one. Returns the error for the client.
    pub(super) fn record(self, ends: &Arc<dyn RequestEndRecorder>) -> ApiError {
        if let Some(end) = self.end {
            ends.record(*end);
        }
        self.error
    }
}

impl Planning {
    /// Starts a step; nothing has been attempted.
    pub fn first(step: ClassifiedStep) -> Self {
        Self {
            step,
            origin: PlanningOrigin::First,
            history: AttemptLog::default(),
            blame: UnattributedFailures::default(),
        }
    }

    /// Continues a step after a failed attempt; `partial` where its answer had broken off before.
    pub(super) fn again(
        step: ClassifiedStep,
        (partial, failure): (Option<InterruptedAnswer>, LastFailure),
        attempts: AttemptLog,
        blame: UnattributedFailures,
    ) -> Self {
        let origin = match partial {
            None => PlanningOrigin::Retry(failure),
            Some(partial) => PlanningOrigin::Resume(partial, failure),
        };
        Self { step, origin, history: attempts, blame }
    }

    /// Makes the next plan by calling `plan` with the step and the workers to exclude. If there is no plan, the error
    /// is that of the previous failed attempt, if there was one.
    pub fn plan(
        mut self,
        stage: &PlanStage,
        plan: impl FnOnce(&ClassifiedStep, &[WorkerId]) -> Result<(PlannedStep, PlanGuards), ApiError>,
    ) -> Result<PlanVerdict, GivenUpStep> {
        let is_first = self.last_failure().is_none();
        let tenant = &self.step.located.identified.request.incoming.tenant;
        // Checked before planning, because a plan makes a KV reservation.
        let prepared = if is_first || stage.retries.spend(tenant, Instant::now()) {
            plan(&self.step, &self.history.excluded)
        } else {
            stage.requests.retries_refused.inc();
            // No other worker was asked, so whose fault the failures were is unknown.
            self.blame = UnattributedFailures::default();
            Err(ApiError::Overloaded { what: "too many requests are tried again" })
        };
        let (planned, guards) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => return Err(self.give_up(error)),
        };
        if let Some(failure) = self.last_failure() {
            stage.requests.retries.with_label_values(&[failure.event.as_ref()]).inc();
        }
        let chosen = planned.decision.as_ref().map(|decision| decision.plan.action);
        self.history.first_action = self.history.first_action.or(chosen);
        if let Some((_, Some(AdmissionDecision::Hold { costs_others }))) = planned.admission {
            return self.hold(stage, (planned, costs_others));
        }
        self.history.admission_wait = self.finished_wait(stage, &planned).or(self.history.admission_wait);
        let Self { step, origin, history, blame } = self;
        let interrupted = match origin {
            PlanningOrigin::Resume(partial, _) => Some(partial),
            PlanningOrigin::First | PlanningOrigin::Held(..) | PlanningOrigin::Retry(_) => None,
        };
        let sent_at = Instant::now();
        let dispatched = Dispatched { step, planned: Box::new(planned), guards, history, blame, interrupted, sent_at };
        Ok(PlanVerdict::Start(Box::new(dispatched)))
    }

    /// Keeps the step in the admission queue, or puts it there. A step that has failed once does not wait.
    fn hold(
        self,
        stage: &PlanStage,
        (planned, costs_others): (PlannedStep, Micros),
    ) -> Result<PlanVerdict, GivenUpStep> {
        let request = self.step.located.identified.request.incoming.id;
        let enqueue = || QueueTicket::of((&stage.occupancy, &stage.admission_wait), request, costs_others);
        let Self { step, origin, history, blame } = self;
        let ticket = match origin {
            PlanningOrigin::First => enqueue(),
            PlanningOrigin::Held(_, ticket) => ticket.or_else(enqueue),
            origin @ (PlanningOrigin::Retry(_) | PlanningOrigin::Resume(..)) => {
                let step = Self { step, origin, history, blame };
                return Err(step.give_up(ApiError::Overloaded { what: "what has failed once does not wait" }));
            }
        };
        let origin = PlanningOrigin::Held(Box::new(planned), ticket);
        Ok(PlanVerdict::Wait(Box::new(Self { step, origin, history, blame })))
    }

    /// Ends the step's wait, if it was waiting, with the plan that starts it. Also returns that the queue was full.
    fn finished_wait(&self, stage: &PlanStage, planned: &PlannedStep) -> Option<AdmissionWait> {
        let wait_outcome = match planned.admission {
            Some((asking, Some(AdmissionDecision::Start { why: StepStartReason::NoPlace }))) => {
                let (duration, outcome) = (Micros::ZERO, WaitOutcome::QueueFull);
                let wait = AdmissionWait { duration, displaced_compute: asking.displaced_compute, outcome };
                wait.record(&stage.admission_wait);
                return Some(wait);
            }
            Some((_, Some(AdmissionDecision::Start { why }))) => why.into(),
            _ => WaitOutcome::Admitted,
        };
        match &self.origin {
            PlanningOrigin::Held(_, Some(ticket)) => Some(ticket.finish_wait(wait_outcome)),
            _ => None,
        }
    }

    /// Waits until the step is to be planned again.
    pub async fn wait_for_turn(&self) {
        if let PlanningOrigin::Held(_, Some(ticket)) = &self.origin {
            ticket.wait_for_turn().await;
        }
    }

    /// Replaces the step by what `classify` makes of it: what was located before the wait may have changed.
    pub fn classified_again(self, classify: impl FnOnce(ClassifiedStep) -> ClassifiedStep) -> Self {
        Self { step: classify(self.step), ..self }
    }

    fn last_failure(&self) -> Option<&LastFailure> {
        match &self.origin {
            PlanningOrigin::First | PlanningOrigin::Held(..) => None,
            PlanningOrigin::Retry(failure) | PlanningOrigin::Resume(_, failure) => Some(failure),
        }
    }

    /// Ends a step that gets no further plan.
    pub(super) fn give_up(self, error: ApiError) -> GivenUpStep {
        let error = self.last_failure().map_or(error, |failure| failure.error.clone());
        let status = error.status().as_u16();
        GivenUpStep { error, end: self.ended(RequestOutcome::Failed, status).map(Box::new) }
    }

    fn ended(self, outcome: RequestOutcome, status: u16) -> Option<RequestEnd> {
        let Self { step, origin, mut history, blame } = self;
        let (planned, partial) = match origin {
            PlanningOrigin::First => return None,
            PlanningOrigin::Held(planned, ticket) => {
                let wait = ticket.map(|ticket| ticket.finish_wait(WaitOutcome::Abandoned));
                history.admission_wait = wait.or(history.admission_wait);
                (planned, None)
            }
            PlanningOrigin::Retry(failure) => (failure.planned, None),
            PlanningOrigin::Resume(partial, failure) => (failure.planned, Some(partial)),
        };
        let unanswered = UnansweredStep { step, planned, guards: PlanGuards::default(), history, blame, partial };
        Some(unanswered.ended(outcome, status))
    }
}

impl RequestState for Planning {
    fn into_end(self, outcome: RequestOutcome) -> Option<RequestEnd> {
        self.ended(outcome, CLIENT_LEFT)
    }
}

/// A planned step that ends without an answer to its last plan.
pub(super) struct UnansweredStep {
    pub(super) step: ClassifiedStep,
    pub(super) planned: Box<PlannedStep>,
    pub(super) guards: PlanGuards,
    pub(super) history: AttemptLog,
    pub(super) blame: UnattributedFailures,
    pub(super) partial: Option<InterruptedAnswer>,
}

impl UnansweredStep {
    /// Ends the step, whose client has left.
    pub(super) fn abandoned(self) -> RequestEnd {
        self.ended(RequestOutcome::ClientDisconnected, CLIENT_LEFT)
    }

    /// Ends the step. Where its answer had begun, that is what the client got, and more than a failure.
    pub(super) fn ended(self, outcome: RequestOutcome, status: u16) -> RequestEnd {
        let Self { step, planned, guards, history, blame, partial } = self;
        let failures = match outcome {
            // No other worker was asked, so whose fault the failures were is unknown.
            RequestOutcome::ClientDisconnected => Vec::new(),
            _ => blame.into_failures(),
        };
        let (outcome, answer) = match partial {
            None => (outcome, DeliveredAnswer { first_byte: None, status, delivered: Tokens::ZERO, usage: None }),
            Some(partial) if outcome == RequestOutcome::ClientDisconnected => (outcome, partial.record()),
            Some(partial) => (RequestOutcome::Interrupted, partial.record()),
        };
        let AttemptLog { first_action, attempts, admission_wait, .. } = history;
        RequestEnd {
            step,
            planned: *planned,
            guards,
            first_action,
            attempts,
            admission_wait,
            answer,
            in_flight: None,
            failures,
            outcome,
            ended_at: Instant::now(),
        }
    }
}

impl InterruptedAnswer {
    pub(super) fn record(self) -> DeliveredAnswer {
        let Self { first_byte, status, delivered, usage, .. } = self;
        DeliveredAnswer { first_byte: Some(first_byte), status, delivered, usage }
    }
}

impl AttemptLog {
    /// Adds an attempt with this plan.
    pub(super) fn record(
        &mut self,
        step: &ClassifiedStep,
        planned: &PlannedStep,
        (asked, events): (Instant, Vec<AttemptEvent>),
    ) {
        let PlannedStep { plan, ejected, .. } = planned;
        let legs: Vec<_> = plan.legs().map(AttemptLeg::from).collect();
        let serves = |view: &&WorkerView| legs.iter().any(|leg| leg.worker == view.id);
        let kv_index_state =
            step.located.workers.iter().filter(serves).map(|view| view.kv_index_state).min().unwrap_or_default();
        let ejected = ejected.clone();
        self.attempts.push(Attempt {
            asked,
            action: plan.action,
            legs,
            kv_index_state,
            ejected_workers: ejected,
            resume: None,
            not_resumable_reason: None,
            events,
        });
    }
}

#[cfg(test)]
mod tests;
