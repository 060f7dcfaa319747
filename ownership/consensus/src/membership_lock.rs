//! Serializes joins and level raises: a leader performs one at a time, and neither overtakes the other.
//!
//! Both first write the current membership as an entry. Once that entry is applied, all writes of earlier lock holders
//! and leaderships are applied, too: the level is the one that a joining node must support, and the members are those
//! that must support a new level. The following write happens in the same leadership or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::lock::{Mutex, MutexGuard};
use ledger::{LedgerEntry, Outcome};
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResponse;
use openraft::storage::RaftStateMachine;
use openraft::{AsyncRuntime, BasicNode, ChangeMembers, Precondition, Raft};

use crate::levels::SupportedLevels;
use crate::types::{LogId, RaftTermLeader, SharedLedgerEntry, TypeConfig};

/// Lock that a leader holds while it adds a node or raises the level, because each decides on what the other changes.
#[derive(Debug, Default)]
pub struct MembershipLock(Mutex<()>);

/// Guard of the lock in one leadership; dropping it releases the lock.
#[derive(Debug)]
pub struct MembershipGuard<'a> {
    leadership: RaftTermLeader,
    _lock: MutexGuard<'a, ()>,
}

/// Node that asks to become a member.
#[derive(Clone, Debug)]
pub struct JoiningNode {
    /// Id of the node.
    pub id: u64,
    /// Address on which it listens.
    pub node: BasicNode,
    /// Feature levels that its release supports.
    pub levels: SupportedLevels,
}

/// Why a write failed, or may have failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipWriteError {
    /// The joining node's release does not support the cluster's level.
    #[error("the cluster works at level {0}")]
    Level(u32),
    /// This node does not lead, or no longer in that leadership.
    #[error("this node does not lead")]
    NotLeader,
    /// Another membership change is in progress.
    #[error("another membership is on its way")]
    InProgress,
    /// The outcome is unknown: the entry may still be written.
    #[error("{0}")]
    Unknown(String),
}

impl<R: AsyncRuntime> From<RaftError<TypeConfig<R>, ClientWriteError<TypeConfig<R>>>> for MembershipWriteError {
    fn from(error: RaftError<TypeConfig<R>, ClientWriteError<TypeConfig<R>>>) -> Self {
        match error {
            RaftError::APIError(ClientWriteError::ForwardToLeader(_) | ClientWriteError::PreconditionFailed(_)) => {
                Self::NotLeader
            }
            RaftError::APIError(ClientWriteError::ChangeMembershipError(ChangeMembershipError::InProgress(_))) => {
                Self::InProgress
            }
            error => Self::Unknown(error.to_string()),
        }
    }
}

impl MembershipLock {
    /// Acquires the lock; `None` while another operation holds it.
    pub fn try_acquire(&self, leadership: RaftTermLeader) -> Option<MembershipGuard<'_>> {
        self.0.try_lock().map(|held| MembershipGuard { leadership, _lock: held })
    }
}

impl MembershipGuard<'_> {
    /// Returns the leadership in which the lock was acquired.
    pub fn leadership(&self) -> RaftTermLeader {
        self.leadership
    }

    /// Writes the current membership again. Once that is applied, so is everything that was in progress before it.
    pub async fn rewrite_members<R, M>(
        &self,
        raft: &Raft<TypeConfig<R>, M>,
    ) -> Result<BTreeSet<u64>, MembershipWriteError>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<TypeConfig<R>>,
    {
        let written = self.add(raft, BTreeMap::new()).await?;
        let members =
            written.membership.ok_or_else(|| MembershipWriteError::Unknown("no membership was written".into()))?;
        Ok(members.nodes().map(|(id, _)| *id).collect())
    }

    /// Adds a learner whose release supports the cluster's level, which `level` looks up.
    pub async fn add_learner<R, M>(
        &self,
        raft: &Raft<TypeConfig<R>, M>,
        newcomer: JoiningNode,
        level: impl Fn() -> u32 + Send,
    ) -> Result<LogId, MembershipWriteError>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<TypeConfig<R>>,
    {
        self.rewrite_members(raft).await?;
        let level = level();
        if !newcomer.levels.contains(level) {
            return Err(MembershipWriteError::Level(level));
        }
        self.add(raft, BTreeMap::from([(newcomer.id, newcomer.node)])).await.map(|written| written.log_id)
    }

    /// Writes an entry at most once: no later leader writes it again.
    pub async fn write<R, M>(
        &self,
        raft: &Raft<TypeConfig<R>, M>,
        entry: LedgerEntry,
    ) -> Result<Vec<Outcome>, MembershipWriteError>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<TypeConfig<R>>,
    {
        let (responder, done) = ProgressResponder::complete_only();
        let write = raft.write(SharedLedgerEntry(Arc::new(entry))).with_leader(self.leadership).responder(responder);
        write.await.map_err(|error| MembershipWriteError::Unknown(error.to_string()))?;
        match done.await {
            Ok(Ok(written)) => Ok(written.data.0),
            Ok(Err(error)) => Err(RaftError::APIError(error).into()),
            Err(_) => Err(MembershipWriteError::Unknown("Raft has stopped".into())),
        }
    }

    async fn add<R, M>(
        &self,
        raft: &Raft<TypeConfig<R>, M>,
        nodes: BTreeMap<u64, BasicNode>,
    ) -> Result<ClientWriteResponse<TypeConfig<R>>, MembershipWriteError>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<TypeConfig<R>>,
    {
        let here = Precondition::CommittedLeaderId { committed_leader_id: self.leadership };
        Ok(raft.change_membership_if(ChangeMembers::AddNodes(nodes), true, [here]).await?)
    }
}

#[cfg(test)]
mod tests {
    use openraft::impls::leader_id_adv::LeaderId;
    use openraft::vote::RaftLeaderIdExt;

    use super::*;

    #[test]
    fn the_membership_lock_has_a_single_holder() {
        let (turn, leadership) =
            (MembershipLock::default(), <LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(3, 1));
        let taken = turn.try_acquire(leadership);
        assert_eq!(taken.as_ref().map(MembershipGuard::leadership), Some(leadership));
        assert!(turn.try_acquire(leadership).is_none());
        drop(taken);
        assert!(turn.try_acquire(leadership).is_some());
    }
}
