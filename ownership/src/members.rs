//! Cluster membership and its changes. The ledger assigns node ids, which are never reused.

mod change;
mod voters;

use std::collections::BTreeSet;

use consensus::SupportedLevels;
use ledger::Ledger;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

pub(crate) use change::{CHANGE_TIMEOUT, best_successor, carry_out, enrol, list};
pub(crate) use voters::next_voters;

/// Role of a member in the quorum.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum MemberRole {
    /// Votes: an entry is committed once a majority of voters has it on disk.
    Voter,
    /// Only replicates. Every router that is not a voter is a learner.
    Learner,
}

/// A node of the cluster, as the queried node knows it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ClusterMember {
    /// Id of the node.
    pub node: NodeId,
    /// Address at which other nodes reach it; empty for a standalone node that does not listen.
    pub address: String,
    /// Voter or learner.
    #[serde(rename = "voter")]
    pub role: MemberRole,
    /// Whether it leads, as far as the queried node knows. Without a quorum no node does.
    pub is_leader: bool,
    /// Feature levels that its release supports; unknown before the first contact.
    #[serde(rename = "level")]
    pub feature_levels: Option<SupportedLevels>,
    /// Last entry that it is known to have; only the leader knows this of others.
    #[serde(rename = "matched")]
    pub matched_index: Option<u64>,
    /// Whether it answered the leader recently; only the leader knows this of others.
    #[serde(rename = "answers")]
    pub reachable: Option<bool>,
}

/// Membership change that an operator requests.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MemberChange {
    /// Makes learners voters, in one step: one voter and two learners become a cluster of three.
    Promote(BTreeSet<NodeId>),
    /// Makes voters learners, in one step.
    Demote(BTreeSet<NodeId>),
    /// Replaces a voter by a learner, in one step. Used to replace a lost voter.
    Replace {
        /// Voter that becomes a learner.
        old: NodeId,
        /// Learner that becomes a voter.
        new: NodeId,
    },
    /// Removes a node for good. Its id is never reused.
    Remove(NodeId),
    /// Transfers the leadership to another voter.
    TransferLeader(NodeId),
    /// Raises the cluster's feature level. This cannot be undone.
    RaiseLevel(u32),
}

/// Why a membership change was refused or failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum MemberError {
    /// The number of voters would not make a sound quorum.
    #[error(
        "that would make {voters} voters, and a cluster has 1, 3 or 5: with an even number as many losses stop it as \
         with one voter less, and two voters stop when either is lost. Promote or demote as many nodes as needed in one \
         request, or replace a voter by a learner"
    )]
    VoterCount {
        /// Number of voters after the change.
        voters: usize,
    },
    /// There is no such member.
    #[error("node {0} is not a member of this cluster; `member list` shows who is")]
    Unknown(NodeId),
    /// The node is already a voter.
    #[error("node {0} is a voter already")]
    AlreadyVoter(NodeId),
    /// The node is not a voter.
    #[error("node {0} is not a voter; only voters can be demoted, replaced or lead")]
    NotVoter(NodeId),
    /// The node is still a voter.
    #[error(
        "node {0} is one of the voters that the quorum needs; demote it together with another one, or replace it by a learner"
    )]
    StillVoter(NodeId),
    /// Another membership change is in progress.
    #[error("another change of the membership is on its way; ask again when it is done")]
    InProgress,
    /// The node does not keep up.
    #[error("node {node} is {behind} entries behind; wait until it has caught up, then promote it")]
    Lagging {
        /// Learner that is behind.
        node: NodeId,
        /// Number of entries that it is behind.
        behind: u64,
    },
    /// The node does not answer.
    #[error(
        "node {0} does not answer the leader now; nothing was changed, see that it runs and can be reached, or remove it"
    )]
    #[serde(rename = "Silent")]
    Unreachable(NodeId),
    /// Too few of the remaining voters answer.
    #[error(
        "of the {voters} voters that there would be only {answering} answer, and node {silent} does not: nothing could be \
         written or changed any more. Nothing was changed; bring it back, or replace it by a learner that answers first"
    )]
    NoMajority {
        /// Number of voters after the change.
        voters: usize,
        /// Number of them that answer now.
        answering: usize,
        /// A voter that does not answer.
        silent: NodeId,
    },
    /// The voter that was to take over the leadership did not do so.
    #[error(
        "the change would take the vote from the leader, and node {heir} did not take over the leadership within {secs} s; nothing \
         was changed. Let a voter that stays lead (`ownerserve ctl member transfer-leader`), then ask again"
    )]
    #[serde(rename = "NotTakenOver")]
    LeadershipNotTransferred {
        /// Voter that was to take over.
        heir: NodeId,
        /// Seconds that were waited.
        secs: u64,
    },
    /// A member's release does not support the level.
    #[error("node {node} can work at level {levels}, not at {level}; upgrade every member first")]
    #[serde(rename = "Level")]
    FeatureLevel {
        /// Member.
        node: NodeId,
        /// Requested level.
        level: u32,
        /// Levels that its release supports.
        levels: SupportedLevels,
    },
    /// The ledger refused the command.
    #[error("the ledger refused: {0}")]
    Refused(String),
    /// There is no leader.
    #[error("the cluster has no leader now; nothing was changed, ask again when most voters are back")]
    NoLeader,
    /// The change was sent, and its outcome is unknown.
    #[error("the outcome is unknown: {0}; look at `member list` before asking again")]
    Unknowable(String),
}

/// Request of a node with an id to be added, or to update its address.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct EnrolRequest {
    pub(crate) node: NodeId,
    pub(crate) address: String,
    /// Feature levels that its release supports; the leader may not know them yet.
    pub(crate) levels: SupportedLevels,
}

/// Returns whether a node was removed, according to this ledger.
pub(crate) fn is_retired(ledger: &Ledger, node: NodeId) -> bool {
    ledger.node(node).is_some_and(|node| !node.is_member())
}
