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

/// An answer that has begun.
pub struct Answering {
    /// Head and body of the answer leg.
    pub opened: Opened,
    /// The request as the target's load counts it.
    pub in_flight: InFlight,
    /// When its legs were sent.
    pub asked: Instant,
    /// When the first byte was there.
    pub first_byte: Instant,
    /// What did not go as planned.
    pub remarks: Vec<Remark>,
}

/// A plan that came to nothing before the client got a byte.
#[derive(Debug)]
pub struct Failed {
    /// When its legs were sent.
    pub asked: Instant,
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
    match opened {
        Ok(opened) => Ok(Answering { opened, in_flight, asked, first_byte: Instant::now(), remarks }),
        Err(error) => {
            remarks.push(error.remark());
            Err(Failed { exclude: culprit(plan, &error), asked, remarks, error })
        }
    }
}
