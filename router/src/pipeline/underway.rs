//! A step from its first plan to the first byte of its answer: what was tried, and what is to be done when there will be
//! no answer. Dropping it is the client leaving, so that nothing that was announced is left behind.

use std::sync::Arc;
use std::time::Instant;

use http::StatusCode;
use planner::{Action, Plan, Start, Verdict};
use vocabulary::{Micros, Tokens, WorkerId};
use workers_shim::dialect::Usage;
use workers_shim::fleet::InFlight;

use super::execute::{Answering, Failed};
use super::finish::Finish;
use super::legs::{LegError, Opened};
use super::locate;
use super::plan::{Classified, Planned};
use super::receipt::{Attempt, Ending, Remark, Resumed};
use super::turns::{Place, Until, Waited};
use crate::error::ApiError;
use crate::gateway::Gateway;
use crate::outliers::{self, Suspects, Trials};

/// Most plans that are tried for one request.
const MOST_TRIES: usize = 3;
/// What servers log for a client that left before its answer began.
const CLIENT_LEFT: u16 = 499;

/// A step that is being served, and has no answer yet.
pub struct Underway {
    gateway: Arc<Gateway>,
    /// None once it is over.
    tried: Option<Tried>,
}

struct Tried {
    step: Classified,
    /// What the planner chose first.
    chosen: Option<Action>,
    /// The plan under way, or the last one that failed.
    planned: Option<Planned>,
    /// Every finished try, the newest last.
    attempts: Vec<Attempt>,
    excluded: Vec<WorkerId>,
    /// How the last try failed, and what the client is told when nothing else can be tried.
    failed: Option<(Remark, ApiError)>,
    /// Its place while it waits.
    place: Option<Place>,
    /// How it waited, once that is over.
    waited: Option<Waited>,
    /// What the client has of the answer, where it broke off.
    begun: Option<Begun>,
    /// One of whom failed the last try, and the trials of that, which last until it is known who it was.
    suspects: Option<(Suspects, Option<Trials>)>,
    /// Who answered it with an error so far.
    failures: Failures,
}

/// An answer that broke off.
#[derive(Debug)]
pub struct Break {
    /// How.
    pub remark: Remark,
    /// What the client is told when it cannot go on.
    pub error: ApiError,
    /// Tokens of the answer that are kept.
    pub after: Tokens,
    /// Those of the prompt and of what was delivered, where they are known.
    pub usage: Option<Usage>,
    /// Tokens of the answer that were delivered, counted by events.
    pub delivered: Tokens,
}

/// What the client has of an answer that broke off.
struct Begun {
    first_byte: Option<Instant>,
    status: u16,
    broke: Instant,
    /// Tries until then.
    tries: usize,
    after: Tokens,
    usage: Option<Usage>,
    delivered: Tokens,
}

/// Whether a worker answered a request in the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RequestOutcome {
    Answered,
    Unanswered,
}

/// Workers that answered this request with an error of theirs, when it was sent there, and the trials of that try, which last
/// until it is known whose fault it was.
pub(super) type Failures = Vec<(WorkerId, Instant, Option<Trials>)>;

/// It is known whether the request or its workers are to blame for what failed: what fails at two workers, and nowhere is
/// answered, would fail at all of them. What failed at one, and was tried nowhere else, counts seldom: where there are several
/// tenants, one's requests take no workers from the others.
pub(super) fn settle_failures(gateway: &Gateway, step: &Classified, failures: Failures, settled: RequestOutcome) {
    let incoming = &step.located.prefixed.request.incoming;
    if settled == RequestOutcome::Unanswered && failures.len() >= 2 {
        let request = incoming.id;
        tracing::warn!(%request, workers = failures.len(), "a request failed at every worker that was asked: it counts against none");
        return;
    }
    let is_confirmed = settled == RequestOutcome::Answered || !gateway.keys.are_several();
    for (worker, asked, _trials) in failures {
        if is_confirmed || gateway.policies.outliers.lock().counts_unconfirmed(&incoming.tenant, Instant::now()) {
            outliers::failed(gateway, &step.located.workers, (worker, asked));
        }
    }
}

