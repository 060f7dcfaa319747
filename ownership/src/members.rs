//! Who belongs to the cluster, and how that is changed. Node ids are handed out by the ledger and never come back.

mod change;
mod voters;

use std::collections::BTreeSet;

use consensus::SupportedLevels;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

pub(crate) use change::{CHANGE_TIMEOUT, best_successor, carry_out, enrol, list};
pub(crate) use voters::next_voters;

/// What a member does in the quorum.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum MemberRole {
    /// It decides: an entry is committed once most of them have it on disk.
    Voter,
    /// It only follows; every router that is no voter is one.
    Learner,
}

/// A node of the cluster, as the asked node knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClusterMember {
    /// Its id.
    pub node: NodeId,
    /// Where other nodes reach it; empty for a node that stands alone and listens to none.
    pub address: String,
    /// Voter or learner.
    pub voter: MemberRole,
    /// Whether it leads, as far as the asked node knows; without a quorum nobody does.
    pub is_leader: bool,
    /// What its binary can do; not known before the first contact.
    pub level: Option<SupportedLevels>,
    /// The last entry that it is known to have; only the leader knows it of others.
    pub matched: Option<u64>,
    /// Whether it answered the leader lately; only the leader knows it of others.
    pub answers: Option<bool>,
}

/// A change that an operator asks for.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MemberChange {
    /// Learners become voters, all in one step: one voter and two learners make a cluster of three.
    Promote(BTreeSet<NodeId>),
    /// Voters become learners, all in one step.
    Demote(BTreeSet<NodeId>),
    /// One voter becomes a learner and a learner takes its place, in one step: how a lost voter is replaced.
    Replace {
        /// The voter.
        old: NodeId,
        /// The learner.
        new: NodeId,
    },
    /// A node leaves for good. Its id never comes back.
    Remove(NodeId),
    /// Another voter leads.
    TransferLeader(NodeId),
    /// The cluster works at a higher feature level from now on; there is no way back.
    RaiseLevel(u32),
}

/// Why a change of the membership was refused or failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum MemberError {
    /// The voters would not make a sound quorum.
    #[error(
        "that would make {voters} voters, and a cluster has 1, 3 or 5: with an even number as many losses stop it as \
         with one voter less, and two voters stop when either is lost. Promote or demote as many nodes as needed in one \
         request, or replace a voter by a learner"
    )]
    VoterCount {
        /// How many there would be.
        voters: usize,
    },
    /// No such member.
    #[error("node {0} is not a member of this cluster; `member list` shows who is")]
    Unknown(NodeId),
    /// It is a voter already.
    #[error("node {0} is a voter already")]
    AlreadyVoter(NodeId),
    /// It is not a voter.
    #[error("node {0} is not a voter; only voters can be demoted, replaced or lead")]
    NotVoter(NodeId),
    /// It is still a voter.
    #[error(
        "node {0} is one of the voters that the quorum needs; demote it together with another one, or replace it by a learner"
    )]
    StillVoter(NodeId),
    /// Another change is on its way.
    #[error("another change of the membership is on its way; ask again when it is done")]
    InProgress,
    /// The node does not keep up.
    #[error("node {node} is {behind} entries behind; wait until it has caught up, then promote it")]
    Lagging {
        /// The learner.
        node: NodeId,
        /// How far.
        behind: u64,
    },
    /// The node does not answer.
    #[error(
        "node {0} does not answer the leader now; nothing was changed, see that it runs and can be reached, or remove it"
    )]
    Silent(NodeId),
    /// Too few of the voters that would be left answer.
    #[error(
        "of the {voters} voters that there would be only {answering} answer, and node {silent} does not: nothing could be \
         written or changed any more. Nothing was changed; bring it back, or replace it by a learner that answers first"
    )]
    NoMajority {
        /// How many voters there would be.
        voters: usize,
        /// How many of them answer now.
        answering: usize,
        /// One that does not.
        silent: NodeId,
    },
    /// The voter that was to lead first did not come to it.
    #[error(
        "the leader would vote no more, and node {heir} was asked to lead first and did not within {secs} s; nobody's vote \
         was changed. Let a voter that stays lead (`move-leader`), then ask again"
    )]
    NotTakenOver {
        /// Who was asked.
        heir: NodeId,
        /// How long it was waited for.
        secs: u64,
    },
    /// A member's binary is too old.
    #[error("node {node} can work at level {levels}, not at {level}; upgrade every member first")]
    Level {
        /// The member.
        node: NodeId,
        /// What was asked for.
        level: u32,
        /// What it can do.
        levels: SupportedLevels,
    },
    /// The ledger said no.
    #[error("the ledger refused: {0}")]
    Refused(String),
    /// Nobody leads.
    #[error("the cluster has no leader now; nothing was changed, ask again when most voters are back")]
    NoLeader,
    /// It was sent, and what became of it is not known.
    #[error("the outcome is unknown: {0}; look at `member list` before asking again")]
    Unknowable(String),
}
