//! Linearizable reads on this node: asks the leader for a read index and waits until it is applied.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use consensus::{Consistency, LedgerView};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::leader_call;
use crate::node_core::NodeCore;
use crate::peers::{Lane, PeerMethod};

/// Timeout of a linearizable read: longer than a fail-over, shorter than clients wait for an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(4);

/// Timeout of one attempt, including the quorum's confirmation.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a view could not be read with the requested consistency.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// There is no leader, or it cannot reach a quorum, so the latest state is unknown.
    #[error("no quorum answered in time; read with consistency=local to get the last known state")]
    NoQuorum,
}

/// Leader's answer to a request for a read index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ReadIndexReply {
    /// Everything acknowledged before the request is applied at this index.
    At(u64),
    /// The node does not lead, or no quorum confirms that it does.
    NotConfirmed,
}

/// Returns the read index that this node confirms as leader.
pub(crate) async fn local_read_index(core: &NodeCore) -> ReadIndexReply {
    match consensus::read_index(&core.raft).await {
        Ok(index) => ReadIndexReply::At(index),
        Err(error) => {
            tracing::debug!(%error, "a read index could not be given");
            ReadIndexReply::NotConfirmed
        }
    }
}

/// Returns a view with the requested consistency.
pub(crate) async fn fresh_view(core: &NodeCore, consistency: Consistency) -> Result<Arc<LedgerView>, ReadError> {
    core.freshness.ensure_fresh(consistency, catch_up(core)).await?;
    Ok(core.view())
}

/// Waits until this node has applied everything that was acknowledged before now.
async fn catch_up(core: &NodeCore) -> Result<(), ReadError> {
    let caught_up = timeout(READ_TIMEOUT, async {
        let index = leader_read_index(core).await;
        let applied = core.raft.wait(None).applied_index_at_least(Some(index), "a read").await;
        applied.map_err(|_| ReadError::NoQuorum)
    });
    caught_up.await.map_err(|_| ReadError::NoQuorum)?.map(drop)
}

/// Asks the leader, whichever node it is, until one answers.
async fn leader_read_index(core: &NodeCore) -> u64 {
    loop {
        let leader = core.known_leader();
        let answer = match leader {
            Some(leader) if leader == core.node() => local_read_index(core).await,
            Some(leader) => {
                let link = core.registry.link(leader, Lane::Call);
                let answer = link.call(PeerMethod::ReadIndex, Bytes::new(), ATTEMPT_TIMEOUT).await;
                let answer = answer.ok().and_then(|bytes| rmp_serde::from_slice(&bytes).ok());
                answer.unwrap_or(ReadIndexReply::NotConfirmed)
            }
            None => ReadIndexReply::NotConfirmed,
        };
        if let ReadIndexReply::At(index) = answer {
            return index;
        }
        leader_call::pause_until_leader_change(core).await;
    }
}
