//! What of the quorum is neither disk nor socket: the types that Raft works with, the state machine that it drives, the
//! leader's clock and what a leader does by itself, the view that readers see and how fresh it is, and the changes that
//! watchers are told.
//!
//! Generic over the runtime, so that servers and the deterministic simulation run the same code. Nothing here opens a
//! file, a socket or a thread, or reads a clock that it was not given.

mod changes;
mod clock;
mod config;
mod feed;
mod freshness;
mod leader_term;
mod levels;
mod membership_lock;
mod pending_voter_change;
mod shortage;
mod snapshot;
mod state_machine;
mod types;
mod view;
mod worker_liveness;

pub use changes::{ChangeCursor, ChangeEvent, ChangeRing, CompactedRevision};
pub use clock::LeaderClock;
pub use config::raft_config;
pub use feed::{ChangeFeed, ChangeStream};
pub use freshness::{Consistency, FreshnessClock, ReadIndexError, read_index};
pub use leader_term::{DesiredLimits, LeaderTerm, expiries, limit_widening, renewal};
pub use levels::{MemberRelease, RaiseLevelError, SupportedLevels, UnsupportedLevel, check_command_level, check_raise};
pub use membership_lock::{JoiningNode, MembershipGuard, MembershipLock, MembershipWriteError};
pub use pending_voter_change::PendingVoterChange;
pub use shortage::{Waits, is_shortage};
pub use snapshot::{SnapshotContents, SnapshotStore};
pub use state_machine::{AppliedEntry, ApplyObserver, SnapshotBuilder, StateMachine};
pub use types::{
    EntryOutcomes, Leadership, LogEntry, LogId, Payload, Proposal, Snapshot, SnapshotMeta, StoredMembership,
    TypeConfig, Vote,
};
pub use view::{LedgerView, QuorumStatus, ReplacedViews, ViewPublisher};
pub use worker_liveness::WorkerLiveness;
