//! Counters of a worker's events, for metrics, and the state of its event sources.

use parking_lot::Mutex;
use vocabulary::Micros;

use super::sources::WorkerEventSources;

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
    pub(super) counts: Mutex<EventCounts>,
}

impl WorkerEventStatus {
    pub(crate) fn counts(&self) -> EventCounts {
        *self.counts.lock()
    }
}
