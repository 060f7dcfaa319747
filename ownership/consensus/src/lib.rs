//! The parts of consensus that need neither disk nor network: Raft types, the replicated state machine, the leader's
//! clock and periodic tasks, the read view and its freshness, and the change feed for watchers.
//!
//! Generic over the async runtime, so that servers and the deterministic simulation run the same code. Nothing here
//! opens a file, a socket or a thread, or reads a clock that it was not given.

mod change_feed;
mod change_ring;
mod freshness;
mod leader_clock;
mod leader_term;
mod levels;
mod membership_lock;
mod pending_voter_change;
mod shortage;
mod state_machine;
mod types;
mod view;
mod worker_liveness;

pub use change_feed::{ChangeFeed, ChangeStream};
pub use change_ring::{ChangeCursor, ChangeEvent, ChangeRing, CompactedRevision};
pub use freshness::{Consistency, FreshnessClock, ReadIndexError, read_index};
pub use leader_clock::LeaderClock;
pub use leader_term::{LeaderTermClock, RequestedLedgerLimits, expiries, limit_widening, renewal};
pub use levels::{
    MemberLevelSupport, RaiseLevelError, SupportedLevels, UnsupportedLevel, check_command_level, check_raise,
};
pub use membership_lock::{JoiningNode, MembershipGuard, MembershipLock, MembershipWriteError};
pub use pending_voter_change::StalledChangeDetector;
pub use shortage::{RetryBackoff, is_shortage};
pub use state_machine::{AppliedEntry, ApplyObserver, SnapshotBuilder, SnapshotContents, SnapshotStore, StateMachine};
pub use types::{
    EntryOutcomes, LogEntry, LogId, Payload, RaftTermLeader, SharedLedgerEntry, Snapshot, SnapshotMeta,
    StoredMembership, TypeConfig, Vote, raft_config,
};
pub use view::{LedgerView, QuorumStatus, ReplacedViews, ViewPublisher};
pub use worker_liveness::WorkerLiveness;
