//! The bound that no fleet reaches: one cache for all workers, from which everything is there at once.

use vocabulary::Tokens;

use super::lru_list::LruList;
use super::{RunId, RunTree};

/// What engines share: the runs there are, and for a bound one cache in place of their own.
pub struct EngineEnvironment<'a> {
    /// Every run there is.
    pub runs: &'a RunTree,
    /// One cache for all; engines with it have no memory of their own, and prompts and answers do not disturb each other.
    pub shared: Option<&'a mut SharedPool>,
}

/// One cache for all workers.
#[derive(Clone, Debug)]
pub struct SharedPool {
    /// None keeps everything.
    capacity: Option<Tokens>,
    used: Tokens,
    cached: LruList,
}

impl SharedPool {
    /// Empty, for runs below `runs`.
    pub fn new(capacity: Option<Tokens>, runs: usize) -> Self {
        Self { capacity, used: Tokens::ZERO, cached: LruList::new(runs) }
    }

    /// Leading tokens of a path that are cached.
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
