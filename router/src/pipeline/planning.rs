//! State of a step from its first plan to the first byte of its answer: what was attempted, and what to do when there
//! will be no answer. Dropping it means that the client left; the drop withdraws everything that was announced.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use planner::{Action, AdmissionDecision, AdmissionReason, Plan};
use vocabulary::{Micros, Tokens, WorkerId};
use workers_shim::engine_api::TokenUsage;
use workers_shim::fleet::InFlightRequest;

use super::admission_queue::{AdmissionWait, QueueTicket, WaitOutcome};
use super::blame::{AnswerStatus, FailedWorkers, OutlierReporter, Suspects, culprit};
use super::execute::{Dispatched, FailedAttempt};
use super::legs::{LegError, LegResponse};
use super::locate;
use super::plan::{ClassifiedStep, PlannedStep};
use super::receipt::{Attempt, AttemptEvent, RequestOutcome, StreamResumption};
use super::request_end::RequestEnd;
use crate::app_state::AppState;
use crate::error::ApiError;
use crate::outliers::Trials;

/// Maximum number of plans for one request.
const MAX_ATTEMPTS: usize = 3;
/// Status that is recorded for a client that left before its answer began, as in nginx logs.
const CLIENT_LEFT: u16 = 499;

/// A step that is being served and has no answer yet.
pub struct Planning {
    gateway: Arc<AppState>,
    /// `None` once it is over.
    history: Option<AttemptHistory>,
}

struct AttemptHistory {
    step: ClassifiedStep,
    /// The action that the planner chose first.
    first_action: Option<Action>,
    /// The plan in progress, or the last one that failed.
    planned: Option<PlannedStep>,
    /// Finished attempts, the newest last.
    attempts: Vec<Attempt>,
    excluded: Vec<WorkerId>,
    /// Why the last attempt failed, and the error for the client when nothing else can be tried.
    last_failure: Option<(AttemptEvent, ApiError)>,
    /// The step's ticket while it waits.
    ticket: Option<QueueTicket>,
    /// How the step waited, once that is over.
    admission_wait: Option<AdmissionWait>,
    /// What the client has received of an answer that broke off.
    partial_answer: Option<PartialAnswer>,
    /// Two workers, one of which failed the last attempt, and that attempt's trials, kept until the culprit is known.
    suspects: Option<(Suspects, Option<Trials>)>,
    /// Workers that have answered this request with an error so far.
    failures: FailedWorkers,
}

/// An answer that broke off.
#[derive(Debug)]
pub struct BrokenAnswer {
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
struct PartialAnswer {
    first_byte: Option<Instant>,
    status: u16,
    broke_at: Instant,
    /// Number of attempts before the answer broke off.
    attempts_before: usize,
    kept_tokens: Tokens,
    usage: Option<TokenUsage>,
    delivered: Tokens,
}

impl AttemptHistory {
    /// Whether the step is to wait. If not, ends a wait in progress.
    fn must_wait(&mut self, gateway: &AppState, planned: &PlannedStep) -> bool {
        let until = match planned.admission {
            Some((_, Some(AdmissionDecision::Hold { costs_others }))) => {
                let request = self.step.located.identified.request.incoming.id;
                let place = || QueueTicket::of(gateway.policies.occupancy(), request, costs_others);
                self.ticket = self.ticket.take().or_else(place);
                return true;
            }
            Some((asking, Some(AdmissionDecision::Start { why: AdmissionReason::NoPlace }))) => {
                self.record_wait(
                    gateway,
                    AdmissionWait {
                        time: Micros::ZERO,
                        costs_others: asking.displaced_compute,
                        until: WaitOutcome::NoPlace,
                    },
                );
                return false;
            }
            Some((_, Some(AdmissionDecision::Start { why }))) => why.into(),
            _ => WaitOutcome::Room,
        };
        self.leave_queue(gateway, until);
        false
    }

    /// Ends the step's wait, if it is waiting.
    fn leave_queue(&mut self, gateway: &AppState, until: WaitOutcome) {
        if let Some(place) = self.ticket.take() {
            self.record_wait(gateway, place.finish_wait(until));
        }
    }

