//! What came of a worker's events: plain counters for metrics, and how the sources stand that they come from.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use vocabulary::Micros;

use super::sources::Sources;

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
pub(crate) struct EventLog {
    /// Where the events come from, and how well that is heard.
    pub(crate) sources: Sources,
    pub(super) batches: AtomicU64,
    pub(super) events: AtomicU64,
    pub(super) gaps: AtomicU64,
    pub(super) replays: AtomicU64,
    pub(super) undecodable: AtomicU64,
    pub(super) unplaced: AtomicU64,
    pub(super) restarts: AtomicU64,
    pub(super) adopted: AtomicU64,
    pub(super) blocks: AtomicU64,
    pub(super) lag: AtomicU64,
}

impl EventLog {
    pub(crate) fn counts(&self) -> EventCounts {
        EventCounts {
            batches: self.batches.load(Relaxed),
            events: self.events.load(Relaxed),
            gaps: self.gaps.load(Relaxed),
            replays: self.replays.load(Relaxed),
            undecodable: self.undecodable.load(Relaxed),
            unplaced: self.unplaced.load(Relaxed),
            restarts: self.restarts.load(Relaxed),
            adopted: self.adopted.load(Relaxed),
            blocks: self.blocks.load(Relaxed),
            lag: Micros(self.lag.load(Relaxed)),
        }
    }

    pub(super) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }
}
