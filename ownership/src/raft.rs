//! The types that Raft works with here.

use std::fmt;
use std::sync::Arc;

use ledger::{Entry, Outcome};
use serde::{Deserialize, Serialize};

/// One slot of the log. Shared, because Raft hands copies of it around.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Proposal(pub(crate) Arc<Entry>);

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} commands at {}", self.0.submissions.len(), self.0.time)
    }
}

/// One outcome for each submission of an entry.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Answers(pub(crate) Vec<Outcome>);

openraft::declare_raft_types!(
    /// Everything that Raft is generic over.
    pub(crate) Types:
        D = Proposal,
        R = Answers,
        NodeId = u64,
        Node = openraft::BasicNode,
);

pub(crate) type LogId = openraft::type_config::alias::LogIdOf<Types>;
pub(crate) type Vote = openraft::type_config::alias::VoteOf<Types>;
pub(crate) type Payload = openraft::type_config::alias::PayloadOf<Types>;
pub(crate) type LogEntry = openraft::type_config::alias::EntryOf<Types>;
pub(crate) type StoredMembership = openraft::type_config::alias::StoredMembershipOf<Types>;
pub(crate) type SnapshotMeta = openraft::type_config::alias::SnapshotMetaOf<Types>;
pub(crate) type Snapshot = openraft::type_config::alias::SnapshotOf<Types, std::fs::File>;