    fn record_wait(&mut self, gateway: &AppState, waited: AdmissionWait) {
        let seconds = &gateway.metrics.decisions.admission_wait;
        seconds.with_label_values(&[waited.until.as_ref()]).observe(waited.time.duration().as_secs_f64());
        self.admission_wait = Some(waited);
    }

    fn record_attempt(&mut self, asked: Instant, remarks: Vec<AttemptEvent>) {
        let Some(PlannedStep { plan, ejected, .. }) = &self.planned else { return };
        let (action, prefill, decode) = (plan.action, plan.prefill.worker, plan.decode.worker);
        let legs = self.step.located.workers.iter().filter(|worker| [prefill, decode].contains(&worker.id));
        let knowledge = legs.map(|worker| worker.knowledge).min().unwrap_or_default();
        let ejected = ejected.clone();
        self.attempts.push(Attempt {
            asked,
            action,
            prefill,
            decode,
            knowledge,
            ejected,
            resumed: None,
            unresumable: None,
            remarks,
        });
    }

    /// Counts a finished attempt: against its workers, and against the suspects of the attempt before. `sick` failed;
    /// `well` answers.
    fn blame(&mut self, gateway: &AppState, (sick, asked): (Option<WorkerId>, Instant), well: Option<WorkerId>) {
        let (before, trials) = self.suspects.take().unzip();
        let before = before.map(|suspects| suspects.culprit(well));
        self.failures.extend(before.map(|(worker, asked)| (worker, asked, trials.flatten())));
        self.failures.extend(sick.map(|worker| (worker, asked, None)));
        // Of a resumed answer only the end shows whether the worker is well.
        if well.is_some() && self.partial_answer.is_none() {
            self.settle_blame(gateway, AnswerStatus::Answered);
        }
    }

    /// Discards the open failures: no other worker was asked, so whose fault they were is unknown.
    fn forget_blame(&mut self) {
        self.suspects = None;
        self.failures.clear();
    }

    fn settle_blame(&mut self, gateway: &AppState, settled: AnswerStatus) {
        OutlierReporter::of(gateway).settle_failures(&self.step, std::mem::take(&mut self.failures), settled);
    }

    /// Builds the request's end under this plan, from the load guard of the answering worker, the time of the first
    /// byte and the status.
    fn into_request_end(
        self,
        gateway: Arc<AppState>,
        planned: PlannedStep,
        (in_flight, first_byte, status): (Option<InFlightRequest>, Option<Instant>, u16),
    ) -> RequestEnd {
        let Self { step, first_action: chosen, attempts, admission_wait: waited, failures, .. } = self;
        let delivered = Tokens::ZERO;
        RequestEnd {
            gateway,
            step,
            first_action: chosen,
            planned,
            attempts,
            admission_wait: waited,
            in_flight,
            first_byte,
            status,
            delivered,
            failures,
        }
    }

    /// Number of attempts since the step began, or since its answer broke off.
    fn attempt_count(&self) -> usize {
        self.attempts.len() - self.partial_answer.as_ref().map_or(0, |begun| begun.attempts_before)
    }
}

impl Planning {
    /// Starts a step; nothing has been attempted.
    pub fn new(gateway: &Arc<AppState>, step: ClassifiedStep) -> Self {
        let (attempts, excluded) = (Vec::new(), Vec::new());
        let (planned, chosen, failed, place, waited, begun, suspects) = (None, None, None, None, None, None, None);
        let failures = Vec::new();
        let tried = AttemptHistory {
            step,
            first_action: chosen,
            planned,
            attempts,
            excluded,
            last_failure: failed,
            ticket: place,
            admission_wait: waited,
            partial_answer: begun,
            suspects,
            failures,
        };
        Self { gateway: gateway.clone(), history: Some(tried) }
    }

