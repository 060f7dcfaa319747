//! What will happen, by time; of what happens at one time, first what was known first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use engine_model::runs::{Seconds, Ticket};

use crate::policies::StepRef;

/// Something that will happen.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Event {
    SessionStarts,
    Arrives(StepRef),
    /// An engine announced it; void once it has announced another.
    Engine {
        worker: usize,
        announced: u64,
    },
    Fetched(Ticket),
    Shipped(Ticket),
    PolicyClock,
    AheadClock,
    /// What was sent ahead, by its number.
    Brought(usize),
}

#[derive(Default)]
pub(super) struct Events {
    heap: BinaryHeap<Reverse<(Seconds, u64, Event)>>,
    added: u64,
}

impl Events {
    pub(super) fn add(&mut self, at: Seconds, event: Event) {
        self.added += 1;
        self.heap.push(Reverse((at, self.added, event)));
    }

    pub(super) fn next(&mut self) -> Option<(Seconds, Event)> {
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}
