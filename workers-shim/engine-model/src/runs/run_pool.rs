//! One worker's memory at the level of runs: cached runs, runs in use, and the tiers that evicted runs move to.

use vocabulary::Tokens;

use super::lru_list::LruList;
use super::offload_tiers::{LowerTierHit, OffloadTiers, SlowestTier};
use super::{MemorySizes, OffloadedPrefix, RestoreChoice, RestoreRule, RunId, RunTree};

/// Device memory with optional tiers below. Runs in use are pinned; others are evicted least recently used first.
#[derive(Clone, Debug)]
pub(super) struct RunPool {
    capacity: Tokens,
    used: Tokens,
    cached: LruList,
    cached_tokens: Tokens,
    pins: Vec<u32>,
    pinned: Tokens,
    pub(super) lower: OffloadTiers,
    evicted: Tokens,
    /// Recorded changes since the last call of `take_changes`; None if recording is disabled.
    changes: Option<Vec<(RunId, bool)>>,
}

impl RunPool {
    pub(super) fn new(sizes: MemorySizes, runs: usize) -> Self {
        Self {
            capacity: sizes.device,
            used: Tokens::ZERO,
            cached: LruList::new(runs),
            cached_tokens: Tokens::ZERO,
            pins: vec![0; runs],
            pinned: Tokens::ZERO,
            lower: OffloadTiers::new(&sizes, runs),
            evicted: Tokens::ZERO,
            changes: None,
        }
    }

    /// Starts to record changes.
    pub(super) fn enable_change_recording(&mut self) {
        self.changes = Some(Vec::new());
    }

    /// Returns the runs added (true) and evicted (false) since the last call.
    pub(super) fn take_changes(&mut self) -> Vec<(RunId, bool)> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn record_change(&mut self, change: (RunId, bool)) {
        self.changes.iter_mut().for_each(|changes| changes.push(change));
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.cached.has(run)
    }

    pub(super) fn used(&self) -> Tokens {
        self.used
    }

    /// Returns the part of `used` that cannot be evicted now, reservations included.
    pub(super) fn in_use(&self) -> Tokens {
        self.used - self.cached_tokens + self.pinned
    }

    pub(super) fn evicted(&self) -> Tokens {
        self.evicted
    }

    /// Returns the leading tokens of a path that are cached.
    pub(super) fn matched(&self, runs: &RunTree, path: &[RunId]) -> Tokens {
        let found = path.iter().take_while(|run| self.has(**run)).count();
        runs.end_depth(&path[..found])
    }

    /// Returns the leading tokens that are cached or in the host tier, and those that are in any tier, given that the
    /// first `from` are available.
    pub(super) fn matched_in_lower_tiers(&self, runs: &RunTree, path: &[RunId], from: Tokens) -> [Tokens; 2] {
        if self.lower.is_none() {
            return [from; 2];
        }
        let (mut with_host, mut with_disk) = (None, from);
        for run in path.iter().copied().skip_while(|run| runs.depth(*run) <= from) {
            if !self.is_above_disk(run) {
                with_host.get_or_insert(with_disk);
                if !self.lower.on_disk(run) {
                    break;
                }
            }
            with_disk = runs.depth(run);
        }
        [with_host.unwrap_or(with_disk), with_disk]
    }

    fn is_above_disk(&self, run: RunId) -> bool {
        self.has(run) || self.lower.on_host(run)
    }

    /// Returns the amounts of a path to load from each tier, from the depth `from` on, including windows.
    pub(super) fn lower_tier_hit(
        &self,
        runs: &RunTree,
        path: &[RunId],
        (from, choice): (Tokens, &RestoreChoice),
    ) -> LowerTierHit {
        let mut below = LowerTierHit::default();
        for run in path.iter().copied().skip_while(|run| runs.depth(*run) <= from) {
            let (begin, end) =
                ((runs.depth(run) - runs.tokens(run)).max(from), runs.depth(run).min(choice.loaded_until));
            if begin >= end {
                break;
            }
            let last = if end == choice.loaded_until { choice.windows } else { Tokens::ZERO };
            match self.is_above_disk(run) {
                true => below.host += end - begin + last,
                false => below.disk.push((run, end - begin + last)),
            }
        }
        below
    }

