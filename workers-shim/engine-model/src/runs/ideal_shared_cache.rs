//! An upper bound for any fleet: one cache for all workers, with all contents available at once.

use vocabulary::Tokens;

use super::lru_list::LruList;
use super::{RunId, RunTree};

/// State outside of one engine: the runs, and for the upper bound one cache that replaces all engines' own.
pub struct SharedEngineState<'a> {
    /// All runs.
    pub runs: &'a RunTree,
    /// One cache for all engines. With it, engines have no memory of their own, and prefills and answers do not slow
    /// each other down.
    pub shared: Option<&'a mut IdealSharedCache>,
}

/// One cache for all workers.
#[derive(Clone, Debug)]
pub struct IdealSharedCache {
    /// None is unlimited.
    capacity: Option<Tokens>,
    used: Tokens,
    cached: LruList,
}

impl IdealSharedCache {
    /// Creates an empty cache, for runs with ids below `runs`.
    pub fn new(capacity: Option<Tokens>, runs: usize) -> Self {
        Self { capacity, used: Tokens::ZERO, cached: LruList::new(runs) }
    }

    /// Returns the leading tokens of a path that are cached.
    pub fn matched(&self, runs: &RunTree, path: &[RunId]) -> Tokens {
        let found = path.iter().take_while(|run| self.cached.has(**run)).count();
        runs.end_depth(&path[..found])
    }

    pub(super) fn put(&mut self, runs: &RunTree, path: &[RunId]) {
        for run in path.iter().rev() {
            if !self.cached.touch(*run) {
                self.used += runs.device_size(*run);
            }
        }
        let Some(capacity) = self.capacity else { return };
        while self.used > capacity {
            let Some(last) = self.cached.oldest() else { break };
            self.cached.remove(last);
            self.used -= runs.device_size(last);
        }
    }
}
