//! The leader's desk: what its own writer and the other nodes hand in becomes entries of the log, in this order.

use std::sync::Arc;

use consensus::Proposal;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use ledger::{Entry, Outcome, Submission};
use openraft::errors::ClientWriteError;
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResult;
use tokio::sync::{mpsc, oneshot};

use crate::core::Core;
use crate::raft::Types;

/// Entries on their way through the log at once.
const IN_FLIGHT: usize = 256;

/// Submissions that are to become one entry.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) answer: oneshot::Sender<Proposed>,
}

/// One outcome for each submission, or the submissions back.
pub(crate) type Proposed = Result<Vec<Outcome>, Returned>;

/// What did not become an entry for sure. Handed in again, it is executed once.
#[derive(Debug)]
pub(crate) struct Returned {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) fate: Fate,
}

/// What is known of submissions that were not answered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// They entered no log.
    NotTaken,
    /// They may be executed yet.
    Unknown,
}

/// Runs until nobody can hand in anything any more.
pub(crate) async fn run(core: Arc<Core>, queue: &mut mpsc::Receiver<Asked>) {
    let mut in_flight = FuturesUnordered::new();
    loop {
        tokio::select! {
            asked = queue.recv(), if in_flight.len() < IN_FLIGHT => {
                let Some(asked) = asked else { return };
                if let Some(written) = propose(&core, asked).await {
                    in_flight.push(written.answered());
                }
            }
            Some(()) = in_flight.next() => {}
        }
    }
}

/// An entry that Raft has.
struct Written {
    entry: Arc<Entry>,
    done: oneshot::Receiver<ClientWriteResult<Types>>,
    answer: oneshot::Sender<Proposed>,
}

/// Hands an entry to Raft. It enters Raft's own queue here, so entries keep their order.
async fn propose(core: &Core, Asked { submissions, answer }: Asked) -> Option<Written> {
    let Some((time, leader)) = core.entry_time() else {
        // Whoever asked may have gone.
        drop(answer.send(Err(Returned { submissions, fate: Fate::NotTaken })));
        return None;
    };
    let entry = Arc::new(Entry { time, submissions });
    let (responder, done) = ProgressResponder::complete_only();
    let sent = core.raft.write(Proposal(entry.clone())).with_leader(leader).responder(responder).await;
    if let Err(error) = sent {
        tracing::error!(%error, "Raft has stopped");
        drop(answer.send(Err(returned(entry, Fate::Unknown))));
        return None;
    }
    Some(Written { entry, done, answer })
}

impl Written {
    /// Waits until the entry is durable on a quorum and applied here.
    async fn answered(self) {
        let Self { entry, done, answer } = self;
        let proposed = match done.await {
            Ok(Ok(written)) => Ok(written.data.0),
            Ok(Err(ClientWriteError::ForwardToLeader(_))) => Err(returned(entry, Fate::NotTaken)),
            Ok(Err(_)) | Err(_) => Err(returned(entry, Fate::Unknown)),
        };
        drop(answer.send(proposed));
    }
}

fn returned(entry: Arc<Entry>, fate: Fate) -> Returned {
    let submissions = Arc::try_unwrap(entry).map_or_else(|entry| entry.submissions.clone(), |entry| entry.submissions);
    Returned { submissions, fate }
}
