//! What came of a worker's events: plain counters for metrics, and how the sources stand that they come from.

use parking_lot::Mutex;
use vocabulary::Micros;

use super::sources::WorkerEventSources;

/// What came of a worker's events so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EventCounts {
    /// Messages applied.
    pub batches: u64,
    /// Events in them.
    pub events: u64,
    /// Gaps in the sequence, each followed by a replay.
    pub gaps: u64,
    /// Replays asked for, those at the start included.
    pub replays: u64,
    /// Messages that could not be read.
    pub undecodable: u64,
    /// Blocks that came without a known parent, and removals of unknown blocks.
    pub unplaced: u64,
    /// Other processes met.
    pub restarts: u64,
    /// Imprints taken over from other routers.
    pub adopted: u64,
    /// Engine blocks whose place is known now.
    pub blocks: u64,
    /// From the engine's clock at the last message to ours.
    pub lag: Micros,
}

#[derive(Default)]
pub(crate) struct WorkerEventStatus {
    /// Where the events come from, and how well that is heard.
    pub(crate) sources: WorkerEventSources,
    pub(super) counts: Mutex<EventCounts>,
}

impl WorkerEventStatus {
    pub(crate) fn counts(&self) -> EventCounts {
        *self.counts.lock()
    }
}
