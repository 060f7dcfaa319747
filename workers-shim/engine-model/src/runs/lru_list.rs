//! Runs in the order of their last use.

use super::RunId;

const NONE: u32 = u32::MAX;
/// Marks what is not in the order at all.
const ABSENT: u32 = u32::MAX - 1;

/// A set of runs, from the least to the most recently used one. Every operation is constant.
#[derive(Clone, Debug)]
pub(super) struct LruList {
    older: Vec<u32>,
    newer: Vec<u32>,
    oldest: u32,
    newest: u32,
}

impl LruList {
    /// Empty, for runs below `runs`.
    pub(super) fn new(runs: usize) -> Self {
        Self { older: vec![ABSENT; runs], newer: vec![ABSENT; runs], oldest: NONE, newest: NONE }
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.older[run.0 as usize] != ABSENT
    }

    /// Makes it the most recently used one. Whether it was there.
    pub(super) fn touch(&mut self, run: RunId) -> bool {
        let was = self.remove(run);
        self.older[run.0 as usize] = self.newest;
        self.newer[run.0 as usize] = NONE;
        match self.newest {
            NONE => self.oldest = run.0,
            newest => self.newer[newest as usize] = run.0,
        }
        self.newest = run.0;
        was
    }

    pub(super) fn remove(&mut self, run: RunId) -> bool {
        if !self.has(run) {
            return false;
        }
        let (older, newer) = (self.older[run.0 as usize], self.newer[run.0 as usize]);
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        self.older[run.0 as usize] = ABSENT;
        self.newer[run.0 as usize] = ABSENT;
        true
    }

    pub(super) fn oldest(&self) -> Option<RunId> {
        (self.oldest != NONE).then_some(RunId(self.oldest))
    }

    /// From the least recently used one on.
    pub(super) fn iter(&self) -> impl Iterator<Item = RunId> {
        let next = |at: u32| (at != NONE).then_some(RunId(at));
        std::iter::successors(next(self.oldest), move |run| next(self.newer[run.0 as usize]))
    }
}
