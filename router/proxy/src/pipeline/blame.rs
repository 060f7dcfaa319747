//! Decides which worker a request's outcome counts for or against.

use std::time::Instant;

use planner::{Handoff, HandoffKind, Plan};
use vocabulary::WorkerId;

use crate::leg_outcome::{LegError, LegResponse};
use crate::outliers::{SharedOutlierDetector, TrialGuard};
use crate::receipt::{Attempt, AttemptEvent};
use crate::request_states::ClassifiedStep;
use crate::tenant_isolation::TenantIsolation;

/// Returns the worker that a failure counts against: the one that failed, which need not be the one that the next plan
/// excludes.
pub(super) fn culprit(
    plan: &Plan,
    events: &[AttemptEvent],
    opened: Result<&LegResponse, &LegError>,
) -> Option<WorkerId> {
    let prefill = events.contains(&AttemptEvent::PrefillFailed).then_some(plan.prompt_leg().worker);
    match opened {
        // If the target refuses the request, too, it is the client's error.
        Ok(opened) => prefill.filter(|_| opened.status().is_success()),
        Err(LegError::UnknownWorker | LegError::Busy(_) | LegError::OverBudget(_) | LegError::AnswerOverBudget) => None,
        Err(LegError::NoSource) => prefill,
        Err(_) => Some(plan.target()),
    }
}

/// Two workers, one of which failed a request: the decode leg's worker answered with an error after the prefill leg's
/// had succeeded, and the KV that the latter sent may be the cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SuspectPair {
    prefill: WorkerId,
    decode: WorkerId,
    sent_at: Instant,
}

impl SuspectPair {
    /// Returns the suspects; `None` where the culprit is known.
    pub(super) fn of(plan: &Plan, (events, error): (&[AttemptEvent], &LegError), asked: Instant) -> Option<Self> {
        let Handoff { source, target, .. } = plan.sequence.handoff(HandoffKind::RemotePrefill)?;
        let is_open = matches!(error, LegError::Failed(_)) && !events.contains(&AttemptEvent::PrefillFailed);
        is_open.then_some(Self { prefill: source.worker, decode: target.worker, sent_at: asked })
    }

    /// Returns the culprit and when it was sent the request, given the worker `well` that answered the request
    /// afterwards; `None` where no worker did.
    pub(super) fn culprit(self, well: Option<WorkerId>) -> (WorkerId, Instant) {
        let is_decode_well = well == Some(self.decode);
        (if is_decode_well { self.prefill } else { self.decode }, self.sent_at)
    }
}

/// Whether a worker eventually answered a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum AnswerOutcome {
    Answered,
    Unanswered,
}

/// Workers that answered this request with a server error, when it was sent to each, and the attempt's trials, kept
/// until it is known whether the worker was at fault.
pub(super) type WorkerFailures = Vec<(WorkerId, Instant, Option<TrialGuard>)>;

/// Failures of one request that no worker is charged with yet.
#[derive(Default)]
pub(super) struct UnattributedFailures {
    /// Two workers, one of which failed the last attempt, and that attempt's trials, kept until the culprit is known.
    pub(super) suspects: Option<(SuspectPair, Option<TrialGuard>)>,
    /// Workers that have answered this request with an error so far.
    pub(super) failures: WorkerFailures,
}

impl UnattributedFailures {
    /// Decides which of the suspects failed, given the worker `well` that answers now; `None` where the attempt after
    /// theirs failed as well.
    pub(super) fn resolve_suspects(&mut self, well: Option<WorkerId>) {
        let Some((suspects, trials)) = self.suspects.take() else { return };
        let (worker, asked) = suspects.culprit(well);
        self.failures.push((worker, asked, trials));
    }

    /// Returns all failures of a request that no worker answered.
    pub(super) fn into_failures(mut self) -> WorkerFailures {
        self.resolve_suspects(None);
        self.failures
    }
}

/// Reports the results of requests to the outlier detector. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct OutlierReporter {
    pub(super) outliers: SharedOutlierDetector,
    pub(super) isolation: TenantIsolation,
}

impl OutlierReporter {
    /// Counts failures against workers, once it is known whether the request or the workers are to blame. A request
    /// that failed at two workers and was answered by none would fail at all of them, so it counts against none. Where
    /// there are several tenants, unconfirmed failures count only at a limited rate, so that one tenant's requests
    /// cannot take workers from the others.
    pub(super) fn settle_failures(&self, step: &ClassifiedStep, failures: WorkerFailures, settled: AnswerOutcome) {
        let incoming = &step.located.identified.request.incoming;
        if settled == AnswerOutcome::Unanswered && failures.len() >= 2 {
            let request = incoming.id;
            tracing::warn!(%request, workers = failures.len(), "a request failed at every worker that was asked: it counts against none");
            return;
        }
        let is_confirmed = settled == AnswerOutcome::Answered || !self.isolation.keys().has_several_tenants();
        for (worker, asked, _trials) in failures {
            if is_confirmed || self.outliers.lock().counts_unconfirmed(&incoming.tenant, Instant::now()) {
                self.outliers.record_failure(&step.located.workers, (worker, asked));
            }
        }
    }

