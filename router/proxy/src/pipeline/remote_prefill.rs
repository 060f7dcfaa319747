//! Remote prefill in two legs: one worker computes the prompt, another pulls its blocks and answers.
//!
//! After the prefill leg its blocks are held until somebody pulls them. So the legs run in a task of their own: when
//! the client leaves, the task still lets the decode leg pull, for one token. A prefill leg that is still running at
//! that time is cancelled, and holds nothing.

mod together;

use std::time::Duration;

use planner::Leg;
use tokio::sync::oneshot;
use workers_shim::engine_api::{AnswerSummary, HandoffParams, KvTransfer, LegBody, LegOrder, ReversePullParams};

use super::reverse_pull::ReversePullSource;
use crate::leg_outcome::{LegError, LegResponse};
use crate::legs::Legs;
use crate::receipt::{AttemptEvent, ReversePullOutcome};

/// The two legs of a remote prefill.
#[derive(Clone, Copy, Debug)]
pub struct LegPair {
    /// Computes the prompt.
    pub prefill: Leg,
    /// Pulls the prompt's KV and answers.
    pub decode: Leg,
}

/// The answer, and the deviations from the plan before it began.
pub type RemotePrefillAnswer = (Result<LegResponse, LegError>, Vec<AttemptEvent>);

/// How long a decode leg continues without a client, so that it can pull.
const PULL_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs both legs. Dropping the future means that the client left. `source` is what the prefill leg can fetch before it
/// computes.
pub async fn remote_prefill(legs: Legs, pair: LegPair, source: Option<ReversePullSource>) -> RemotePrefillAnswer {
    let (sender, receiver) = oneshot::channel();
    tokio::spawn(run(legs, pair, source, sender));
    receiver.await.unwrap_or((Err(LegError::Broken), Vec::new()))
}

async fn run(
    legs: Legs,
    pair: LegPair,
    source: Option<ReversePullSource>,
    mut client: oneshot::Sender<RemotePrefillAnswer>,
) {
    let Some(transfer) = legs.transfer(&pair.prefill, &pair.decode) else {
        let opened = serve_without_transfer(&legs, &pair).await;
        let _ = client.send((opened, vec![AttemptEvent::MissingKvTransferParams]));
        return;
    };
    if transfer.leg_order() == Some(LegOrder::Concurrent) {
        return together::run((&legs, &pair), &transfer, client).await;
    }
    let mut events = Vec::new();
    let handoff = tokio::select! {
        biased;
        handoff = prefill((&legs, &pair), (&transfer, source), &mut events) => handoff,
        () = client.closed() => return,
    };
    run_decode((&legs, &pair), (&transfer, handoff, events), client).await;
}

/// Runs the decode leg after the prefill leg: for the client, or only to release the blocks.
async fn run_decode(
    (legs, pair): (&Legs, &LegPair),
    (transfer, handoff, events): (&KvTransfer, Option<HandoffParams>, Vec<AttemptEvent>),
    mut client: oneshot::Sender<RemotePrefillAnswer>,
) {
    if client.is_closed() {
        if let Some(handoff) = handoff {
            let body = legs.body.decode_abandoned(&legs.options, (transfer, handoff));
            // It pulls the blocks; nobody reads its answer.
            let _ = legs.send_silent(&pair.decode, legs.path(), body).await;
        }
        return;
    }
    let body = legs.body.decode(&legs.options, (transfer, handoff));
    let opened = tokio::select! {
        opened = serve_while_source_lives(legs, pair, body) => opened,
        // A whole answer does not show when its blocks were pulled; it is not computed to its end without a client.
        () = client_left(&mut client) => return,
    };
    // If the client has left meanwhile, the blocks were pulled before the first byte; dropping the answer cancels it.
    let _ = client.send((opened, events));
}

/// Returns when the client has left and the decode leg has had time to pull.
async fn client_left(client: &mut oneshot::Sender<RemotePrefillAnswer>) {
    client.closed().await;
    tokio::time::sleep(PULL_TIMEOUT).await;
}

