//! The residency index shared by the process: requests read it, followers write to it in small batches.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use residency::{
    ApplyProgress, DepthHint, PrefixClosure, ResidencyChange, ResidencyFeed, ResidencyIndex, RoutedBlockLimits,
    RoutedBlocks, SourceSlot, TooManySources,
};
use vocabulary::{Blocks, DpRank, KvIndexState, Micros, Overlap, PrefixChain, SessionId, Tokens, WorkerId};

/// Changes applied while readers wait: about 1 us, because the touched memory was prefetched.
const CHANGES_PER_LOCK: usize = 64;
/// Maximum number of sessions whose last lookup depth is cached.
const MAX_DEPTH_HINTS: usize = 4096;

/// A handle to the index. Clones share it.
#[derive(Clone)]
pub struct SharedIndex {
    index: Arc<RwLock<ResidencyIndex>>,
    approximate: Arc<Mutex<HashMap<WorkerId, ApproximateResidency>>>,
    /// Depths found by the last lookups, indexed by session id modulo the length; colliding sessions overwrite each
    /// other.
    depth_hints: Arc<[AtomicU64]>,
    started: Instant,
}

/// Blocks that a worker is assumed to hold because prompts were routed there: all prompts for workers without events,
/// otherwise those identified by bytes only.
struct ApproximateResidency {
    limits: RoutedBlockLimits,
    ranks: HashMap<DpRank, (RoutedBlocks, SourceSlot)>,
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
        Self { index: Arc::default(), approximate: Arc::default(), depth_hints, started: Instant::now() }
    }
}

impl SharedIndex {
    /// Creates an empty index.
    pub fn new() -> Self {
        Self::default()
    }

    /// Locks the index for lookups. Hold the guard briefly, never across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, ResidencyIndex> {
        self.index.read()
    }

    /// Returns which workers hold how much of a prompt of `session`, of which the ledger knows `known` blocks. The
    /// depths found last time only speed up the search; the result is always current.
    pub fn overlaps(&self, session: SessionId, chain: &PrefixChain, known: Blocks) -> Vec<Overlap> {
        let hint = &self.depth_hints[session.0 as usize % MAX_DEPTH_HINTS];
        let [least, middle, deepest] = DepthHint::from_packed(hint.load(Relaxed)).depths();
        let found = self.read().overlaps_with_hint(chain, &[least, middle, deepest, known]);
        hint.store(DepthHint::from_depths(&found).packed(), Relaxed);
        found
    }

    /// Adds a worker. Until its events are followed, its blocks are assumed from routing.
    pub(crate) fn admit(&self, worker: WorkerId, limits: RoutedBlockLimits) {
        let guesses = ApproximateResidency { limits, ranks: HashMap::new(), mode: ResidencyMode::Approximate };
        self.approximate.lock().insert(worker, guesses);
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
        let mut all = self.approximate.lock();
        let is_told = |residency: &ApproximateResidency| {
            residency.mode == ResidencyMode::Observed && step.basis == HashInputKind::Tokens
        };
        if let Some(guesses) = all.get_mut(&worker).filter(|guesses| !is_told(guesses)) {
            self.approximate(guesses, (worker, rank), (step.prompts, capacity), now);
        }
        self.read().kv_index_state(worker)
    }

    fn approximate(
        &self,
        residency: &mut ApproximateResidency,
        (worker, rank): (WorkerId, DpRank),
        (prompts, capacity): (&[&PrefixChain], Option<Tokens>),
        now: Micros,
    ) {
        let Some(block) = prompts.first().map(|chain| chain.block) else { return };
        if !residency.ranks.contains_key(&rank) {
            let mut index = self.index.write();
            let joined = match residency.mode {
                ResidencyMode::Approximate => index.add_source(worker, rank, KvIndexState::Approximate),
                ResidencyMode::Observed => index.add_approximate_source(worker, rank),
            };
            // Without a free source slot nothing is assumed, which only costs accuracy.
            let Ok(slot) = joined else { return };
            // Routed blocks are recorded and evicted so that none is held without its parent.
            index.set_closure(slot, PrefixClosure::Whole);
            residency.ranks.insert(rank, (RoutedBlocks::new(residency.limits), slot));
        }
        let Some((routed, slot)) = residency.ranks.get_mut(&rank) else { return };
        let capacity = capacity.map_or(usize::MAX, |capacity| capacity.whole_blocks(block).0 as usize);
        routed.set_limit(residency.limits.blocks.min(capacity));
        let mut changes = Vec::new();
        routed.record_prompts(prompts, now, &mut changes);
        self.apply(*slot, &changes);
    }

    /// Removes assumed blocks that are too old. Needed also where nothing is routed any more.
    pub(crate) fn expire(&self, worker: WorkerId) {
        let now = Micros::of(self.started.elapsed());
        let mut all = self.approximate.lock();
        for (routed, slot) in all.get_mut(&worker).into_iter().flat_map(|guesses| guesses.ranks.values_mut()) {
            let mut changes = Vec::new();
            routed.expire(now, &mut changes);
            self.apply(*slot, &changes);
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
        let mut all = self.approximate.lock();
        if let Some(mut guesses) = all.remove(&worker) {
            self.clear_approximate(&mut guesses);
        }
    }

    fn set_mode(&self, worker: WorkerId, mode: ResidencyMode) {
        let mut all = self.approximate.lock();
        let Some(guesses) = all.get_mut(&worker) else { return };
        guesses.mode = mode;
        self.clear_approximate(guesses);
    }

    fn clear_approximate(&self, residency: &mut ApproximateResidency) {
        for (_, (mut routed, slot)) in residency.ranks.drain() {
            self.index.write().retire(slot);
            let mut changes = Vec::new();
            routed.clear(&mut changes);
            self.apply(slot, &changes);
            self.index.write().release(slot);
        }
    }

    fn apply(&self, slot: SourceSlot, changes: &[ResidencyChange]) {
        for portion in changes.chunks(CHANGES_PER_LOCK) {
            self.read().warm_cpu_cache(portion);
            self.index.write().apply(slot, portion);
        }
    }
}

impl std::fmt::Debug for SharedIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedIndex").field("blocks", &self.read().blocks()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