impl Tried {
    /// Whether it is to wait. Where it is not, a wait is over.
    fn takes_its_turn(&mut self, gateway: &Gateway, planned: &Planned) -> bool {
        let until = match planned.admission {
            Some((_, Some(Verdict::Hold { costs_others }))) => {
                let request = self.step.located.prefixed.request.incoming.id;
                let place = || Place::of(gateway.policies.account(), request, costs_others);
                self.place = self.place.take().or_else(place);
                return true;
            }
            Some((asking, Some(Verdict::Start { why: Start::NoPlace }))) => {
                self.note_wait(
                    gateway,
                    Waited { time: Micros::ZERO, costs_others: asking.costs_others, until: Until::NoPlace },
                );
                return false;
            }
            Some((_, Some(Verdict::Start { why }))) => why.into(),
            _ => Until::Room,
        };
        self.over(gateway, until);
        false
    }

    /// It waits no longer, if it did.
    fn over(&mut self, gateway: &Gateway, until: Until) {
        if let Some(place) = self.place.take() {
            self.note_wait(gateway, place.waited(until));
        }
    }

    fn note_wait(&mut self, gateway: &Gateway, waited: Waited) {
        let seconds = &gateway.metrics.decisions.waited;
        seconds.with_label_values(&[waited.until.as_ref()]).observe(waited.time.duration().as_secs_f64());
        self.waited = Some(waited);
    }

    fn note(&mut self, asked: Instant, remarks: Vec<Remark>) {
        let Some(Planned { plan, ejected, .. }) = &self.planned else { return };
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

    /// A try is over: counts against its workers what it shows of them, and of those of the one before. `sick` failed; `well`
    /// answers.
    fn blame(&mut self, gateway: &Gateway, (sick, asked): (Option<WorkerId>, Instant), well: Option<WorkerId>) {
        let (before, trials) = self.suspects.take().unzip();
        let before = before.map(|suspects| suspects.sick(well));
        self.failures.extend(before.map(|(worker, asked)| (worker, asked, trials.flatten())));
        self.failures.extend(sick.map(|worker| (worker, asked, None)));
        // Where the rest of an answer only begins, its end tells.
        if well.is_some() && self.begun.is_none() {
            self.settle_blame(gateway, RequestOutcome::Answered);
        }
    }

    /// Nobody else was asked: whose fault it was is not known.
    fn forget_blame(&mut self) {
        self.suspects = None;
        self.failures.clear();
    }

    fn settle_blame(&mut self, gateway: &Gateway, settled: RequestOutcome) {
        settle_failures(gateway, &self.step, std::mem::take(&mut self.failures), settled);
    }

    /// What brings the step to its end by this plan; who answers it, when the first byte was there, and its status.
    fn finish(
        self,
        gateway: Arc<Gateway>,
        planned: Planned,
        (in_flight, first_byte, status): (Option<InFlight>, Option<Instant>, u16),
    ) -> Finish {
        let Self { step, chosen, attempts, waited, failures, .. } = self;
        let delivered = Tokens::ZERO;
        Finish { gateway, step, chosen, planned, attempts, waited, in_flight, first_byte, status, delivered, failures }
    }

    /// Tries since the step began, or since its answer broke off.
    fn tries(&self) -> usize {
        self.attempts.len() - self.begun.as_ref().map_or(0, |begun| begun.tries)
    }
}

impl Underway {
    /// Nothing was tried yet.
    pub fn new(gateway: &Arc<Gateway>, step: Classified) -> Self {
        let (attempts, excluded) = (Vec::new(), Vec::new());
        let (planned, chosen, failed, place, waited, begun, suspects) = (None, None, None, None, None, None, None);
        let failures = Vec::new();
        let tried =
            Tried { step, chosen, planned, attempts, excluded, failed, place, waited, begun, suspects, failures };
        Self { gateway: gateway.clone(), tried: Some(tried) }
    }

