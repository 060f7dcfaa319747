//! A tier below device memory: what lies in it, and when the way to it is free again.

use vocabulary::Tokens;

use super::lru_list::LruList;
use super::{RunId, RunTree, Seconds};

/// Runs up to a size, of which the least recently used one goes first. It moves one thing at a time.
#[derive(Clone, Debug)]
pub(super) struct LruTier {
    capacity: Tokens,
    used: Tokens,
    runs: LruList,
    free_at: Seconds,
}

impl LruTier {
    /// An empty one, for runs below `runs`; none without room.
    pub(super) fn of(capacity: Tokens, runs: usize) -> Option<Self> {
        let tier = || Self { capacity, used: Tokens::ZERO, runs: LruList::new(runs), free_at: Seconds::ZERO };
        (capacity > Tokens::ZERO).then(tier)
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.runs.has(run)
    }

    /// A run is its most recently used one; whether it was there already.
    pub(super) fn put(&mut self, runs: &RunTree, run: RunId) -> bool {
        let was = self.runs.touch(run);
        if !was {
            self.used += runs.lower_tier_size(run);
        }
        was
    }

    /// A run that has no room any more, which leaves.
    pub(super) fn evict_oldest(&mut self, runs: &RunTree) -> Option<RunId> {
        let last = self.runs.oldest().filter(|_| self.used > self.capacity)?;
        self.runs.remove(last);
        self.used -= runs.lower_tier_size(last);
        Some(last)
    }

    /// Something is moved as soon as what came before it is: seconds from `from` until it is there.
    pub(super) fn schedule_move(&mut self, from: Seconds, lasts: f64) -> f64 {
        let begin = from.max(self.free_at);
        self.free_at = begin + Seconds(lasts);
        (begin - from).0 + lasts
    }

    /// Seconds until it can move something else.
    pub(super) fn wait(&self, now: Seconds) -> f64 {
        (self.free_at - now).0.max(0.0)
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> Tokens {
        self.used
    }
}
