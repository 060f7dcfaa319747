//! The types that Raft works with here.

use std::marker::PhantomData;
use std::sync::Arc;

use derive_where::derive_where;
use ledger::{LedgerEntry, Outcome};
use openraft::impls::{BoxedErrorSource, InlineBatch, ProgressResponder, leader_id_adv};
use openraft::vote::RaftLeaderId;
use openraft::{AsyncRuntime, BasicNode, EntryPayload, OptionalSend, RaftTypeConfig};
use serde::{Deserialize, Serialize};

/// One slot of the log. Shared, because Raft hands copies of it around.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("{} commands at {}", _0.submissions.len(), _0.time)]
#[serde(transparent)]
pub struct Proposal(pub Arc<LedgerEntry>);

/// One outcome for each submission of an entry.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EntryOutcomes(pub Vec<Outcome>);

/// Everything that Raft is generic over, on the runtime `R`.
#[derive_where(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeConfig<R>(PhantomData<fn() -> R>);

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

impl<R: AsyncRuntime> RaftTypeConfig for TypeConfig<R> {
    type D = Proposal;
    type R = EntryOutcomes;
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
