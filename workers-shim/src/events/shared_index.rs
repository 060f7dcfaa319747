//! The residency index shared by the process: requests read it, followers write to it in small batches.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{RwLock, RwLockReadGuard};
use residency::{
    ApplyProgress, DepthHint, RemovedRank, ResidencyFeed, ResidencyIndex, RoutedBlockLimits, RoutedIndex,
    RoutedRankSlot, TooManySources,
};
use vocabulary::{Blocks, DpRank, KvIndexState, Micros, Overlap, PrefixChain, SessionId, Tokens, WorkerId};

/// Changes applied while readers wait: about 1 us, because the touched memory was prefetched.
const CHANGES_PER_LOCK: usize = 64;
/// Evictions of assumed blocks while lookups wait: a few microseconds.
const EVICTIONS_PER_LOCK: usize = 64;
/// Maximum number of sessions whose last lookup depth is cached.
const MAX_DEPTH_HINTS: usize = 4096;

/// A handle to the index. Clones share it.
#[derive(Clone)]
pub struct SharedIndex {
    index: Arc<RwLock<ResidencyIndex>>,
    assumed: Arc<RwLock<AssumedResidency>>,
    /// Depths found by the last lookups, indexed by session id modulo the length; colliding sessions overwrite each
    /// other.
    depth_hints: Arc<[AtomicU64]>,
    started: Instant,
}

/// Blocks that workers are assumed to hold because prompts were routed there.
#[derive(Default)]
struct AssumedResidency {
    workers: HashMap<WorkerId, AssumedWorker>,
    index: RoutedIndex,
}

/// What is assumed of a worker: for one without events all prompts, otherwise those identified by bytes only.
struct AssumedWorker {
    limits: RoutedBlockLimits,
    ranks: HashMap<DpRank, RoutedRankSlot>,
    mode: ResidencyMode,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ResidencyMode {
    Approximate,
    /// Events cover prompts identified by token ids. Chains over bytes never share a block with them, so the two kinds
    /// do not mix.
    Observed,
}

/// What a prompt's block hashes are computed from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HashInputKind {
    /// The engine's token ids, as in its events.
    Tokens,
    /// The bytes of the request.
    Bytes,
}

/// The prompts of one served step.
#[derive(Clone, Copy, Debug)]
pub struct StepPromptChains<'a> {
    /// Their hash chains.
    pub prompts: &'a [&'a PrefixChain],
    /// The basis of all of these chains.
    pub basis: HashInputKind,
}

impl Default for SharedIndex {
    fn default() -> Self {
        let depth_hints = std::iter::repeat_with(AtomicU64::default).take(MAX_DEPTH_HINTS).collect();
        Self { index: Arc::default(), assumed: Arc::default(), depth_hints, started: Instant::now() }
    }
}