    /// Continues a step whose answer broke off and is to resume at another worker.
    pub fn from_broken(finish: RequestEnd, broken: BrokenAnswer) -> Self {
        let RequestEnd {
            gateway,
            mut step,
            first_action: chosen,
            mut planned,
            mut attempts,
            admission_wait: waited,
            first_byte,
            status,
            failures,
            ..
        } = finish;
        let BrokenAnswer { event: remark, error, kept_tokens: after, usage, delivered } = broken;
        attempts.iter_mut().last().into_iter().for_each(|attempt| attempt.remarks.push(remark));
        if let Some(tenure) = planned.reservation.take() {
            tenure.mark_failed();
        }
        step.located = locate::refresh_broken(&gateway, step.located);
        let tries = attempts.len();
        let begun = PartialAnswer {
            first_byte,
            status,
            broke_at: Instant::now(),
            attempts_before: tries,
            kept_tokens: after,
            usage,
            delivered,
        };
        // Workers that broke off are excluded: the request itself may be what breaks them.
        let excluded = attempts.iter().map(|attempt| attempt.decode).collect();
        let failed = Some((remark, error));
        let (planned, begun, place, suspects) = (Some(planned), Some(begun), None, None);
        let tried = AttemptHistory {
            step,
            first_action: chosen,
            planned,
            attempts,
            excluded,
            last_failure: failed,
            ticket: place,
            admission_wait: waited,
            partial_answer: begun,
            suspects,
            failures,
        };
        Self { gateway, history: Some(tried) }
    }

    /// Makes the next plan by calling `plan` with the step and the workers to exclude; `None` while the step is to
    /// wait. If there is no plan, the error is that of the previous failed attempt, if there was one.
    pub fn plan_next(
        &mut self,
        plan: impl FnOnce(&ClassifiedStep, &[WorkerId]) -> Result<PlannedStep, ApiError>,
    ) -> Result<Option<(&ClassifiedStep, Plan)>, ApiError> {
        let tried = self.history.as_mut().expect("only its consumers and its end take it");
        let is_first = tried.last_failure.is_none();
        let tenant = &tried.step.located.identified.request.incoming.tenant;
        // Checked before planning, because a plan makes a KV reservation.
        let next = if is_first || self.gateway.policies.retries.spend(tenant, Instant::now()) {
            plan(&tried.step, &tried.excluded)
        } else {
            self.gateway.metrics.requests.retries_refused.inc();
            tried.forget_blame();
            Err(ApiError::Overloaded { what: "too many requests are tried again" })
        };
        match next {
            Ok(planned) => {
                if let Some((remark, _)) = &tried.last_failure {
                    self.gateway.metrics.requests.retries.with_label_values(&[remark.as_ref()]).inc();
                }
                let plan = planned.plan;
                let chosen = planned.decision.as_ref().map(|decision| decision.plan.action);
                tried.first_action = tried.first_action.or(chosen);
                let waits = tried.must_wait(&self.gateway, &planned);
                tried.planned = Some(planned);
                let tried = self.history.as_ref().expect("it was there a line ago");
                Ok((!waits).then_some((&tried.step, plan)))
            }
            Err(error) => {
                let error = tried.last_failure.take().map_or(error, |(_, failed)| failed);
                self.give_up(RequestOutcome::Failed, error.status().as_u16());
                Err(error)
            }
        }
    }

    /// Waits until the step is to be planned again, then updates it with `anew`.
    pub async fn wait_for_turn(&mut self, anew: impl FnOnce(ClassifiedStep) -> ClassifiedStep) {
        if let Some(place) = self.history.as_ref().and_then(|tried| tried.ticket.as_ref()) {
            place.wait_for_turn().await;
        }
        self.history = self.history.take().map(|tried| AttemptHistory { step: anew(tried.step), ..tried });
    }