    /// An answer broke off, and is to go on elsewhere.
    pub fn broken(finish: Finish, broken: Break) -> Self {
        let Finish {
            gateway, mut step, chosen, mut planned, mut attempts, waited, first_byte, status, failures, ..
        } = finish;
        let Break { remark, error, after, usage, delivered } = broken;
        attempts.iter_mut().last().into_iter().for_each(|attempt| attempt.remarks.push(remark));
        if let Some(tenure) = planned.tenure.take() {
            tenure.failed();
        }
        step.located = locate::broken_off(&gateway, step.located);
        let tries = attempts.len();
        let begun = Begun { first_byte, status, broke: Instant::now(), tries, after, usage, delivered };
        // Whoever broke off is asked no more: it may be the request that breaks them.
        let excluded = attempts.iter().map(|attempt| attempt.decode).collect();
        let failed = Some((remark, error));
        let (planned, begun, place, suspects) = (Some(planned), Some(begun), None, None);
        let tried =
            Tried { step, chosen, planned, attempts, excluded, failed, place, waited, begun, suspects, failures };
        Self { gateway, tried: Some(tried) }
    }

    /// Makes the next plan with `plan`, which is shown the step and who is to be left out; none while the step is to wait.
    /// When there cannot be one, the client hears of the try that failed before, if there was one.
    pub fn planned(
        &mut self,
        plan: impl FnOnce(&Classified, &[WorkerId]) -> Result<Planned, ApiError>,
    ) -> Result<Option<(&Classified, Plan)>, ApiError> {
        let tried = self.tried.as_mut().expect("only its consumers and its end take it");
        let is_first = tried.failed.is_none();
        let tenant = &tried.step.located.prefixed.request.incoming.tenant;
        // Before it is planned: a plan is noted in the account.
        let next = if is_first || self.gateway.policies.retries.spend(tenant, Instant::now()) {
            plan(&tried.step, &tried.excluded)
        } else {
            self.gateway.metrics.requests.retries_refused.inc();
            tried.forget_blame();
            Err(ApiError::Overloaded { what: "too many requests are tried again" })
        };
        match next {
            Ok(planned) => {
                if let Some((remark, _)) = &tried.failed {
                    self.gateway.metrics.requests.retries.with_label_values(&[remark.as_ref()]).inc();
                }
                let plan = planned.plan;
                let chosen = planned.decision.as_ref().map(|decision| decision.plan.action);
                tried.chosen = tried.chosen.or(chosen);
                let waits = tried.takes_its_turn(&self.gateway, &planned);
                tried.planned = Some(planned);
                let tried = self.tried.as_ref().expect("it was there a line ago");
                Ok((!waits).then_some((&tried.step, plan)))
            }
            Err(error) => {
                let error = tried.failed.take().map_or(error, |(_, failed)| failed);
                self.give_up(Ending::Failed, error.status().as_u16());
                Err(error)
            }
        }
    }

    /// A step that waits, until it is its turn to be planned again: then it is made anew with `anew`.
    pub async fn called(&mut self, anew: impl FnOnce(Classified) -> Classified) {
        if let Some(place) = self.tried.as_ref().and_then(|tried| tried.place.as_ref()) {
            place.called().await;
        }
        self.tried = self.tried.take().map(|tried| Tried { step: anew(tried.step), ..tried });
    }

