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
mod levels;
mod machine;
mod office;
mod shortage;
mod signs;
mod snapshot;
mod turn;
mod types;
mod unfinished;
mod view;

pub use changes::{ChangeCursor, ChangeEvent, ChangeRing, CompactedRevision};
pub use clock::LeaderClock;
pub use config::raft_config;
pub use feed::{ChangeFeed, ChangeStream};
pub use freshness::{Consistency, FreshnessClock, ReadIndexError, read_index};
pub use levels::{MemberRelease, RaiseLevelError, SupportedLevels, UnsupportedLevel, check_command_level, check_raise};
pub use machine::{AppliedEntry, ApplyObserver, SnapshotBuilder, StateMachine};
pub use office::{DesiredLimits, LeaderTerm, expiries, limit_widening, renewal};
pub use shortage::{Waits, is_shortage};
pub use signs::WorkerLiveness;
pub use snapshot::{SnapshotContents, SnapshotStore};
pub use turn::{JoiningNode, MembershipGuard, MembershipLock, MembershipWriteError};
pub use types::{
    EntryOutcomes, Leadership, LogEntry, LogId, Payload, Proposal, Snapshot, SnapshotMeta, StoredMembership,
    TypeConfig, Vote,
};
pub use unfinished::PendingVoterChange;
pub use view::{LedgerView, QuorumStatus, ReplacedViews, ViewPublisher};
