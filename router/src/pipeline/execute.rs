//! Execute: a plan's legs are sent, in the engine's dialect. One executor for all plans; it makes no choices.
//!
//! It returns when the answer has begun (a stream's first bytes, a whole answer's last), so that until then a failed
//! plan can be replaced by another without the client noticing.

use std::sync::Arc;
use std::time::Instant;

use planner::{Handoff, Leg, Plan};
use vocabulary::{Tokens, WorkerId};
use workers_shim::fleet::InFlight;

use super::legs::{LegError, Legs, Opened, culprit};
use super::plan::Classified;
use super::readback;
use super::receipt::Remark;
use super::remote_prefill::remote_prefill;
use super::replicate::replicate;
use crate::gateway::Gateway;
use crate::outliers;

/// An answer that has begun.
pub struct Answering {
    /// Head and body of the answer leg.
    pub opened: Opened,
    /// The request as the target's load counts it.
    pub in_flight: InFlight,
    /// When the first byte was there.
    pub first_byte: Instant,
    /// What did not go as planned.
    pub remarks: Vec<Remark>,
}

/// A plan that came to nothing before the client got a byte.
#[derive(Debug)]
pub struct Failed {
    /// What did not go as planned, the reason last.
    pub remarks: Vec<Remark>,
    /// Who is to be left out of the next plan.
    pub exclude: WorkerId,
    /// Why.
    pub error: LegError,
}

/// Carries out `plan` with these legs.
pub async fn execute(
    gateway: &Arc<Gateway>,
    (step, plan): (&Classified, &Plan),
    legs: Legs,
) -> Result<Answering, Failed> {
    let (legs, asked) = (legs.to(plan.target()), Instant::now());
    let mut in_flight = gateway.fleet().dispatch(plan.target(), plan.decode.rank, plan.decode.tokens_computed);
    let plain = || legs.body.plain(&legs.options);
    let mut remarks = Vec::new();
    // Whatever serves this step, the next one has another history.
    let back = gateway.remembered.readbacks.take(step.located.session.id);
    let opened = match plan.handoff {
        None => {
            readback::unused(gateway, back);
            legs.serve(&plan.decode, plain()).await
        }
        Some(Handoff::Replicate { from, rank, blocks, .. }) => {
            readback::unused(gateway, back);
            let source = Leg { worker: from, rank, tokens_cached: Tokens::ZERO, tokens_computed: Tokens::ZERO };
            remarks.extend(replicate(gateway, (step, plan), &legs, (source, blocks)).await);
            in_flight.sent();
            legs.serve(&plan.decode, plain()).await
        }
        Some(Handoff::RemotePrefill { .. }) => {
            let back = readback::usable(gateway, (step, plan), back).await;
            let (opened, met) = remote_prefill(legs.clone(), plan, back).await;
            remarks.extend(met);
            opened.map(|opened| readback::kept(gateway, (step, plan), opened))
        }
    };
    if let Some(sick) = sick(plan, &remarks, &opened) {
        outliers::failed(gateway, &step.located.workers, (sick, asked));
    }
    match opened {
        Ok(opened) => Ok(Answering { opened, in_flight, first_byte: Instant::now(), remarks }),
        Err(error) => {
            remarks.push(error.remark());
            Err(Failed { exclude: culprit(plan, &error), remarks, error })
        }
    }
}

/// Whom a failure is counted against: who gave it, which need not be who is left out of the next plan.
fn sick(plan: &Plan, remarks: &[Remark], opened: &Result<Opened, LegError>) -> Option<WorkerId> {
    let prefill = remarks.contains(&Remark::PrefillFailed).then_some(plan.prefill.worker);
    match opened {
        // Where the target refuses it too, it is the client's error.
        Ok(opened) => prefill.filter(|_| opened.status().is_success()),
        Err(LegError::Unknown | LegError::Busy(_)) => None,
        Err(LegError::NoSource) => prefill,
        Err(_) => Some(plan.decode.worker),
    }
}

#[cfg(test)]
mod tests {
    use http::{Response, StatusCode};
    use planner::{Action, Because, Claim, Rule, Terms};
    use vocabulary::{DpRank, Micros};
    use workers_shim::dialect::Answer;

    use super::*;

    #[test]
    fn a_failure_counts_against_who_gave_it() {
        let leg = |id| Leg {
            worker: WorkerId(id),
            rank: DpRank(0),
            tokens_cached: Tokens::ZERO,
            tokens_computed: Tokens::ZERO,
        };
        let because = Because { rule: Rule::Own, terms: Terms::default(), total: Micros(0), runner_up: None };
        let (action, claim) = (Action::RemotePrefill, Claim::Open);
        let plan = Plan { action, prefill: leg(1), decode: leg(2), handoff: None, claim, because };
        let opened = |status| {
            let answer = Response::builder().status(status).body(bytes::Bytes::new()).unwrap();
            Ok(Opened::Whole(answer, Answer::default()))
        };
        let sick = |remarks: &[Remark], opened| sick(&plan, remarks, &opened).map(|worker| worker.0);
        let failed = || Err(LegError::Failed(StatusCode::INTERNAL_SERVER_ERROR));
        assert_eq!(sick(&[], failed()), Some(2), "the decode leg's worker said so, whoever computed the prompt");
        assert_eq!(sick(&[Remark::PrefillFailed], opened(200)), Some(1));
        assert_eq!(sick(&[Remark::PrefillFailed], opened(400)), None, "both refuse it: it is the client's error");
        assert_eq!(sick(&[Remark::PrefillBusy], opened(200)), None);
        assert_eq!(sick(&[Remark::PrefillBusy], Err(LegError::NoSource)), None, "no room is no sickness");
        assert_eq!(sick(&[Remark::PrefillFailed], Err(LegError::NoSource)), Some(1));
        assert_eq!(sick(&[], Err(LegError::Busy(StatusCode::TOO_MANY_REQUESTS))), None);
        assert_eq!(sick(&[], opened(200)), None);
    }
}