    /// Reads runs from slower tiers for a transfer; returns the seconds until they are available.
    pub(super) fn read_for_transfer(&mut self, runs: &RunTree, wanted: &[RunId]) -> f64 {
        let (host, disk): (Vec<RunId>, Vec<RunId>) = wanted.iter().partition(|run| self.lower.on_host(**run));
        let host = host.into_iter().map(|run| runs.lower_tier_size(run)).sum();
        let disk = disk.into_iter().map(|run| (run, runs.lower_tier_size(run))).collect();
        self.lower.restore(runs, &LowerTierHit { host, disk }).total()
    }

    /// Applies `rule` to the tokens between two depths, given the cost of loading them.
    pub(super) fn restore_choice(
        &self,
        rule: &dyn RestoreRule,
        (runs, path): (&RunTree, &[RunId]),
        (held, until): (Tokens, Tokens),
    ) -> RestoreChoice {
        let between = path.iter().filter(|run| runs.depth(**run) > held && runs.depth(**run) <= until);
        let lowest =
            if between.into_iter().all(|run| self.is_above_disk(*run)) { SlowestTier::Host } else { SlowestTier::Disk };
        let (wait, token) = self.lower.load_cost(lowest);
        rule.choose(&OffloadedPrefix {
            cached_until: held,
            stored_until: until,
            wait_seconds: wait,
            seconds_per_token: token,
        })
    }

    /// Makes the cached runs of a path the most recently used ones, the first run last, so that a path is evicted from
    /// its end.
    pub(super) fn touch(&mut self, path: &[RunId]) {
        for run in path.iter().rev() {
            self.cached.touch(*run);
        }
    }

    /// Reserves memory, and evicts runs if needed. Returns false, with nothing evicted, if there is not enough.
    pub(super) fn reserve(&mut self, runs: &RunTree, tokens: Tokens) -> bool {
        let mut free = self.capacity - self.used;
        let mut victims = Vec::new();
        if free < tokens {
            for run in self.cached.iter().filter(|run| self.pins[run.0 as usize] == 0) {
                victims.push(run);
                free += runs.device_size(run);
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

    fn evict(&mut self, runs: &RunTree, run: RunId) {
        let tokens = runs.device_size(run);
        self.cached.remove(run);
        self.record_change((run, false));
        self.used -= tokens;
        self.cached_tokens -= tokens;
        self.evicted += tokens;
        self.lower.offload(runs, run);
    }

    /// Releases reserved memory that was not filled.
    pub(super) fn unreserve(&mut self, tokens: Tokens) {
        self.used -= tokens;
    }

    /// Stores a run in reserved memory; returns false if it was cached in the meantime.
    pub(super) fn fill(&mut self, runs: &RunTree, run: RunId) -> bool {
        let is_new = !self.cached.has(run);
        if is_new {
            self.cached.touch(run);
            self.record_change((run, true));
            self.cached_tokens += runs.device_size(run);
        }
        is_new
    }

    pub(super) fn pin(&mut self, runs: &RunTree, path: &[RunId]) {
        for run in path {
            let pins = &mut self.pins[run.0 as usize];
            *pins += 1;
            if *pins == 1 {
                self.pinned += runs.device_size(*run);
            }
        }
    }

    pub(super) fn unpin(&mut self, runs: &RunTree, path: &[RunId]) {
        for run in path {
            let pins = &mut self.pins[run.0 as usize];
            *pins = pins.saturating_sub(1);
            if *pins == 0 {
                self.pinned -= runs.device_size(*run);
            }
        }
    }
}
