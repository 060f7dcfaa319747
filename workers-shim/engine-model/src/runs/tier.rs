//! A memory tier below device memory: its contents, and when its link is free again.

use vocabulary::Tokens;

use super::lru_list::LruList;
use super::{RunId, RunTree, Seconds};

/// An LRU set of runs with a capacity. It transfers one thing at a time.
#[derive(Clone, Debug)]
pub(super) struct LruTier {
    capacity: Tokens,
    used: Tokens,
    runs: LruList,
    free_at: Seconds,
}

impl LruTier {
    /// Creates an empty tier, for runs with ids below `runs`; None if its capacity is 0.
    pub(super) fn of(capacity: Tokens, runs: usize) -> Option<Self> {
        let tier = || Self { capacity, used: Tokens::ZERO, runs: LruList::new(runs), free_at: Seconds::ZERO };
        (capacity > Tokens::ZERO).then(tier)
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.runs.has(run)
    }

    /// Makes a run the most recently used one; returns whether it was already stored.
    pub(super) fn put(&mut self, runs: &RunTree, run: RunId) -> bool {
        let was = self.runs.touch(run);
        if !was {
            self.used += runs.lower_tier_size(run);
        }
        was
    }

    /// Removes the least recently used run if the capacity is exceeded.
    pub(super) fn evict_oldest(&mut self, runs: &RunTree) -> Option<RunId> {
        let last = self.runs.oldest().filter(|_| self.used > self.capacity)?;
        self.runs.remove(last);
        self.used -= runs.lower_tier_size(last);
        Some(last)
    }

    /// Schedules a transfer after all earlier ones; returns the seconds from `from` until it is finished.
    pub(super) fn schedule_move(&mut self, from: Seconds, lasts: f64) -> f64 {
        let begin = from.max(self.free_at);
        self.free_at = begin + Seconds(lasts);
        (begin - from).0 + lasts
    }

    /// Returns the seconds until it can start another transfer.
    pub(super) fn wait(&self, now: Seconds) -> f64 {
        (self.free_at - now).0.max(0.0)
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> Tokens {
        self.used
    }
}