    /// Counts the complete answer of this attempt for the workers of its plan.
    pub(super) fn record_success(&self, step: &ClassifiedStep, plan: &Plan, attempt: &Attempt) {
        let failed = [AttemptEvent::PrefillFailed, AttemptEvent::PrefillBusy, AttemptEvent::MemoryBudgetExceeded];
        let is_whole = !failed.iter().any(|event| attempt.events.contains(event));
        let served: Vec<_> = if is_whole { plan.workers().collect() } else { vec![plan.target()] };
        self.outliers.record_success(&step.located.workers, (&served, attempt.asked));
    }
}

#[cfg(test)]
mod tests {
    use http::{Response, StatusCode};
    use planner::{
        Action, CostTerms, Leg, LegRole, LegSequence, OwnershipEffect, PlanRationale, SelectionRule, WorkerRank,
    };
    use vocabulary::{Bytes, DpRank, Micros};
    use workers_shim::engine_api::AnswerSummary;

    use super::*;

    fn leg(role: LegRole, id: u64) -> Leg {
        Leg::new(role, WorkerRank { worker: WorkerId(id), rank: DpRank(0) })
    }

    fn plan(sequence: LegSequence) -> Plan {
        let rationale = PlanRationale {
            policy: SelectionRule::LowestCost,
            cost_terms: CostTerms::default(),
            total_cost: Micros(0),
            runner_up: None,
        };
        Plan { action: Action::RemotePrefill, sequence, ownership: OwnershipEffect::Claim, rationale }
    }

    /// Worker 1 computes the prompt, worker 2 answers.
    fn remote_prefill() -> Plan {
        let (prefill, decode) = (leg(LegRole::Prefill, 1), leg(LegRole::Decode, 2));
        let (kind, source, target) = (HandoffKind::RemotePrefill, prefill.at(), decode.at());
        let handoff = Handoff { kind, source, target, blocks: None, bytes: Bytes(1) };
        plan(LegSequence::remote_prefill(prefill, handoff, decode))
    }

    #[test]
    fn a_failure_counts_against_the_worker_that_caused_it() {
        let opened = |status| {
            let answer = Response::builder().status(status).body(bytes::Bytes::new()).unwrap();
            Ok(LegResponse::Whole(answer, AnswerSummary::default()))
        };
        let sick = |events: &[AttemptEvent], opened: Result<LegResponse, LegError>| {
            culprit(&remote_prefill(), events, opened.as_ref()).map(|worker| worker.0)
        };
        let failed = || Err(LegError::Failed(StatusCode::INTERNAL_SERVER_ERROR));
        assert_eq!(sick(&[], failed()), Some(2), "the decode leg's worker said so, whoever computed the prompt");
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], opened(200)), Some(1));
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], opened(400)), None, "both refuse it: it is the client's error");
        assert_eq!(sick(&[AttemptEvent::PrefillBusy], opened(200)), None);
        assert_eq!(sick(&[AttemptEvent::PrefillBusy], Err(LegError::NoSource)), None, "no room is no sickness");
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], Err(LegError::NoSource)), Some(1));
        assert_eq!(sick(&[], Err(LegError::Busy(StatusCode::TOO_MANY_REQUESTS))), None);
        assert_eq!(sick(&[], opened(200)), None);
    }

    #[test]
    fn the_next_answering_worker_decides_which_of_two_suspects_failed() {
        let now = Instant::now();
        let failed = LegError::Failed(StatusCode::INTERNAL_SERVER_ERROR);
        let both = remote_prefill();
        let suspects = SuspectPair::of(&both, (&[], &failed), now).unwrap();
        assert_eq!(suspects.culprit(Some(WorkerId(2))), (WorkerId(1), now), "without the other one's it answers");
        assert_eq!(suspects.culprit(Some(WorkerId(3))), (WorkerId(2), now));
        assert_eq!(suspects.culprit(None), (WorkerId(2), now));
        assert_eq!(
            SuspectPair::of(&both, (&[AttemptEvent::PrefillFailed], &failed), now),
            None,
            "it computed all of it"
        );
        assert_eq!(SuspectPair::of(&both, (&[], &LegError::NoSource), now), None, "the decode leg was not asked");
        let alone = plan(LegSequence::serve(leg(LegRole::Serve, 2)));
        assert_eq!(SuspectPair::of(&alone, (&[], &failed), now), None);
    }
}
