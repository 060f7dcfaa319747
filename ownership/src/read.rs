//! Fresh reads on this node: the leader is asked, wherever it is, how far one must have applied.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use consensus::{Consistency, LedgerView};
use serde::{Deserialize, Serialize};
use tokio::time::timeout;

use crate::leader_call;
use crate::node_core::NodeCore;
use crate::peers::{Lane, PeerMethod};

/// How long a fresh read may take: over a fail-over, and shorter than who asks waits for an answer.
const READ_TIMEOUT: Duration = Duration::from_secs(4);

/// How long one attempt may take, the quorum's word included.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a view could not be read as fresh as asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// Nobody leads, or the leader cannot reach a quorum, so that nobody can tell what is new.
    #[error("no quorum answered in time; read with consistency=local to get the last known state")]
    NoQuorum,
}

/// What a leader answers to who wants to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum ReadIndex {
    /// Everything acknowledged before the question is applied at this index.
    At(u64),
    /// It does not lead, or no quorum confirms that it does.
    NotConfirmed,
}

/// The index that this node as leader vouches for.
pub(crate) async fn local_read_index(core: &NodeCore) -> ReadIndex {
    match consensus::read_index(&core.raft).await {
        Ok(index) => ReadIndex::At(index),
        Err(error) => {
            tracing::debug!(%error, "a read index could not be given");
            ReadIndex::NotConfirmed
        }
    }
}

/// A view as fresh as asked.
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

/// Asks the leader, wherever it is, until one answers.
async fn leader_read_index(core: &NodeCore) -> u64 {
    loop {
        let leader = core.known_leader();
        let answer = match leader {
            Some(leader) if leader == core.node() => local_read_index(core).await,
            Some(leader) => {
                let link = core.registry.link(leader, Lane::Call);
                let answer = link.call(PeerMethod::ReadIndex, Bytes::new(), ATTEMPT_TIMEOUT).await;
                let answer = answer.ok().and_then(|bytes| rmp_serde::from_slice(&bytes).ok());
                answer.unwrap_or(ReadIndex::NotConfirmed)
            }
            None => ReadIndex::NotConfirmed,
        };
        if let ReadIndex::At(index) = answer {
            return index;
        }
        leader_call::pause_until_leader_change(core).await;
    }
}
