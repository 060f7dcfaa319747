//! Event queue, ordered by time, then by insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use engine_model::runs::{RunRequestId, Seconds};

use crate::policies::StepRef;

/// A future event.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum WorldEvent {
    SessionStarts,
    Arrives(StepRef),
    /// Announced by an engine; void once the engine has announced another one.
    Engine {
        worker: usize,
        sequence: u64,
    },
    FetchArrived(RunRequestId),
    ShipmentArrived(RunRequestId),
    PollPolicy,
    PollReplication,
    /// A replicated prefix has arrived; the number identifies the transfer.
    ReplicationArrived(usize),
}

#[derive(Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<Reverse<(Seconds, u64, WorldEvent)>>,
    added: u64,
}

impl EventQueue {
    pub(super) fn add(&mut self, at: Seconds, event: WorldEvent) {
        self.added += 1;
        self.heap.push(Reverse((at, self.added, event)));
    }

    pub(super) fn next(&mut self) -> Option<(Seconds, WorldEvent)> {
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}