    /// Records a failed attempt. Returns an error for the client when no other attempt is worthwhile.
    pub fn record_failure(&mut self, failed: FailedAttempt) -> Result<(), ApiError> {
        tracing::warn!(worker = %failed.exclude, error = %failed.error, "a plan failed before its first byte");
        let error = LegError::client_error(&failed.error);
        let tried = self.history.as_mut().expect("only its consumers and its end take it");
        let plan = tried.planned.as_ref().map(|planned| planned.plan);
        let suspects = plan.and_then(|plan| Suspects::of(&plan, (&failed.events, &failed.error), failed.sent_at));
        let sick = plan.filter(|_| suspects.is_none());
        let sick = sick.and_then(|plan| culprit(&plan, &failed.events, Err(&failed.error)));
        if let (Some(worker), false) = (sick, matches!(failed.error, LegError::Failed(_))) {
            // No answer at all is always the worker's fault, whatever the request is.
            self.gateway.policies.outliers.record_failure(&tried.step.located.workers, (worker, failed.sent_at));
        }
        let sick = sick.filter(|_| matches!(failed.error, LegError::Failed(_)));
        tried.blame(&self.gateway, (sick, failed.sent_at), None);
        let trials = tried.planned.as_mut().and_then(|planned| planned.trials.take());
        match suspects {
            Some(suspects) => tried.suspects = Some((suspects, trials)),
            None => {
                if let Some((.., of_try)) = tried.failures.last_mut().filter(|_| sick.is_some()) {
                    *of_try = trials;
                }
            }
        }
        tried.record_attempt(failed.sent_at, failed.events);
        tried.excluded.push(failed.exclude);
        if let Some(tenure) = tried.planned.as_mut().and_then(|planned| planned.reservation.take()) {
            tenure.mark_failed();
        }
        if tried.attempt_count() >= MAX_ATTEMPTS || !failed.error.retryable() {
            self.give_up(RequestOutcome::Failed, error.status().as_u16());
            return Err(error);
        }
        tried.last_failure = Some((failed.error.attempt_event(), error));
        Ok(())
    }

    /// Ends the planning of a step whose answer has begun, and returns what its end will need.
    pub fn start_answer(mut self, answering: Dispatched) -> (LegResponse, RequestEnd) {
        let mut tried = self.history.take().expect("only its consumers and its end take it");
        let planned = tried.planned.take().expect("an answer has a plan");
        let sick = culprit(&planned.plan, &answering.events, Ok(&answering.response));
        let well = answering.response.status().is_success().then_some(planned.plan.target());
        tried.blame(&self.gateway, (sick, answering.sent_at), well);
        if well.is_none() {
            // The request was refused: that is the client's error, whatever failed before.
            tried.settle_blame(&self.gateway, AnswerStatus::Unanswered);
        }
        planned.trials.iter().for_each(Trials::record_answer_started);
        tried.planned = Some(planned);
        tried.record_attempt(answering.sent_at, answering.events);
        if let (Some(begun), Some(attempt)) = (&tried.partial_answer, tried.attempts.last_mut()) {
            let took = Micros::of(answering.first_byte - begun.broke_at);
            attempt.resumed = Some(StreamResumption { after: begun.kept_tokens, took });
        }
        let (first_byte, status) = tried
            .partial_answer
            .take()
            .map_or((Some(answering.first_byte), StatusCode::OK.as_u16()), |begun| (begun.first_byte, begun.status));
        let planned = tried.planned.take().expect("an answer has a plan");
        let in_flight = Some(answering.in_flight);
        (answering.response, tried.into_request_end(self.gateway.clone(), planned, (in_flight, first_byte, status)))
    }

    fn give_up(&mut self, ending: RequestOutcome, status: u16) {
        let Some(mut tried) = self.history.take() else { return };
        tried.leave_queue(&self.gateway, WaitOutcome::Left);
        if ending == RequestOutcome::ClientLeft {
            tried.forget_blame();
        }
        tried.blame(&self.gateway, (None, Instant::now()), None);
        tried.settle_blame(&self.gateway, AnswerStatus::Unanswered);
        // A step that could not be planned leaves no receipt: its error is counted by cause.
        let Some(planned) = tried.planned.take() else { return };
        let (ending, begun) = match tried.partial_answer.take() {
            Some(begun) if ending != RequestOutcome::ClientLeft => (RequestOutcome::Broken, Some(begun)),
            begun => (ending, begun),
        };
        let first_byte = begun.as_ref().and_then(|begun| begun.first_byte);
        let status = begun.as_ref().map_or(status, |begun| begun.status);
        let mut finish = tried.into_request_end(self.gateway.clone(), planned, (None, first_byte, status));
        finish.delivered = begun.as_ref().map_or(Tokens::ZERO, |begun| begun.delivered);
        finish.end(ending, begun.and_then(|begun| begun.usage));
    }
}

impl Drop for Planning {
    fn drop(&mut self) {
        // A queued step has made no attempt.
        if let Some(tried) = self.history.as_mut().filter(|tried| tried.ticket.is_none()) {
            tried.record_attempt(Instant::now(), Vec::new());
        }
        self.give_up(RequestOutcome::ClientLeft, CLIENT_LEFT);
    }
}

#[cfg(test)]
mod tests;
