//! From a source's events to the shared index, with the index touched only in bounded portions.
//!
//! [`Feed::take`] does the hashing and needs no index; [`Feed::settle`] is what runs under the index's write lock.

use std::collections::VecDeque;

use vocabulary::{DpRank, Incarnation, Knowledge, WorkerId};

use crate::closure::Shape;
use crate::event::Event;
use crate::imprint::{Imprint, ImprintHead, ImprintWriter};
use crate::index::{Change, Index, Slot, TooManySources};
use crate::source::{Source, SourceCounts, SourceRules};

/// Whether everything has reached the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Settled {
    /// It has.
    Done,
    /// Call again.
    More,
}

/// Events whose names are looked for at once: most have one block or a few.
const LOOK: usize = 32;

type Gone = Box<dyn Iterator<Item = Change> + Send + Sync>;

/// A step that waits to be applied, in order.
enum Step {
    /// And how many of them are applied already.
    Changes(Vec<Change>, usize),
    /// All blocks at once are gone: a new place is taken, the old one swept later.
    Anew(Gone),
    Leave(Gone),
    Know(Knowledge),
    Shape(Shape),
}

/// One rank of one worker: its source and its place in the index.
pub struct Feed {
    worker: WorkerId,
    rank: DpRank,
    source: Source,
    slot: Option<Slot>,
    knowledge: Knowledge,
    /// What the index is, or will be, told.
    shape: Shape,
    /// Of the event that is being taken.
    changes: Vec<Change>,
    steps: VecDeque<Step>,
    sweeps: VecDeque<(Slot, Gone)>,
}

impl Feed {
    /// A feed that has no place in the index before its first `settle`.
    pub fn new(worker: WorkerId, rank: DpRank, rules: SourceRules) -> Self {
        let mut feed = Self {
            worker,
            rank,
            source: Source::new(rules),
            slot: None,
            knowledge: Knowledge::Degraded,
            shape: Shape::Holed,
            changes: Vec::new(),
            steps: VecDeque::new(),
            sweeps: VecDeque::new(),
        };
        feed.reset();
        feed
    }

    /// Works out what events mean, in their order.
    pub fn take_all(&mut self, events: &[Event]) {
        for events in events.chunks(LOOK) {
            self.source.glance(events);
            events.iter().for_each(|event| self.work_out(event));
        }
    }

    /// Works out what an event means.
    pub fn take(&mut self, event: &Event) {
        self.take_all(std::slice::from_ref(event));
    }

    fn work_out(&mut self, event: &Event) {
        match event {
            Event::Stored(event) => self.source.store(event, &mut self.changes),
            Event::Removed(event) => self.source.remove(event, &mut self.changes),
            Event::Cleared => return self.reset(),
            Event::Other => return,
        }
        // The index must know of a hole before it opens, and may forget it only after it closed.
        if self.source.worst_shape() == Shape::Holed {
            self.tell(Shape::Holed);
        }
        match self.steps.back_mut() {
            Some(Step::Changes(last, _)) => last.extend_from_slice(&self.changes),
            _ => self.steps.push_back(Step::Changes(std::mem::take(&mut self.changes), 0)),
        }
        self.changes.clear();
        self.tell(self.source.shape());
    }

    fn tell(&mut self, shape: Shape) {
        if self.shape != shape {
            self.shape = shape;
            self.steps.push_back(Step::Shape(shape));
        }
    }

    /// Forgets all blocks: the engine cleared its cache, or is another process now.
    pub fn reset(&mut self) {
        let gone = Box::new(self.source.clear());
        self.steps.push_back(Step::Anew(gone));
        // A new place begins as one that may have holes.
        self.shape = Shape::Holed;
        self.tell(Shape::Whole);
    }

    /// Forgets all blocks and knows those of an imprint instead.
    pub fn adopt(&mut self, imprint: Imprint) {
        self.reset();
        self.source = imprint.source;
        // Blocks come in any order, so there are holes until the last one is in its place.
        self.tell(Shape::Holed);
        self.steps.push_back(Step::Changes(imprint.changes, 0));
        self.source.worst_shape();
        self.tell(self.source.shape());
    }

