//! One worker's memory by runs: what is cached, what is in use, and the host tier that evicted runs fall into.

use vocabulary::Tokens;

use super::recency::Recency;
use super::{RunId, Runs, Sizes};

/// Device memory with an optional host tier. Runs in use are pinned; the rest is evicted least recently used first.
#[derive(Clone, Debug)]
pub(super) struct RunPool {
    capacity: Tokens,
    used: Tokens,
    cached: Recency,
    cached_tokens: Tokens,
    pins: Vec<u32>,
    pinned: Tokens,
    host: Option<Host>,
    evicted: Tokens,
    /// What came and went since somebody asked; none while nobody does.
    changes: Option<Vec<(RunId, bool)>>,
}

#[derive(Clone, Debug)]
struct Host {
    capacity: Tokens,
    used: Tokens,
    runs: Recency,
}

impl RunPool {
    pub(super) fn new(sizes: Sizes, runs: usize) -> Self {
        let host = |capacity| Host { capacity, used: Tokens::ZERO, runs: Recency::new(runs) };
        Self {
            capacity: sizes.device,
            used: Tokens::ZERO,
            cached: Recency::new(runs),
            cached_tokens: Tokens::ZERO,
            pins: vec![0; runs],
            pinned: Tokens::ZERO,
            host: (sizes.host > Tokens::ZERO).then(|| host(sizes.host)),
            evicted: Tokens::ZERO,
            changes: None,
        }
    }

    /// Remembers from now on what comes and goes.
    pub(super) fn tell(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// What came (true) and went since the last call.
    pub(super) fn changes(&mut self) -> Vec<(RunId, bool)> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn changed(&mut self, change: (RunId, bool)) {
        self.changes.iter_mut().for_each(|changes| changes.push(change));
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.cached.has(run)
    }

    pub(super) fn used(&self) -> Tokens {
        self.used
    }

    /// Of `used`, what cannot be evicted now, reservations included.
    pub(super) fn in_use(&self) -> Tokens {
        self.used - self.cached_tokens + self.pinned
    }

    pub(super) fn evicted(&self) -> Tokens {
        self.evicted
    }

    /// Leading tokens of a path that are cached.
    pub(super) fn matched(&self, runs: &Runs, path: &[RunId]) -> Tokens {
        let found = path.iter().take_while(|run| self.has(**run)).count();
        runs.end(&path[..found])
    }

    /// Leading tokens that are cached or in the host tier, when the first `from` are there anyway.
    pub(super) fn matched_with_host(&self, runs: &Runs, path: &[RunId], from: Tokens) -> Tokens {
        let Some(host) = &self.host else { return from };
        let there = |run: &&RunId| runs.depth(**run) <= from || self.has(**run) || host.runs.has(**run);
        let found = path.iter().take_while(there).last();
        found.map_or(from, |run| runs.depth(*run).max(from))
    }

    /// Makes the cached runs of a path the most recently used ones, the first one last: a path is evicted from its end.
    pub(super) fn touch(&mut self, path: &[RunId]) {
        for run in path.iter().rev() {
            self.cached.touch(*run);
        }
    }

    /// Evicts until so many tokens are free and takes them; false, with nothing evicted, if that cannot be.
    pub(super) fn reserve(&mut self, runs: &Runs, tokens: Tokens) -> bool {
        let mut free = self.capacity - self.used;
        let mut victims = Vec::new();
        if free < tokens {
            for run in self.cached.iter().filter(|run| self.pins[run.0 as usize] == 0) {
                victims.push(run);
                free += runs.tokens(run);
                if free >= tokens {
                    break;
                }
            }
        }
        if free < tokens {
            return false;
        }
        for run in victims {
            self.evict(runs, run);
        }
        self.used += tokens;
        true
    }

    fn evict(&mut self, runs: &Runs, run: RunId) {
        let tokens = runs.tokens(run);
        self.cached.remove(run);
        self.changed((run, false));
        self.used -= tokens;
        self.cached_tokens -= tokens;
        self.evicted += tokens;
        let Some(host) = &mut self.host else { return };
        if !host.runs.touch(run) {
            host.used += tokens;
        }
        while host.used > host.capacity {
            let Some(last) = host.runs.oldest() else { break };
            host.runs.remove(last);
            host.used -= runs.tokens(last);
        }
    }

    /// Gives back what was reserved and not filled.
    pub(super) fn unreserve(&mut self, tokens: Tokens) {
        self.used -= tokens;
    }

    /// Reserved memory now holds this run; false if it was cached meanwhile.
    pub(super) fn fill(&mut self, runs: &Runs, run: RunId) -> bool {
        let fresh = !self.cached.has(run);
        if fresh {
            self.cached.touch(run);
            self.changed((run, true));
            self.cached_tokens += runs.tokens(run);
        }
        fresh
    }

    pub(super) fn pin(&mut self, runs: &Runs, path: &[RunId]) {
        for run in path {
            let pins = &mut self.pins[run.0 as usize];
            *pins += 1;
            if *pins == 1 {
                self.pinned += runs.tokens(*run);
            }
        }
    }

    pub(super) fn unpin(&mut self, runs: &Runs, path: &[RunId]) {
        for run in path {
            let pins = &mut self.pins[run.0 as usize];
            *pins = pins.saturating_sub(1);
            if *pins == 0 {
                self.pinned -= runs.tokens(*run);
            }
        }
    }
}
