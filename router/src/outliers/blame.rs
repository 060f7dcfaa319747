//! Decides which worker a request's outcome counts for or against.

use std::time::Instant;

use planner::{Handoff, Plan};
use vocabulary::{WorkerId, WorkerView};

use crate::app_state::AppState;
use crate::pipeline::legs::{LegError, LegResponse};
use crate::pipeline::receipt::{Attempt, AttemptEvent};

/// Returns the worker that a failure counts against: the one that failed, which need not be the one that the next plan
/// excludes.
pub(crate) fn culprit(
    plan: &Plan,
    remarks: &[AttemptEvent],
    opened: Result<&LegResponse, &LegError>,
) -> Option<WorkerId> {
    let prefill = remarks.contains(&AttemptEvent::PrefillFailed).then_some(plan.prefill.worker);
    match opened {
        // If the target refuses the request, too, it is the client's error.
        Ok(opened) => prefill.filter(|_| opened.status().is_success()),
        Err(LegError::UnknownWorker | LegError::Busy(_) | LegError::OverBudget(_)) => None,
        Err(LegError::NoSource) => prefill,
        Err(_) => Some(plan.decode.worker),
    }
}

/// Two workers, one of which failed a request: the decode leg's worker answered with an error after the prefill leg's
/// had succeeded, and the KV that the latter sent may be the cause.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Suspects {
    prefill: WorkerId,
    decode: WorkerId,
    sent_at: Instant,
}

impl Suspects {
    /// Returns the suspects; `None` where the culprit is known.
    pub(crate) fn of(plan: &Plan, (remarks, error): (&[AttemptEvent], &LegError), asked: Instant) -> Option<Self> {
        let (prefill, decode) = (plan.prefill.worker, plan.decode.worker);
        let is_both = matches!(plan.handoff, Some(Handoff::RemotePrefill { .. })) && prefill != decode;
        let is_open =
            is_both && matches!(error, LegError::Failed(_)) && !remarks.contains(&AttemptEvent::PrefillFailed);
        is_open.then_some(Self { prefill, decode, sent_at: asked })
    }

    /// Returns the culprit and when it was sent the request, given the worker `well` that answered the request
    /// afterwards; `None` where no worker did.
    pub(crate) fn culprit(self, well: Option<WorkerId>) -> (WorkerId, Instant) {
        let is_decode_well = well == Some(self.decode);
        (if is_decode_well { self.prefill } else { self.decode }, self.sent_at)
    }
}

/// Counts the failure of a request that this step sent to `worker` at `asked`, before or inside its answer.
pub(crate) fn record_failure(gateway: &AppState, step: &[WorkerView], (worker, asked): (WorkerId, Instant)) {
    if !is_alive(gateway, step, worker) {
        return;
    }
    let workers = gateway.fleet().snapshot();
    let ejected = gateway.policies.outliers.lock().record_failure(&workers, worker, (asked, Instant::now()));
    let Some((cause, pause)) = ejected else { return };
    let endpoint = workers.iter().find(|view| view.id == worker).map(|view| tracing::field::display(&view.endpoint));
    let (cause, seconds) = (cause.as_ref(), pause.as_secs_f64());
    tracing::warn!(
        worker = endpoint,
        cause,
        seconds,
        "a worker is ejected: requests fail there, so that only trials go there for a while"
    );
    gateway.metrics.decisions.outliers.ejections.with_label_values(&[cause]).inc();
}

/// Counts the complete answer of this attempt for the workers of its plan.
pub(crate) fn record_success(gateway: &AppState, step: &[WorkerView], (plan, attempt): (&Plan, Option<&Attempt>)) {
    let Some(attempt) = attempt else { return };
    let without_prefill = [AttemptEvent::PrefillFailed, AttemptEvent::PrefillBusy, AttemptEvent::MemoryBudgetExceeded];
    let is_whole = !without_prefill.iter().any(|remark| attempt.remarks.contains(remark));
    let sound = |view: &&WorkerView| view.id == plan.target() || (is_whole && view.id == plan.prefill.worker);
    for view in step.iter().filter(sound).filter(|view| is_alive(gateway, step, view.id)) {
        if gateway.policies.outliers.lock().record_success((view.id, view.incarnation), (attempt.asked, Instant::now()))
        {
            tracing::info!(worker = %view.endpoint, "a worker that was ejected answers again");
        }
    }
}

