//! Types and configuration of Raft (openraft), shared by servers and the simulation.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use ledger::{LedgerEntry, Outcome};
use openraft::impls::{BoxedErrorSource, InlineBatch, ProgressResponder, leader_id_adv};
use openraft::vote::RaftLeaderId;
use openraft::{AsyncRuntime, BasicNode, Config, EntryPayload, OptionalSend, RaftTypeConfig, SnapshotPolicy};
use serde::{Deserialize, Serialize};

/// Contents of one log entry. Shared, because Raft clones it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, derive_more::Display)]
#[display("{} commands at {}", _0.submissions.len(), _0.time)]
#[serde(transparent)]
pub struct SharedLedgerEntry(pub Arc<LedgerEntry>);

/// Outcomes of an entry, one per submission.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EntryOutcomes(pub Vec<Outcome>);

/// Type parameters of Raft on the runtime `R`.
#[derive_where(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct TypeConfig<R>(PhantomData<fn() -> R>);

type LeaderId = leader_id_adv::LeaderId<u64, u64>;

/// A Raft term and its leader.
pub type RaftTermLeader = <LeaderId as RaftLeaderId>::Committed;
/// Position in the log.
pub type LogId = openraft::LogId<RaftTermLeader>;
/// A Raft term and the node that got the vote.
pub type Vote = openraft::impls::Vote<LeaderId>;
/// Payload of one log entry.
pub type Payload = EntryPayload<SharedLedgerEntry, u64, BasicNode>;
/// One entry of the log.
pub type LogEntry = openraft::Entry<RaftTermLeader, Payload>;
/// Membership and the log position that set it.
pub type StoredMembership = openraft::StoredMembership<RaftTermLeader, u64, BasicNode>;
/// Log position and membership of a snapshot.
pub type SnapshotMeta = openraft::storage::SnapshotMeta<RaftTermLeader, u64, BasicNode>;
/// A snapshot and a handle to its bytes.
pub type Snapshot<H> = openraft::storage::Snapshot<RaftTermLeader, u64, BasicNode, H>;

impl<R: AsyncRuntime> RaftTypeConfig for TypeConfig<R> {
    type D = SharedLedgerEntry;
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

/// Returns Raft's configuration with these timers: heartbeat interval, and minimum and maximum election timeout.
pub fn raft_config(heartbeat: Duration, (election_min, election_max): (Duration, Duration)) -> Config {
    let millis = |time: Duration| time.as_millis() as u64;
    Config {
        cluster_name: "ownerserve".into(),
        heartbeat_interval: millis(heartbeat),
        election_timeout_min: millis(election_min),
        election_timeout_max: millis(election_max),
        snapshot_policy: SnapshotPolicy::Never,
        max_in_snapshot_log_to_keep: 1_000,
        // Bounds what is sent at once to a follower that comes back; an entry can have up to a megabyte.
        max_payload_entries: 64,
        install_snapshot_timeout: 60_000,
        enable_pre_vote: Some(true),
        // A restarted leader may have lost entries that it had sent; it must not write other entries in the same term.
        enable_leader_restore: Some(false),
        backoff: "50ms ...1s".into(),
        ..Config::default()
    }
}
