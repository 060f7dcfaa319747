//! Execute: sends a plan's legs in the engine's API. One executor for all plans; it makes no choices.
//!
//! It returns when the answer has begun (the first bytes of a stream, all of a whole answer). Until then a failed plan
//! can be replaced by another one without the client noticing.

use std::sync::Arc;
use std::time::Instant;

use planner::{Handoff, HandoffKind, LegOrHandoff, Plan};
use prometheus::IntCounterVec;

use super::remote_prefill::{LegPair, remote_prefill};
use super::replicate::replicate;
use super::reverse_pull::{self, ReversePullStore};
use crate::ledger_access::LedgerAccess;
use crate::leg_outcome::{FailedAttempt, StartedAnswer};
use crate::legs::{Legs, worker_to_exclude};
use crate::prefix_mover::PrefixMover;
use crate::prompts::RetainedPromptStore;
use crate::request_states::ClassifiedStep;
use crate::worker_client::WorkerClient;

/// What executing a plan uses.
#[derive(Debug)]
pub struct ExecuteStage {
    pub(super) client: WorkerClient,
    pub(super) mover: PrefixMover,
    pub(super) reverse_pulls: ReversePullStore,
    pub(super) prompts: Arc<RetainedPromptStore>,
    /// What became of parameters that workers handed back.
    pub(super) pull_outcomes: IntCounterVec,
    /// Announces what is executed.
    pub(super) ledger: LedgerAccess,
}

/// Executes `plan` with these legs.
pub async fn execute(
    stage: &ExecuteStage,
    (step, plan): (&ClassifiedStep, &Plan),
    legs: Legs,
) -> Result<StartedAnswer, FailedAttempt> {
    let answer = plan.answer_leg();
    let (legs, asked) = (legs.for_worker(answer.worker), Instant::now());
    let mut in_flight = stage.client.fleet().dispatch(answer.worker, answer.rank, answer.computed_tokens);
    let mut events = Vec::new();
    // Taken on every path: after this step, the session's history no longer matches the stored parameters.
    let mut back = stage.reverse_pulls.take(step.located.session.id);
    let mut prefill = None;
    for part in plan.sequence.before_answer() {
        match part {
            // Sent together with the leg that pulls its KV: some engines let the two wait for each other.
            LegOrHandoff::Leg(leg) => prefill = Some(*leg),
            LegOrHandoff::Handoff(Handoff { kind: HandoffKind::RemotePrefill, .. }) => {}
            LegOrHandoff::Handoff(handoff @ Handoff { kind: HandoffKind::Replicate, .. }) => {
                reverse_pull::count_unused(stage, back.take());
                // Boxed, so that the future of every request does not have room for this one.
                events.extend(Box::pin(replicate(&stage.mover, (step, handoff), &legs)).await);
                in_flight.mark_sent();
            }
        }
    }
    let opened = match prefill {
        None => {
            reverse_pull::count_unused(stage, back);
            legs.serve(answer, legs.body.plain(&legs.options)).await
        }
        Some(prefill) => {
            let pair = LegPair { prefill, decode: *answer };
            let back = reverse_pull::check_usable(stage, (step, &pair), back).await;
            let (opened, met) = Box::pin(remote_prefill(legs.clone(), pair, back)).await;
            events.extend(met);
            opened.map(|opened| reverse_pull::store_returned(stage, (step, &pair), opened))
        }
    };
    match opened {
        Ok(opened) => {
            Ok(StartedAnswer { response: opened, in_flight, sent_at: asked, first_byte: Instant::now(), events })
        }
        Err(error) => {
            events.push(error.attempt_event());
            Err(FailedAttempt { exclude: worker_to_exclude(plan, &error), sent_at: asked, events, error })
        }
    }
}