/// Runs the prefill leg. Without a handoff the decode leg computes the prompt itself, or finds it in a store.
async fn prefill(
    (legs, pair): (&Legs, &LegPair),
    (transfer, back): (&KvTransfer, Option<ReversePullSource>),
    events: &mut Vec<AttemptEvent>,
) -> Option<HandoffParams> {
    let answered = match back {
        Some(back) => match run_reverse_pull((legs, pair), transfer, back).await {
            Ok(answer) => Ok(answer),
            Err(error) => {
                tracing::warn!(worker = %pair.prefill.worker, %error, "a prefill leg could not fetch what was handed back, and computes it");
                events.push(AttemptEvent::ReversePullFailed);
                run_source_leg(legs, pair, (transfer, None)).await
            }
        },
        None => run_source_leg(legs, pair, (transfer, None)).await,
    };
    match answered {
        Ok(answer) => {
            let handed = transfer.leg_order() == Some(LegOrder::SourceFirst);
            events.extend(unexpected_event(pair, answer.handoff.as_ref()).filter(|_| handed));
            answer.handoff
        }
        Err(error) => {
            tracing::warn!(worker = %pair.prefill.worker, %error, "a prefill leg failed; the target computes the prompt");
            events.push(failed_prefill_event(&error));
            None
        }
    }
}

/// Returns the event for a step whose prefill leg failed with this error.
fn failed_prefill_event(error: &LegError) -> AttemptEvent {
    match error {
        LegError::Busy(_) | LegError::UnknownWorker => AttemptEvent::PrefillBusy,
        LegError::OverBudget(_) | LegError::AnswerOverBudget => AttemptEvent::MemoryBudgetExceeded,
        _ => AttemptEvent::PrefillFailed,
    }
}

/// Sends the prefill leg and returns its answer, whose text nobody reads.
async fn run_source_leg(
    legs: &Legs,
    pair: &LegPair,
    (transfer, readback): (&KvTransfer, Option<ReversePullParams>),
) -> Result<AnswerSummary, LegError> {
    let body = legs.body.prefill(&legs.options, (transfer, readback));
    let _counted = legs.dispatch(&pair.prefill);
    tokio::select! {
        answer = legs.send_silent(&pair.prefill, legs.path(), body) => answer,
        // A machine that vanishes closes no connection.
        () = legs.worker_lost(pair.prefill.worker) => Err(LegError::Broken),
    }
}

/// Runs a prefill leg that fetches returned KV first. Gives up when the holder of that KV dies: the engine would keep
/// trying for many seconds.
async fn run_reverse_pull(
    (legs, pair): (&Legs, &LegPair),
    transfer: &KvTransfer,
    source: ReversePullSource,
) -> Result<AnswerSummary, LegError> {
    let ReversePullSource { params: readback, holder: keeper, outcomes: fates } = source;
    let count = |fate: ReversePullOutcome| fates.with_label_values(&[fate.as_ref()]).inc();
    let answer = tokio::select! {
        answer = run_source_leg(legs, pair, (transfer, Some(readback))) => answer,
        () = legs.worker_lost(keeper) => Err(LegError::Broken),
    };
    count(if answer.is_ok() { ReversePullOutcome::Pulled } else { ReversePullOutcome::Failed });
    answer
}

/// Lets the target compute the prompt itself, where it can.
async fn serve_without_transfer(legs: &Legs, pair: &LegPair) -> Result<LegResponse, LegError> {
    if !legs.serves_alone(pair.decode.worker) {
        return Err(LegError::NoSource);
    }
    legs.serve(&pair.decode, legs.body.plain(&legs.options)).await
}

/// Returns what the producer did differently than expected, if anything.
fn unexpected_event(pair: &LegPair, handoff: Option<&HandoffParams>) -> Option<AttemptEvent> {
    let Some(handoff) = handoff else { return Some(AttemptEvent::MissingKvTransferParams) };
    let believed = pair.prefill.cached_tokens.0;
    let recomputed = handoff.source_cached().is_some_and(|cached| cached.0 * 10 < believed * 9);
    recomputed.then_some(AttemptEvent::SourceRecomputed)
}

/// Runs the decode leg. Gives up when the producer dies: the engine would try to pull for many seconds before it fails.
async fn serve_while_source_lives(legs: &Legs, pair: &LegPair, body: LegBody) -> Result<LegResponse, LegError> {
    tokio::select! {
        opened = legs.serve(&pair.decode, body) => opened,
        () = legs.worker_lost(pair.prefill.worker) => Err(LegError::NoSource),
    }
}

#[cfg(test)]
mod tests;