    /// Everything that is known of the source before message `next`, which must be the first that was not taken yet.
    pub fn imprint(&self, process: Incarnation, next: u64) -> ImprintWriter<'_> {
        ImprintWriter::new(&self.source, ImprintHead { worker: self.worker, rank: self.rank, process, next })
    }

    /// Forgets all blocks and gives the place in the index away.
    pub fn leave(&mut self) {
        let gone = Box::new(self.source.clear());
        self.steps.push_back(Step::Leave(gone));
    }

    /// Says how far the index can be believed.
    pub fn know(&mut self, knowledge: Knowledge) {
        self.steps.push_back(Step::Know(knowledge));
    }

    /// What went wrong in the events so far.
    pub fn counts(&self) -> SourceCounts {
        self.source.counts()
    }

    /// How the source's blocks are named.
    pub fn rules(&self) -> &SourceRules {
        self.source.rules()
    }

    #[cfg(test)]
    pub(crate) fn source(&self) -> &Source {
        &self.source
    }

    /// Engine blocks whose place is known.
    pub fn blocks(&self) -> usize {
        self.source.len()
    }

    /// Fetches what the next [`Self::settle`] of `budget` changes, while others read on.
    pub fn look_ahead(&self, index: &Index, budget: usize) {
        if let Some(Step::Changes(changes, done)) = self.steps.front() {
            index.glance(portion(changes, *done, budget));
        }
    }

    /// Applies at most about `budget` changes to the index.
    pub fn settle(&mut self, index: &mut Index, budget: usize) -> Result<Settled, TooManySources> {
        let mut left = budget.max(1);
        while left > 0 {
            let Some(step) = self.steps.pop_front() else { return Ok(self.sweep(index, left)) };
            left -= self.apply(step, index, left)?.min(left);
        }
        Ok(Settled::More)
    }

    /// Applies one step, or as much of it as `budget` allows; returns what it cost.
    fn apply(&mut self, step: Step, index: &mut Index, budget: usize) -> Result<usize, TooManySources> {
        match step {
            Step::Changes(changes, done) => {
                let due = portion(&changes, done, budget);
                let cost = due.len();
                if let Some(slot) = self.slot {
                    index.apply(slot, due);
                }
                if done + cost < changes.len() {
                    self.steps.push_front(Step::Changes(changes, done + cost));
                } else if self.changes.capacity() == 0 {
                    // The next event's changes go where these were.
                    self.changes = changes;
                    self.changes.clear();
                }
                return Ok(cost);
            }
            Step::Anew(gone) => {
                self.vacate(index, gone);
                self.slot = Some(index.join(self.worker, self.rank, self.knowledge)?);
            }
            Step::Leave(gone) => self.vacate(index, gone),
            Step::Know(knowledge) => {
                self.knowledge = knowledge;
                if let Some(slot) = self.slot {
                    index.know(slot, knowledge);
                }
            }
            Step::Shape(shape) => {
                if let Some(slot) = self.slot {
                    index.shape(slot, shape);
                }
            }
        }
        Ok(1)
    }

    fn vacate(&mut self, index: &mut Index, gone: Gone) {
        if let Some(slot) = self.slot.take() {
            index.retire(slot);
            self.sweeps.push_back((slot, gone));
        }
    }

    /// Removes blocks of former lives.
    fn sweep(&mut self, index: &mut Index, budget: usize) -> Settled {
        let Some((slot, gone)) = self.sweeps.front_mut() else { return Settled::Done };
        let portion: Vec<Change> = gone.take(budget).collect();
        index.apply(*slot, &portion);
        if portion.len() < budget {
            index.release(*slot);
            self.sweeps.pop_front();
        }
        if self.sweeps.is_empty() { Settled::Done } else { Settled::More }
    }
}

/// The next of `changes`.
fn portion(changes: &[Change], done: usize, budget: usize) -> &[Change] {
    &changes[done..changes.len().min(done + budget)]
}

#[cfg(test)]
mod tests;
