//! The residency index as the process shares it: read by requests, written by followers in short portions.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use residency::{Change, Feed, Index, Near, Routed, RoutedLimits, Settled, Slot, TooManySources};
use vocabulary::{Blocks, Chain, DpRank, Knowledge, Micros, Overlap, SessionId, Tokens, WorkerId};

/// Changes applied while readers wait: about 1 us, as what they touch was fetched before.
const PORTION: usize = 64;
/// Sessions whose last lookup is remembered, at most.
const NEAR: usize = 4096;

/// A handle to the index. Clones share it.
#[derive(Clone)]
pub struct SharedIndex {
    index: Arc<RwLock<Index>>,
    guesses: Arc<Mutex<HashMap<WorkerId, Guesses>>>,
    /// What sessions' last lookups found, one place for several sessions: who comes last has it.
    near: Arc<[AtomicU64]>,
    started: Instant,
}

/// What a worker is believed to hold of what events do not tell: all of it, or the prompts that are known by their bytes.
struct Guesses {
    limits: RoutedLimits,
    ranks: HashMap<DpRank, (Routed, Slot)>,
    mode: Mode,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Guessed,
    /// Events say better what is known by its tokens. No block of bytes is ever one of theirs, so that both never meet.
    Observed,
}

/// By what a prompt is known.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KnownBy {
    /// By the engine's own token ids, as its events name them.
    Tokens,
    /// By the bytes of its request.
    Bytes,
}

/// The prompts of one step that was served.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    /// Their chains.
    pub prompts: &'a [&'a Chain],
    /// By what all of them are known.
    pub by: KnownBy,
}

impl Default for SharedIndex {
    fn default() -> Self {
        let near = std::iter::repeat_with(AtomicU64::default).take(NEAR).collect();
        Self { index: Arc::default(), guesses: Arc::default(), near, started: Instant::now() }
    }
}

impl SharedIndex {
    /// An index that knows nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// For lookups. Hold it briefly, never across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read()
    }

    /// Who holds how much of a prompt of `session`, which the ledger knows down to `known`. Looks first where the session's
    /// holders ended last time; tells what is true now.
    pub fn overlaps(&self, session: SessionId, chain: &Chain, known: Blocks) -> Vec<Overlap> {
        let place = &self.near[session.0 as usize % NEAR];
        let [least, middle, deepest] = Near::numbered(place.load(Relaxed)).depths();
        let found = self.read().overlaps_near(chain, &[least, middle, deepest, known]);
        place.store(Near::of(&found).number(), Relaxed);
        found
    }

    /// A worker exists; until its events are heard it is known by what is routed there.
    pub(crate) fn admit(&self, worker: WorkerId, limits: RoutedLimits) {
        let guesses = Guesses { limits, ranks: HashMap::new(), mode: Mode::Guessed };
        self.guesses.lock().insert(worker, guesses);
    }

    /// Applies all that a feed has worked out, in portions between which readers get their turn.
    pub fn settle(&self, feed: &mut Feed) -> Result<(), TooManySources> {
        loop {
            feed.look_ahead(&self.read(), PORTION);
            if feed.settle(&mut self.index.write(), PORTION)? == Settled::Done {
                return Ok(());
            }
        }
    }

    /// A step was served there, by a worker whose rank has `room` for so many tokens, where that is known. Returns how the
    /// worker's blocks are known; only guesses are changed by this.
    pub fn note_routed(&self, (worker, rank): (WorkerId, DpRank), step: Served<'_>, room: Option<Tokens>) -> Knowledge {
        let now = Micros::of(self.started.elapsed());
        let mut all = self.guesses.lock();
        let is_told = |guesses: &Guesses| guesses.mode == Mode::Observed && step.by == KnownBy::Tokens;
        if let Some(guesses) = all.get_mut(&worker).filter(|guesses| !is_told(guesses)) {
            self.guess(guesses, (worker, rank), (step.prompts, room), now);
        }
        self.read().knowledge(worker)
    }

    fn guess(
        &self,
        guesses: &mut Guesses,
        (worker, rank): (WorkerId, DpRank),
        (prompts, room): (&[&Chain], Option<Tokens>),
        now: Micros,
    ) {
        let Some(block) = prompts.first().map(|chain| chain.block) else { return };
        if !guesses.ranks.contains_key(&rank) {
            let mut index = self.index.write();
            let joined = match guesses.mode {
                Mode::Guessed => index.join(worker, rank, Knowledge::Fallback),
                Mode::Observed => index.join_beside(worker, rank),
            };
            // Without a place in the index there is no guess, which is only less good.
            let Ok(slot) = joined else { return };
            guesses.ranks.insert(rank, (Routed::new(guesses.limits), slot));
        }
        let Some((routed, slot)) = guesses.ranks.get_mut(&rank) else { return };
        let room = room.map_or(usize::MAX, |room| room.whole_blocks(block).0 as usize);
        routed.bound(guesses.limits.blocks.min(room));
        let mut changes = Vec::new();
        routed.note(prompts, now, &mut changes);
        self.apply(*slot, &changes);
    }

    /// Drops guesses that are too old, also where nothing is routed any more.
    pub(crate) fn age(&self, worker: WorkerId) {
        let now = Micros::of(self.started.elapsed());
        let mut all = self.guesses.lock();
        for (routed, slot) in all.get_mut(&worker).into_iter().flat_map(|guesses| guesses.ranks.values_mut()) {
            let mut changes = Vec::new();
            routed.expire(now, &mut changes);
            self.apply(*slot, &changes);
        }
    }

    /// Events are heard from now on, so guesses go, and only what is known by its bytes is guessed.
    pub(crate) fn observed(&self, worker: WorkerId) {
        self.forget(worker, Mode::Observed);
    }

    /// The worker restarted, or has no events: what was guessed is void, what comes is guessed.
    pub(crate) fn guessed(&self, worker: WorkerId) {
        self.forget(worker, Mode::Guessed);
    }

    pub(crate) fn dismiss(&self, worker: WorkerId) {
        let mut all = self.guesses.lock();
        if let Some(mut guesses) = all.remove(&worker) {
            self.void(&mut guesses);
        }
    }

    fn forget(&self, worker: WorkerId, mode: Mode) {
        let mut all = self.guesses.lock();
        let Some(guesses) = all.get_mut(&worker) else { return };
        guesses.mode = mode;
        self.void(guesses);
    }

    fn void(&self, guesses: &mut Guesses) {
        for (_, (mut routed, slot)) in guesses.ranks.drain() {
            self.index.write().retire(slot);
            let mut changes = Vec::new();
            routed.clear(&mut changes);
            self.apply(slot, &changes);
            self.index.write().release(slot);
        }
    }

    fn apply(&self, slot: Slot, changes: &[Change]) {
        for portion in changes.chunks(PORTION) {
            self.read().glance(portion);
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
