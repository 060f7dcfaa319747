//! Letting nodes in while the level may rise: in one leadership a leader does one of both at a time, and neither overtakes
//! the other.
//!
//! Either begins with the members as they are, in an entry of their own. Once that is applied, so is everything that was on its
//! way in earlier turns and leaderships: the level is the one that a newcomer has to know, and the members are those that have
//! to know a new level. What follows is written in the same leadership or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::lock::{Mutex, MutexGuard};
use ledger::{Entry, Outcome};
use openraft::errors::{ChangeMembershipError, ClientWriteError, RaftError};
use openraft::impls::ProgressResponder;
use openraft::raft::ClientWriteResponse;
use openraft::storage::RaftStateMachine;
use openraft::{AsyncRuntime, BasicNode, ChangeMembers, Precondition, Raft};

use crate::levels::Levels;
use crate::types::{Leadership, LogId, Proposal, Types};

/// A leader's turn to let a node in or to raise the level: each decides on what the other changes.
#[derive(Debug, Default)]
pub struct Turn(Mutex<()>);

/// The turn, in one leadership, until it is dropped.
#[derive(Debug)]
pub struct InTurn<'a> {
    leadership: Leadership,
    _held: MutexGuard<'a, ()>,
}

/// A node that asks to be a member.
#[derive(Clone, Debug)]
pub struct Newcomer {
    /// Its id.
    pub id: u64,
    /// Where it listens.
    pub node: BasicNode,
    /// What its release can work at.
    pub levels: Levels,
}

/// Why something was not written, or may not have been.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotWritten {
    /// The newcomer's release cannot work at the cluster's level.
    #[error("the cluster works at level {0}")]
    Level(u32),
    /// This node does not lead, or no longer in that leadership.
    #[error("this node does not lead")]
    NotLeading,
    /// Another membership is on its way.
    #[error("another membership is on its way")]
    InProgress,
    /// It may be written yet.
    #[error("{0}")]
    Unknown(String),
}

impl<R: AsyncRuntime> From<RaftError<Types<R>, ClientWriteError<Types<R>>>> for NotWritten {
    fn from(error: RaftError<Types<R>, ClientWriteError<Types<R>>>) -> Self {
        match error {
            RaftError::APIError(ClientWriteError::ForwardToLeader(_) | ClientWriteError::PreconditionFailed(_)) => {
                Self::NotLeading
            }
            RaftError::APIError(ClientWriteError::ChangeMembershipError(ChangeMembershipError::InProgress(_))) => {
                Self::InProgress
            }
            error => Self::Unknown(error.to_string()),
        }
    }
}

impl Turn {
    /// The turn; none while somebody else has it.
    pub fn take(&self, leadership: Leadership) -> Option<InTurn<'_>> {
        self.0.try_lock().map(|held| InTurn { leadership, _held: held })
    }
}

impl InTurn<'_> {
    /// The leadership that it is in.
    pub fn leadership(&self) -> Leadership {
        self.leadership
    }

    /// Writes the members as they are; they are known once that is applied, and all that was on its way before it.
    pub async fn settle_members<R, M>(&self, raft: &Raft<Types<R>, M>) -> Result<BTreeSet<u64>, NotWritten>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<Types<R>>,
    {
        let written = self.add(raft, BTreeMap::new()).await?;
        let members = written.membership.ok_or_else(|| NotWritten::Unknown("no membership was written".into()))?;
        Ok(members.nodes().map(|(id, _)| *id).collect())
    }

    /// Adds a learner whose release can work at the cluster's level, which `level` looks up.
    pub async fn let_in<R, M>(
        &self,
        raft: &Raft<Types<R>, M>,
        newcomer: Newcomer,
        level: impl Fn() -> u32 + Send,
    ) -> Result<LogId, NotWritten>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<Types<R>>,
    {
        self.settle_members(raft).await?;
        let level = level();
        if !newcomer.levels.contains(level) {
            return Err(NotWritten::Level(level));
        }
        self.add(raft, BTreeMap::from([(newcomer.id, newcomer.node)])).await.map(|written| written.log_id)
    }

    /// Writes an entry, once: no later leader writes it again.
    pub async fn write<R, M>(&self, raft: &Raft<Types<R>, M>, entry: Entry) -> Result<Vec<Outcome>, NotWritten>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<Types<R>>,
    {
        let (responder, done) = ProgressResponder::complete_only();
        let write = raft.write(Proposal(Arc::new(entry))).with_leader(self.leadership).responder(responder);
        write.await.map_err(|error| NotWritten::Unknown(error.to_string()))?;
        match done.await {
            Ok(Ok(written)) => Ok(written.data.0),
            Ok(Err(error)) => Err(RaftError::APIError(error).into()),
            Err(_) => Err(NotWritten::Unknown("Raft has stopped".into())),
        }
    }

    async fn add<R, M>(
        &self,
        raft: &Raft<Types<R>, M>,
        nodes: BTreeMap<u64, BasicNode>,
    ) -> Result<ClientWriteResponse<Types<R>>, NotWritten>
    where
        R: AsyncRuntime,
        M: RaftStateMachine<Types<R>>,
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
    fn one_has_the_turn_at_a_time() {
        let (turn, leadership) = (Turn::default(), <LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(3, 1));
        let taken = turn.take(leadership);
        assert_eq!(taken.as_ref().map(InTurn::leadership), Some(leadership));
        assert!(turn.take(leadership).is_none());
        drop(taken);
        assert!(turn.take(leadership).is_some());
    }
}