/// Whether the incarnation that got the request is still there: results of another one do not count, and an unreachable
/// worker is excluded by that alone.
fn is_alive(gateway: &AppState, step: &[WorkerView], worker: WorkerId) -> bool {
    let asked = step.iter().find(|view| view.id == worker).map(|view| view.incarnation);
    asked.is_some() && gateway.fleet().incarnation(worker) == asked
}

#[cfg(test)]
mod tests {
    use http::{Response, StatusCode};
    use planner::{Action, CostTerms, Leg, OwnershipEffect, PlanRationale, SelectionRule};
    use vocabulary::{Bytes, DpRank, Micros, Tokens};
    use workers_shim::engine_api::EngineResponse;

    use super::*;
    use crate::error::ApiError;

    fn plan(handoff: Option<Handoff>) -> Plan {
        let leg = |id| Leg {
            worker: WorkerId(id),
            rank: DpRank(0),
            tokens_cached: Tokens::ZERO,
            tokens_computed: Tokens::ZERO,
        };
        let because =
            PlanRationale { rule: SelectionRule::Own, terms: CostTerms::default(), total: Micros(0), runner_up: None };
        let (action, claim) = (Action::RemotePrefill, OwnershipEffect::Open);
        Plan { action, prefill: leg(1), decode: leg(2), handoff, claim, because }
    }

    #[test]
    fn a_failure_counts_against_the_worker_that_caused_it() {
        let opened = |status| {
            let answer = Response::builder().status(status).body(bytes::Bytes::new()).unwrap();
            Ok(LegResponse::Whole(answer, EngineResponse::default()))
        };
        let sick = |remarks: &[AttemptEvent], opened: Result<LegResponse, LegError>| {
            culprit(&plan(None), remarks, opened.as_ref()).map(|worker| worker.0)
        };
        let failed = || Err(LegError::Failed(StatusCode::INTERNAL_SERVER_ERROR));
        assert_eq!(sick(&[], failed()), Some(2), "the decode leg's worker said so, whoever computed the prompt");
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], opened(200)), Some(1));
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], opened(400)), None, "both refuse it: it is the client's error");
        assert_eq!(sick(&[AttemptEvent::PrefillBusy], opened(200)), None);
        assert_eq!(sick(&[AttemptEvent::PrefillBusy], Err(LegError::NoSource)), None, "no room is no sickness");
        assert_eq!(sick(&[AttemptEvent::PrefillFailed], Err(LegError::NoSource)), Some(1));
        assert_eq!(sick(&[], Err(LegError::Busy(StatusCode::TOO_MANY_REQUESTS))), None);
        assert_eq!(sick(&[], Err(LegError::OverBudget(ApiError::TooMuchMemory { most: 1 }))), None, "nothing was sent");
        assert_eq!(sick(&[], opened(200)), None);
    }

    #[test]
    fn the_next_answering_worker_decides_which_of_two_suspects_failed() {
        let now = Instant::now();
        let failed = LegError::Failed(StatusCode::INTERNAL_SERVER_ERROR);
        let both = plan(Some(Handoff::RemotePrefill { bytes: Bytes(1) }));
        let suspects = Suspects::of(&both, (&[], &failed), now).unwrap();
        assert_eq!(suspects.culprit(Some(WorkerId(2))), (WorkerId(1), now), "without the other one's it answers");
        assert_eq!(suspects.culprit(Some(WorkerId(3))), (WorkerId(2), now));
        assert_eq!(suspects.culprit(None), (WorkerId(2), now));
        assert_eq!(Suspects::of(&both, (&[AttemptEvent::PrefillFailed], &failed), now), None, "it computed all of it");
        assert_eq!(Suspects::of(&both, (&[], &LegError::NoSource), now), None, "the decode leg was not asked");
        assert_eq!(Suspects::of(&plan(None), (&[], &failed), now), None);
    }
}
