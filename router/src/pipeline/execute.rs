//! Execute: a plan's legs are sent, in the engine's dialect. One executor for all plans; it makes no choices.
//!
//! It returns when the answer has begun (a stream's first bytes, a whole answer's last), so that until then a failed
//! plan can be replaced by another without the client noticing.

use std::sync::Arc;
use std::time::Instant;

use planner::{Handoff, Leg, Plan};
use vocabulary::{Tokens, WorkerId};
use workers_shim::fleet::InFlightRequest;

use super::legs::{LegError, LegResponse, Legs, culprit};
use super::plan::ClassifiedStep;
use super::receipt::AttemptEvent;
use super::remote_prefill::remote_prefill;
use super::replicate::replicate;
use super::reverse_pull;
use crate::app_state::AppState;

/// An answer that has begun.
pub struct Dispatched {
    /// Head and body of the answer leg.
    pub response: LegResponse,
    /// The request as the target's load counts it.
    pub in_flight: InFlightRequest,
    /// When its legs were sent.
    pub sent_at: Instant,
    /// When the first byte was there.
    pub first_byte: Instant,
    /// What did not go as planned.
    pub events: Vec<AttemptEvent>,
}

/// A plan that came to nothing before the client got a byte.
#[derive(Debug)]
pub struct FailedAttempt {
    /// When its legs were sent.
    pub sent_at: Instant,
    /// What did not go as planned, the reason last.
    pub events: Vec<AttemptEvent>,
    /// Who is to be left out of the next plan.
    pub exclude: WorkerId,
    /// Why.
    pub error: LegError,
}

/// Carries out `plan` with these legs.
pub async fn execute(
    gateway: &Arc<AppState>,
    (step, plan): (&ClassifiedStep, &Plan),
    legs: Legs,
) -> Result<Dispatched, FailedAttempt> {
    let (legs, asked) = (legs.for_worker(plan.target()), Instant::now());
    let mut in_flight = gateway.fleet().dispatch(plan.target(), plan.decode.rank, plan.decode.tokens_computed);
    let plain = || legs.body.plain(&legs.options);
    let mut remarks = Vec::new();
    // Whatever serves this step, the next one has another history.
    let back = gateway.caches.reverse_pulls.take(step.located.session.id);
    let opened = match plan.handoff {
        None => {
            reverse_pull::count_unused(gateway, back);
            legs.serve(&plan.decode, plain()).await
        }
        Some(Handoff::Replicate { from, rank, blocks, .. }) => {
            reverse_pull::count_unused(gateway, back);
            let source = Leg { worker: from, rank, tokens_cached: Tokens::ZERO, tokens_computed: Tokens::ZERO };
            remarks.extend(replicate(gateway, (step, plan), &legs, (source, blocks)).await);
            in_flight.mark_sent();
            legs.serve(&plan.decode, plain()).await
        }
        Some(Handoff::RemotePrefill { .. }) => {
            let back = reverse_pull::check_usable(gateway, (step, plan), back).await;
            let (opened, met) = remote_prefill(legs.clone(), plan, back).await;
            remarks.extend(met);
            opened.map(|opened| reverse_pull::store_returned(gateway, (step, plan), opened))
        }
    };
    match opened {
        Ok(opened) => {
            Ok(Dispatched { response: opened, in_flight, sent_at: asked, first_byte: Instant::now(), events: remarks })
        }
        Err(error) => {
            remarks.push(error.attempt_event());
            Err(FailedAttempt { exclude: culprit(plan, &error), sent_at: asked, events: remarks, error })
        }
    }
}
