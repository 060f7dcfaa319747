//! Feeds a source's events into the shared index in limited batches.
//!
//! [`ResidencyFeed::ingest`] does the hashing and needs no index; [`ResidencyFeed::settle`] runs under the index's
//! write lock.

use std::collections::VecDeque;

use vocabulary::{DpRank, Incarnation, KvIndexState, WorkerId};

use crate::index::{ResidencyChange, ResidencyIndex, SourceSlot, TooManySources};
use crate::kv_event::KvCacheEvent;
use crate::prefix_closure::PrefixClosure;
use crate::snapshot::{ResidencySnapshot, ResidencySnapshotHeader, ResidencySnapshotWriter};
use crate::source::{BlockMappingRules, SourceAnomalies, SourceBlocks};

/// Whether all changes have been applied to the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ApplyProgress {
    /// All have.
    Done,
    /// There are more; call again.
    More,
}

/// Number of events whose hashes are prefetched together: most have one block or a few.
const LOOKAHEAD_EVENTS: usize = 32;

type RemovalIter = Box<dyn Iterator<Item = ResidencyChange> + Send + Sync>;

/// An update that waits to be applied, in order.
enum IndexUpdate {
    /// Changes, and how many of them were already applied.
    Changes(Vec<ResidencyChange>, usize),
    /// All blocks are removed at once: a new slot is taken, and the old one is swept later.
    Reset(RemovalIter),
    Leave(RemovalIter),
    Knowledge(KvIndexState),
    Closure(PrefixClosure),
}

/// One rank of one worker: its source and its slot in the index.
pub struct ResidencyFeed {
    worker: WorkerId,
    rank: DpRank,
    source: SourceBlocks,
    slot: Option<SourceSlot>,
    knowledge: KvIndexState,
    /// The state that the index has, or will have once all updates are applied.
    closure: PrefixClosure,
    /// Changes of the current event.
    changes: Vec<ResidencyChange>,
    steps: VecDeque<IndexUpdate>,
    sweeps: VecDeque<(SourceSlot, RemovalIter)>,
}

impl ResidencyFeed {
    /// Creates a feed, which has no slot in the index before its first `settle`.
    pub fn new(worker: WorkerId, rank: DpRank, rules: BlockMappingRules) -> Self {
        let mut feed = Self {
            worker,
            rank,
            source: SourceBlocks::new(rules),
            slot: None,
            knowledge: KvIndexState::Degraded,
            closure: PrefixClosure::Holed,
            changes: Vec::new(),
            steps: VecDeque::new(),
            sweeps: VecDeque::new(),
        };
        feed.reset();
        feed
    }

    /// Processes events in order.
    pub fn ingest_all(&mut self, events: &[KvCacheEvent]) {
        for events in events.chunks(LOOKAHEAD_EVENTS) {
            self.source.warm_cpu_cache(events);
            events.iter().for_each(|event| self.resolve_event(event));
        }
    }

    /// Processes one event.
    pub fn ingest(&mut self, event: &KvCacheEvent) {
        self.ingest_all(std::slice::from_ref(event));
    }

    fn resolve_event(&mut self, event: &KvCacheEvent) {
        match event {
            KvCacheEvent::Stored(event) => self.source.store(event, &mut self.changes),
            KvCacheEvent::Removed(event) => self.source.remove(event, &mut self.changes),
            KvCacheEvent::Cleared => return self.reset(),
            KvCacheEvent::Other => return,
        }
        // The index must learn of a hole before it opens, and may forget it only after it has closed.
        if self.source.take_worst_closure() == PrefixClosure::Holed {
            self.set_closure(PrefixClosure::Holed);
        }
        match self.steps.back_mut() {
            Some(IndexUpdate::Changes(last, _)) => last.extend_from_slice(&self.changes),
            _ => self.steps.push_back(IndexUpdate::Changes(std::mem::take(&mut self.changes), 0)),
        }
        self.changes.clear();
        self.set_closure(self.source.closure_state());
    }

    fn set_closure(&mut self, shape: PrefixClosure) {
        if self.closure != shape {
            self.closure = shape;
            self.steps.push_back(IndexUpdate::Closure(shape));
        }
    }

    /// Forgets all blocks, because the engine cleared its cache or was replaced by another process.
    pub fn reset(&mut self) {
        let removals = Box::new(self.source.clear());
        self.steps.push_back(IndexUpdate::Reset(removals));
        // A new slot starts as one that may have holes.
        self.closure = PrefixClosure::Holed;
        self.set_closure(PrefixClosure::Whole);
    }

    /// Replaces all blocks by those of a snapshot.
    pub fn adopt(&mut self, imprint: ResidencySnapshot) {
        self.reset();
        self.source = imprint.source;
        // Blocks arrive in any order, so there may be holes until the last one is applied.
        self.set_closure(PrefixClosure::Holed);
        self.steps.push_back(IndexUpdate::Changes(imprint.changes, 0));
        self.source.take_worst_closure();
        self.set_closure(self.source.closure_state());
    }

