//! Runs in order of their last use.

use super::RunId;

const NONE: u32 = u32::MAX;
/// Marks runs that are not in the list.
const ABSENT: u32 = u32::MAX - 1;

/// A set of runs, ordered from least to most recently used. Every operation takes constant time.
#[derive(Clone, Debug)]
pub(super) struct LruList {
    older: Vec<u32>,
    newer: Vec<u32>,
    oldest: u32,
    newest: u32,
}

impl LruList {
    /// Creates an empty list, for runs with ids below `runs`.
    pub(super) fn new(runs: usize) -> Self {
        Self { older: vec![ABSENT; runs], newer: vec![ABSENT; runs], oldest: NONE, newest: NONE }
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.older[run.0 as usize] != ABSENT
    }

    /// Makes a run the most recently used one; returns whether it was in the list.
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

    /// Iterates from the least recently used one.
    pub(super) fn iter(&self) -> impl Iterator<Item = RunId> {
        let next = |at: u32| (at != NONE).then_some(RunId(at));
        std::iter::successors(next(self.oldest), move |run| next(self.newer[run.0 as usize]))
    }
}
