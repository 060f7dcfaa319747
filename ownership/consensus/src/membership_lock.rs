//! Letting nodes in while the level may rise: in one leadership a leader does one of both at a time, and neither overtakes
//! the other.
//!
//! Either begins with the members as they are, in an entry of their own. Once that is applied, so is everything that was on its
//! way in earlier turns and leaderships: the level is the one that a newcomer has to know, and the members are those that have
//! to know a new level. What follows is written in the same leadership or not at all.

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
use crate::types::{Leadership, LogId, Proposal, TypeConfig};

/// A leader's turn to let a node in or to raise the level: each decides on what the other changes.
#[derive(Debug, Default)]
pub struct MembershipLock(Mutex<()>);

/// The turn, in one leadership, until it is dropped.
#[derive(Debug)]
pub struct MembershipGuard<'a> {
    leadership: Leadership,
    _lock: MutexGuard<'a, ()>,
}

/// A node that asks to be a member.
#[derive(Clone, Debug)]
pub struct JoiningNode {
    /// Its id.
    pub id: u64,
    /// Where it listens.
    pub node: BasicNode,
    /// What its release can work at.
    pub levels: SupportedLevels,
}

/// Why something was not written, or may not have been.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MembershipWriteError {
    /// The newcomer's release cannot work at the cluster's level.
    #[error("the cluster works at level {0}")]
    Level(u32),
    /// This node does not lead, or no longer in that leadership.
    #[error("this node does not lead")]
    NotLeader,
    /// Another membership is on its way.
    #[error("another membership is on its way")]
    InProgress,
    /// It may be written yet.
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
    /// The turn; none while somebody else has it.
    pub fn try_acquire(&self, leadership: Leadership) -> Option<MembershipGuard<'_>> {
        self.0.try_lock().map(|held| MembershipGuard { leadership, _lock: held })
    }
}

impl MembershipGuard<'_> {
    /// The leadership that it is in.
    pub fn leadership(&self) -> Leadership {
        self.leadership
    }

    /// Writes the members as they are; they are known once that is applied, and all that was on its way before it.
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

    /// Adds a learner whose release can work at the cluster's level, which `level` looks up.
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

    /// Writes an entry, once: no later leader writes it again.
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
        let write = raft.write(Proposal(Arc::new(entry))).with_leader(self.leadership).responder(responder);
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
