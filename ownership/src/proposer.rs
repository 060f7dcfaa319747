//! The leader's proposer: turns submissions of its own writer and of other nodes into log entries, in order.

use std::sync::Arc;

use consensus::SharedLedgerEntry;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ledger::LedgerEntry;
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResult;
use tokio::sync::{mpsc, oneshot};

use crate::node_core::NodeCore;
use crate::proposal::{ProposalBatch, ProposalResult, ReturnedSubmissions, SubmissionFate};
use crate::raft::TokioTypeConfig;

/// Maximum number of entries in flight.
const MAX_IN_FLIGHT: usize = 256;

/// Runs until all senders of the queue are gone.
pub(crate) async fn run(core: Arc<NodeCore>, queue: &mut mpsc::Receiver<ProposalBatch>) {
    let mut in_flight = FuturesUnordered::new();
    loop {
        tokio::select! {
            asked = queue.recv(), if in_flight.len() < MAX_IN_FLIGHT => {
                let Some(proposal) = asked else { return };
                if let Some(written) = propose(&core, proposal).await {
                    in_flight.push(written.await_applied());
                }
            }
            Some(()) = in_flight.next() => {}
        }
    }
}

/// Entry that was handed to Raft.
struct PendingEntry {
    entry: Arc<LedgerEntry>,
    done: oneshot::Receiver<ClientWriteResult<TokioTypeConfig>>,
    answer: oneshot::Sender<ProposalResult>,
}

/// Hands an entry to Raft. It enters Raft's own queue here, so entries keep their order.
async fn propose(core: &NodeCore, ProposalBatch { submissions, answer }: ProposalBatch) -> Option<PendingEntry> {
    let Some((time, leader)) = core.entry_time() else {
        // The requester may be gone.
        drop(answer.send(Err(ReturnedSubmissions { submissions, fate: SubmissionFate::NotAccepted })));
        return None;
    };
    let entry = Arc::new(LedgerEntry { time, submissions });
    let (responder, done) = ProgressResponder::complete_only();
    let sent = core.raft.write(SharedLedgerEntry(entry.clone())).with_leader(leader).responder(responder).await;
    if let Err(error) = sent {
        tracing::error!(%error, "Raft has stopped");
        drop(answer.send(Err(return_submissions(entry, SubmissionFate::Unknown))));
        return None;
    }
    Some(PendingEntry { entry, done, answer })
}

impl PendingEntry {
    /// Waits until the entry is durable on a quorum and applied here.
    async fn await_applied(self) {
        let Self { entry, done, answer } = self;
        let proposed = match done.await {
            Ok(Ok(written)) => Ok(written.data.0),
            Ok(Err(ClientWriteError::ForwardToLeader(_))) => {
                Err(return_submissions(entry, SubmissionFate::NotAccepted))
            }
            Ok(Err(_)) | Err(_) => Err(return_submissions(entry, SubmissionFate::Unknown)),
        };
        drop(answer.send(proposed));
    }
}

fn return_submissions(entry: Arc<LedgerEntry>, fate: SubmissionFate) -> ReturnedSubmissions {
    let submissions = Arc::try_unwrap(entry).map_or_else(|entry| entry.submissions.clone(), |entry| entry.submissions);
    ReturnedSubmissions { submissions, fate }
}