    /// Notes a failed try. The error is the client's when no other is worth trying.
    pub fn failed(&mut self, failed: Failed) -> Result<(), ApiError> {
        tracing::warn!(worker = %failed.exclude, error = %failed.error, "a plan failed before its first byte");
        let error = LegError::for_client(&failed.error);
        let tried = self.tried.as_mut().expect("only its consumers and its end take it");
        let plan = tried.planned.as_ref().map(|planned| planned.plan);
        let suspects = plan.and_then(|plan| Suspects::of(&plan, (&failed.remarks, &failed.error), failed.asked));
        let sick = plan.filter(|_| suspects.is_none());
        let sick = sick.and_then(|plan| outliers::sick(&plan, &failed.remarks, Err(&failed.error)));
        if let (Some(worker), false) = (sick, matches!(failed.error, LegError::Failed(_))) {
            // No answer at all is the worker's, whatever the request is.
            outliers::failed(&self.gateway, &tried.step.located.workers, (worker, failed.asked));
        }
        let sick = sick.filter(|_| matches!(failed.error, LegError::Failed(_)));
        tried.blame(&self.gateway, (sick, failed.asked), None);
        let trials = tried.planned.as_mut().and_then(|planned| planned.trials.take());
        match suspects {
            Some(suspects) => tried.suspects = Some((suspects, trials)),
            None => {
                if let Some((.., of_try)) = tried.failures.last_mut().filter(|_| sick.is_some()) {
                    *of_try = trials;
                }
            }
        }
        tried.note(failed.asked, failed.remarks);
        tried.excluded.push(failed.exclude);
        if let Some(tenure) = tried.planned.as_mut().and_then(|planned| planned.tenure.take()) {
            tenure.failed();
        }
        if tried.tries() >= MOST_TRIES || !failed.error.retryable() {
            self.give_up(Ending::Failed, error.status().as_u16());
            return Err(error);
        }
        tried.failed = Some((failed.error.remark(), error));
        Ok(())
    }

    /// The answer began: what is left is to bring it to its end.
    pub fn answering(mut self, answering: Answering) -> (Opened, Finish) {
        let mut tried = self.tried.take().expect("only its consumers and its end take it");
        let planned = tried.planned.take().expect("an answer has a plan");
        let sick = outliers::sick(&planned.plan, &answering.remarks, Ok(&answering.opened));
        let well = answering.opened.status().is_success().then_some(planned.plan.target());
        tried.blame(&self.gateway, (sick, answering.asked), well);
        if well.is_none() {
            // Refused: it is the client's error, whoever failed before.
            tried.settle_blame(&self.gateway, RequestOutcome::Unanswered);
        }
        planned.trials.iter().for_each(Trials::heard);
        tried.planned = Some(planned);
        tried.note(answering.asked, answering.remarks);
        if let (Some(begun), Some(attempt)) = (&tried.begun, tried.attempts.last_mut()) {
            let took = Micros::of(answering.first_byte - begun.broke);
            attempt.resumed = Some(Resumed { after: begun.after, took });
        }
        let (first_byte, status) = tried
            .begun
            .take()
            .map_or((Some(answering.first_byte), StatusCode::OK.as_u16()), |begun| (begun.first_byte, begun.status));
        let planned = tried.planned.take().expect("an answer has a plan");
        let in_flight = Some(answering.in_flight);
        (answering.opened, tried.finish(self.gateway.clone(), planned, (in_flight, first_byte, status)))
    }

    fn give_up(&mut self, ending: Ending, status: u16) {
        let Some(mut tried) = self.tried.take() else { return };
        tried.over(&self.gateway, Until::Left);
        if ending == Ending::ClientLeft {
            tried.forget_blame();
        }
        tried.blame(&self.gateway, (None, Instant::now()), None);
        tried.settle_blame(&self.gateway, RequestOutcome::Unanswered);
        // A step that nobody could even plan leaves no receipt: its error is counted by cause.
        let Some(planned) = tried.planned.take() else { return };
        let (ending, begun) = match tried.begun.take() {
            Some(begun) if ending != Ending::ClientLeft => (Ending::Broken, Some(begun)),
            begun => (ending, begun),
        };
        let first_byte = begun.as_ref().and_then(|begun| begun.first_byte);
        let status = begun.as_ref().map_or(status, |begun| begun.status);
        let mut finish = tried.finish(self.gateway.clone(), planned, (None, first_byte, status));
        finish.delivered = begun.as_ref().map_or(Tokens::ZERO, |begun| begun.delivered);
        finish.end(ending, begun.and_then(|begun| begun.usage));
    }
}

impl Drop for Underway {
    fn drop(&mut self) {
        // Of one that waits nothing was tried.
        if let Some(tried) = self.tried.as_mut().filter(|tried| tried.place.is_none()) {
            tried.note(Instant::now(), Vec::new());
        }
        self.give_up(Ending::ClientLeft, CLIENT_LEFT);
    }
}

#[cfg(test)]
mod tests;
