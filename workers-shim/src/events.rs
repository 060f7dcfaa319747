//! KV events of engines. One follower per worker finds the worker's event streams, subscribes, requests replays of
//! missed events, and keeps the residency index up to date.

mod discovery;
mod follower;
mod replay;
mod shared_index;
mod snapshots;
mod sources;

use parking_lot::Mutex;
use vocabulary::Micros;

use self::sources::WorkerEventSources;

pub use discovery::EventSource;
pub(crate) use discovery::host_of;
pub use follower::SourceRulesResolver;
pub(crate) use follower::{FollowerEnvironment, follow};
pub use shared_index::{ChainBasis, ServedPrompts, SharedIndex};
pub(crate) use snapshots::SnapshotExporters;
pub use snapshots::{EncodedSnapshot, SnapshotProvider, SnapshotRequest};
pub use sources::{EventSourceCount, InexactReason};

/// Counters of a worker's events.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventCounts {
    /// Messages applied.
    pub batches: u64,
    /// Events in them.
    pub events: u64,
    /// Gaps in the sequence, each followed by a replay.
    pub gaps: u64,
    /// Requested replays, including those at the start.
    pub replays: u64,
    /// Messages that could not be decoded.
    pub undecodable: u64,
    /// Stored blocks whose parent is unknown, and removals of unknown blocks.
    pub unknown_blocks: u64,
    /// Detected restarts of the engine process.
    pub engine_restarts: u64,
    /// Snapshots adopted from other routers.
    pub peer_snapshots: u64,
    /// Engine blocks in the index now.
    pub blocks: u64,
    /// Delay between the engine's timestamp in the last message and its receipt.
    pub lag: Micros,
}

#[derive(Default)]
pub(crate) struct WorkerEventStatus {
    /// The state of the event sources.
    pub(crate) sources: WorkerEventSources,
    counts: Mutex<EventCounts>,
}

impl WorkerEventStatus {
    pub(crate) fn counts(&self) -> EventCounts {
        *self.counts.lock()
    }
}
