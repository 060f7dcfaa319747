//! The types that Raft works with here.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use ledger::{Entry, Outcome};
use openraft::impls::{BoxedErrorSource, InlineBatch, ProgressResponder, leader_id_adv};
use openraft::vote::RaftLeaderId;
use openraft::{AsyncRuntime, BasicNode, EntryPayload, OptionalSend, RaftTypeConfig};
use serde::{Deserialize, Serialize};

/// One slot of the log. Shared, because Raft hands copies of it around.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("{} commands at {}", _0.submissions.len(), _0.time)]
#[serde(transparent)]
pub struct Proposal(pub Arc<Entry>);

/// One outcome for each submission of an entry.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Answers(pub Vec<Outcome>);

/// Everything that Raft is generic over, on the runtime `R`.
pub struct Types<R>(PhantomData<fn() -> R>);

type LeaderId = leader_id_adv::LeaderId<u64, u64>;

/// A term of office, and whose it is.
pub type Leadership = <LeaderId as RaftLeaderId>::Committed;
/// A place in the log.
pub type LogId = openraft::LogId<Leadership>;
/// A term, and whom it was given to.
pub type Vote = openraft::impls::Vote<LeaderId>;
/// What one slot of the log says.
pub type Payload = EntryPayload<Proposal, u64, BasicNode>;
/// One slot of the log.
pub type LogEntry = openraft::Entry<Leadership, Payload>;
/// Who the members are, and since which entry.
pub type StoredMembership = openraft::StoredMembership<Leadership, u64, BasicNode>;
/// How far a snapshot goes.
pub type SnapshotMeta = openraft::storage::SnapshotMeta<Leadership, u64, BasicNode>;
/// A snapshot, and where its bytes are.
pub type Snapshot<H> = openraft::storage::Snapshot<Leadership, u64, BasicNode, H>;

impl<R: AsyncRuntime> RaftTypeConfig for Types<R> {
    type D = Proposal;
    type R = Answers;
    type NodeId = u64;
    type Node = BasicNode;
    type Term = u64;
    type LeaderId = LeaderId;
    type Vote = Vote;
    type Payload = Payload;
    type Entry = LogEntry;
    type AsyncRuntime = R;
    type Responder<T>
        = ProgressResponder<Self, T>
    where
        T: OptionalSend + 'static;
    type Batch<T>
        = InlineBatch<T>
    where
        T: OptionalSend + 'static;
    type ErrorSource = BoxedErrorSource;
}

// By hand, because a derive would ask the same of the runtime.
impl<R> fmt::Debug for Types<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Types")
    }
}

impl<R> Clone for Types<R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<R> Copy for Types<R> {}

impl<R> Default for Types<R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<R> PartialEq for Types<R> {
    fn eq(&self, _other: &Self) -> bool {
        true
    }
}

impl<R> Eq for Types<R> {}

impl<R> PartialOrd for Types<R> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<R> Ord for Types<R> {
    fn cmp(&self, _other: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}