impl SharedIndex {
    /// Creates an empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Locks the index of what engines report. Hold the guard briefly, never across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, ResidencyIndex> {
        self.index.read()
    }

    /// Returns the number of blocks that are assumed from routing; one that several ranks hold counts for each.
    pub fn assumed_blocks(&self) -> usize {
        self.assumed.read().index.blocks()
    }

    /// Returns which workers hold how much of a prompt of `session`, of which the ledger knows `known` blocks. The
    /// depths found last time only speed up the search; the result is always current.
    pub fn overlaps(&self, session: SessionId, chain: &PrefixChain, known: Blocks) -> Vec<Overlap> {
        let hint = &self.depth_hints[session.0 as usize % MAX_DEPTH_HINTS];
        let [least, middle, deepest] = DepthHint::from_packed(hint.load(Relaxed)).depths();
        let found = self.read().overlaps_with_hint(chain, &[least, middle, deepest, known]);
        hint.store(DepthHint::from_depths(&found).packed(), Relaxed);
        self.with_assumed(chain, found)
    }

    /// Returns which workers hold how much of a chain.
    pub fn overlaps_of_chain(&self, chain: &PrefixChain) -> Vec<Overlap> {
        let found = self.read().overlaps_of_chain(chain);
        self.with_assumed(chain, found)
    }

    /// Adds the assumed overlaps, and sorts. No rank is in both lists: events cover chains over token ids, and routing
    /// the others.
    fn with_assumed(&self, chain: &PrefixChain, mut found: Vec<Overlap>) -> Vec<Overlap> {
        let reported = found.len();
        self.assumed.read().index.find_overlaps(chain, &mut found);
        if found.len() > reported {
            found.sort_unstable_by_key(|overlap| (overlap.worker, overlap.rank, overlap.tier));
        }
        found
    }

    /// Adds a worker. Until its events are followed, its blocks are assumed from routing.
    pub(crate) fn admit(&self, worker: WorkerId, limits: RoutedBlockLimits) {
        let mode = ResidencyMode::Approximate;
        let removed = {
            let mut assumed = self.assumed.write();
            // A follower that is restarted admits its worker again.
            let removed = assumed.forget_blocks(worker);
            assumed.workers.insert(worker, AssumedWorker { limits, ranks: HashMap::new(), mode });
            removed
        };
        drop(removed);
    }

    /// Applies all changes of a feed, in batches between which readers can proceed.
    pub fn apply_feed(&self, feed: &mut ResidencyFeed) -> Result<(), TooManySources> {
        loop {
            feed.warm_cpu_cache(&self.read(), CHANGES_PER_LOCK);
            if feed.settle(&mut self.index.write(), CHANGES_PER_LOCK)? == ApplyProgress::Done {
                return Ok(());
            }
        }
    }

    /// Records that a step was served at this rank. `capacity` is the rank's KV capacity in tokens, if known. Returns
    /// how the worker's blocks are known; only assumed blocks change.
    pub fn note_routed(
        &self,
        (worker, rank): (WorkerId, DpRank),
        step: StepPromptChains<'_>,
        capacity: Option<Tokens>,
    ) -> KvIndexState {
        let now = Micros::of(self.started.elapsed());
        self.assumed.write().record((worker, rank), step, capacity, now);
        self.read().kv_index_state(worker)
    }

    /// Removes assumed blocks that are too old. Needed also where nothing is routed any more.
    pub(crate) fn expire(&self, worker: WorkerId) {
        let now = Micros::of(self.started.elapsed());
        let slots: Vec<_> = self.assumed.read().slots(worker).collect();
        for slot in slots {
            // Lookups proceed in between.
            while self.assumed.write().index.expire(slot, now, EVICTIONS_PER_LOCK) == ApplyProgress::More {}
        }
    }

    /// Switches to events: drops the assumed blocks and records only prompts identified by bytes from now on.
    pub(crate) fn use_events(&self, worker: WorkerId) {
        self.set_mode(worker, ResidencyMode::Observed);
    }

    /// Switches to assumptions from routing, for a worker that restarted or has no events: drops what was assumed
    /// before.
    pub(crate) fn use_approximation(&self, worker: WorkerId) {
        self.set_mode(worker, ResidencyMode::Approximate);
    }

    pub(crate) fn remove_worker(&self, worker: WorkerId) {
        let removed = {
            let mut assumed = self.assumed.write();
            let removed = assumed.forget_blocks(worker);
            assumed.workers.remove(&worker);
            removed
        };
        drop(removed);
    }

    fn set_mode(&self, worker: WorkerId, mode: ResidencyMode) {
        let removed = {
            let mut assumed = self.assumed.write();
            let removed = assumed.forget_blocks(worker);
            assumed.workers.get_mut(&worker).into_iter().for_each(|worker| worker.mode = mode);
            removed
        };
        drop(removed);
    }
}

impl AssumedResidency {
    /// Records that a step was served at a rank, unless the worker's events say so.
    fn record(
        &mut self,
        (worker, rank): (WorkerId, DpRank),
        step: StepPromptChains<'_>,
        capacity: Option<Tokens>,
        now: Micros,
    ) {
        let Self { workers, index } = self;
        let Some(known) = workers.get_mut(&worker) else { return };
        let Some(block) = step.prompts.first().map(|chain| chain.block) else { return };
        if known.mode == ResidencyMode::Observed && step.basis == HashInputKind::Tokens {
            return;
        }
        let slot = match known.ranks.get(&rank) {
            Some(slot) => *slot,
            None => {
                let Some(slot) = index.add_rank(worker, rank, known.limits) else { return };
                *known.ranks.entry(rank).or_insert(slot)
            }
        };
        let capacity = capacity.map_or(usize::MAX, |capacity| capacity.whole_blocks(block).0 as usize);
        index.record_prompts(slot, step.prompts, capacity, now);
    }

    fn slots(&self, worker: WorkerId) -> impl Iterator<Item = RoutedRankSlot> {
        self.workers.get(&worker).into_iter().flat_map(|worker| worker.ranks.values().copied())
    }

    /// Removes what a worker is assumed to hold. The caller drops it without the lock.
    fn forget_blocks(&mut self, worker: WorkerId) -> Vec<RemovedRank> {
        let ranks = self.workers.get_mut(&worker).into_iter().flat_map(|worker| worker.ranks.drain());
        ranks.filter_map(|(_, slot)| self.index.remove_rank(slot)).collect()
    }
}

impl std::fmt::Debug for SharedIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedIndex")
            .field("blocks", &self.read().blocks())
            .field("assumed", &self.assumed_blocks())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