    /// Returns a snapshot of the source before message `next`, which must be the first one not yet processed.
    pub fn snapshot(&self, incarnation: Incarnation, next: u64) -> ResidencySnapshotWriter<'_> {
        ResidencySnapshotWriter::new(
            &self.source,
            ResidencySnapshotHeader { worker: self.worker, rank: self.rank, process: incarnation, next },
        )
    }

    /// Forgets all blocks and releases the slot in the index.
    pub fn leave(&mut self) {
        let removals = Box::new(self.source.clear());
        self.steps.push_back(IndexUpdate::Leave(removals));
    }

    /// Sets how exactly the source's blocks are known.
    pub fn set_kv_index_state(&mut self, index_state: KvIndexState) {
        self.steps.push_back(IndexUpdate::Knowledge(index_state));
    }

    /// Returns the counters of anomalies in the events.
    pub fn counts(&self) -> SourceAnomalies {
        self.source.counts()
    }

    /// Returns how the source's blocks are mapped to chain blocks.
    pub fn rules(&self) -> &BlockMappingRules {
        self.source.rules()
    }

    #[cfg(test)]
    pub(crate) fn source(&self) -> &SourceBlocks {
        &self.source
    }

    /// Returns the number of placed engine blocks.
    pub fn blocks(&self) -> usize {
        self.source.len()
    }

    /// Prefetches what the next [`Self::settle`] of `budget` will change, while others can still read.
    pub fn warm_cpu_cache(&self, index: &ResidencyIndex, budget: usize) {
        if let Some(IndexUpdate::Changes(changes, done)) = self.steps.front() {
            index.warm_cpu_cache(chunk(changes, *done, budget));
        }
    }

    /// Applies about `budget` changes to the index at most.
    pub fn settle(&mut self, index: &mut ResidencyIndex, budget: usize) -> Result<ApplyProgress, TooManySources> {
        let mut budget_left = budget.max(1);
        while budget_left > 0 {
            let Some(step) = self.steps.pop_front() else { return Ok(self.sweep_retired(index, budget_left)) };
            budget_left -= self.apply(step, index, budget_left)?.min(budget_left);
        }
        Ok(ApplyProgress::More)
    }

    /// Applies one update, or as much of it as `budget` allows; returns its cost.
    fn apply(&mut self, step: IndexUpdate, index: &mut ResidencyIndex, budget: usize) -> Result<usize, TooManySources> {
        match step {
            IndexUpdate::Changes(changes, done) => {
                let chunk = chunk(&changes, done, budget);
                let cost = chunk.len();
                if let Some(slot) = self.slot {
                    index.apply(slot, chunk);
                }
                if done + cost < changes.len() {
                    self.steps.push_front(IndexUpdate::Changes(changes, done + cost));
                } else if self.changes.capacity() == 0 {
                    // Reuse the allocation for the next event.
                    self.changes = changes;
                    self.changes.clear();
                }
                return Ok(cost);
            }
            IndexUpdate::Reset(removals) => {
                self.vacate(index, removals);
                self.slot = Some(index.add_source(self.worker, self.rank, self.knowledge)?);
            }
            IndexUpdate::Leave(removals) => self.vacate(index, removals),
            IndexUpdate::Knowledge(knowledge) => {
                self.knowledge = knowledge;
                if let Some(slot) = self.slot {
                    index.set_kv_index_state(slot, knowledge);
                }
            }
            IndexUpdate::Closure(shape) => {
                if let Some(slot) = self.slot {
                    index.set_closure(slot, shape);
                }
            }
        }
        Ok(1)
    }

    fn vacate(&mut self, index: &mut ResidencyIndex, removals: RemovalIter) {
        if let Some(slot) = self.slot.take() {
            index.retire(slot);
            self.sweeps.push_back((slot, removals));
        }
    }

    /// Removes blocks of retired slots.
    fn sweep_retired(&mut self, index: &mut ResidencyIndex, budget: usize) -> ApplyProgress {
        let Some((slot, removals)) = self.sweeps.front_mut() else { return ApplyProgress::Done };
        let portion: Vec<ResidencyChange> = removals.take(budget).collect();
        index.apply(*slot, &portion);
        if portion.len() < budget {
            index.release(*slot);
            self.sweeps.pop_front();
        }
        if self.sweeps.is_empty() { ApplyProgress::Done } else { ApplyProgress::More }
    }
}

/// Returns the next chunk of `changes`.
fn chunk(changes: &[ResidencyChange], done: usize, budget: usize) -> &[ResidencyChange] {
    &changes[done..changes.len().min(done + budget)]
}

#[cfg(test)]
mod tests;
