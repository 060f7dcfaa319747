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

pub use changes::{Change, Compacted, Cursor, Ring};
pub use clock::LeaderClock;
pub use config::raft_config;
pub use feed::{Feed, Watch};
pub use freshness::{Consistency, Freshness, ReadIndexError, read_index};
pub use levels::{Levels, NotRaised, Release, Unreadable, check_gate, check_raise};
pub use machine::{Applied, Builder, Machine, Witness};
pub use office::{Office, Room, expiries, renewal, widening};
pub use shortage::{Waits, is_shortage};
pub use signs::Signs;
pub use snapshot::{Body, SnapshotStore};
pub use turn::{InTurn, Newcomer, NotWritten, Turn};
pub use types::{
    Answers, Leadership, LogEntry, LogId, Payload, Proposal, Snapshot, SnapshotMeta, StoredMembership, Types, Vote,
};
pub use unfinished::Unfinished;
pub use view::{Outdated, Publisher, Quorum, View};
