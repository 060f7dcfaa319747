//! How fresh a read has to be, and how that is made sure.
//!
//! A fresh read asks the leader how far one must have applied, after a quorum has confirmed that it still leads. A
//! leader's lease is never trusted: it does not survive a restart.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use consensus::View;
use openraft::raft::ReadPolicy;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, timeout_at};

use crate::core::Core;
use crate::peers::{Lane, Method};

/// How long a fresh read may take.
const READ_WITHIN: Duration = Duration::from_secs(5);

/// How long one attempt may take, the quorum's word included.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// The wait before the same leader is asked again.
const PAUSE: Duration = Duration::from_millis(50);

/// How fresh a view must be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Consistency {
    /// As this node last applied it. Never waits.
    Local,
    /// Holds everything that was acknowledged this long ago, wherever.
    Bounded(Duration),
    /// Holds everything that was acknowledged, wherever, before the read began.
    Linearizable,
}

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

/// Since when the view is known to hold everything that was acknowledged before.
#[derive(Debug, Default)]
pub(crate) struct Freshness(Mutex<Option<Instant>>);

impl Freshness {
    /// How old the view may be at most; none before it was ever confirmed.
    pub(crate) fn age(&self) -> Option<Duration> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).map(|at| at.elapsed())
    }

    fn confirmed(&self, at: Instant) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *known = (*known).max(Some(at));
    }
}

/// The index that this node as leader vouches for.
pub(crate) async fn index_here(core: &Core) -> ReadIndex {
    match core.raft.get_read_log_id(ReadPolicy::ReadIndex).await {
        Ok((read, _)) => ReadIndex::At(read.index()),
        Err(error) => {
            tracing::debug!(%error, "a read index could not be given");
            ReadIndex::NotConfirmed
        }
    }
}

/// A view as fresh as asked.
pub(crate) async fn view(core: &Core, consistency: Consistency) -> Result<Arc<View>, ReadError> {
    let is_fresh = match consistency {
        Consistency::Local => true,
        Consistency::Bounded(bound) => core.freshness.age().is_some_and(|age| age <= bound),
        Consistency::Linearizable => false,
    };
    if !is_fresh {
        confirm(core).await?;
    }
    Ok(core.view())
}

/// Waits until this node has applied everything that was acknowledged before now.
pub(crate) async fn confirm(core: &Core) -> Result<(), ReadError> {
    let began = Instant::now();
    let confirmed = timeout_at(began + READ_WITHIN, async {
        let index = index(core).await;
        let applied = core.raft.wait(None).applied_index_at_least(Some(index), "a read").await;
        applied.map_err(|_| ReadError::NoQuorum)
    });
    confirmed.await.map_err(|_| ReadError::NoQuorum)??;
    core.freshness.confirmed(began);
    Ok(())
}

/// Asks the leader, wherever it is, until one answers.
async fn index(core: &Core) -> u64 {
    loop {
        let leader = core.known_leader();
        let answer = match leader {
            Some(leader) if leader == core.node() => index_here(core).await,
            Some(leader) => {
                let link = core.registry.link(leader, Lane::Call);
                let answer = link.call(Method::ReadIndex, Bytes::new(), ASK_WITHIN).await;
                let answer = answer.ok().and_then(|bytes| rmp_serde::from_slice(&bytes).ok());
                answer.unwrap_or(ReadIndex::NotConfirmed)
            }
            None => ReadIndex::NotConfirmed,
        };
        if let ReadIndex::At(index) = answer {
            return index;
        }
        let mut leaders = core.leader.subscribe();
        // A change of the leader ends the pause early.
        drop(tokio::time::timeout(PAUSE, leaders.changed()).await);
    }
}
