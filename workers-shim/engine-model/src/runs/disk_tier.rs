//! Disk tier below the host tier: runs evicted there are written to disk, unless they are already on it.

use vocabulary::Tokens;

use super::tier::LruTier;
use super::{DiskSpeed, DiskTraffic, MemorySizes, RunId, RunTree, Seconds};

/// In seconds. Writes that would start later are dropped, because their buffer is memory, too.
const MAX_WRITE_WAIT: f64 = 1.0;

/// One disk, with counters of its traffic.
#[derive(Clone, Debug)]
pub(super) struct DiskTier {
    tier: LruTier,
    speed: DiskSpeed,
    usage: DiskTraffic,
    writes_done: Seconds,
    /// Whether each run was read at least once.
    was_read: Vec<bool>,
}

impl DiskTier {
    /// Creates an empty disk, for runs with ids below `runs`; None if its capacity is 0.
    pub(super) fn of(sizes: &MemorySizes, runs: usize) -> Option<Self> {
        let tier = LruTier::of(sizes.disk, runs)?;
        Some(Self {
            tier,
            speed: sizes.disk_speed,
            usage: DiskTraffic::default(),
            writes_done: Seconds::ZERO,
            was_read: vec![false; runs],
        })
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.tier.has(run)
    }

    pub(super) fn usage(&self) -> DiskTraffic {
        self.usage
    }

    /// Stores a run evicted from the tier above. Reads have priority over writes.
    pub(super) fn write(&mut self, runs: &RunTree, run: RunId, now: Seconds) {
        let tokens = runs.lower_tier_size(run);
        if !self.has(run) {
            let begin = now.max(self.writes_done);
            if (begin - now).0 > MAX_WRITE_WAIT {
                self.usage.dropped += tokens;
                return;
            }
            self.usage.written += tokens;
            self.writes_done = begin + Seconds(tokens.0 as f64 / self.speed.write);
        }
        self.tier.put(runs, run);
        while self.tier.evict_oldest(runs).is_some() {}
    }

    /// Returns the seconds until it can start another read, and the seconds per token.
    pub(super) fn load_cost(&self, now: Seconds) -> (f64, f64) {
        (self.tier.wait(now), 1.0 / self.speed.read)
    }

    /// Reads the given amount of each run, which stays on disk. Returns the seconds from `from` until the data is
    /// available.
    pub(super) fn read(&mut self, runs: &RunTree, wanted: &[(RunId, Tokens)], from: Seconds) -> f64 {
        let mut tokens = Tokens::ZERO;
        for (run, amount) in wanted {
            tokens += *amount;
            if !std::mem::replace(&mut self.was_read[run.0 as usize], true) {
                self.usage.useful += *amount;
            }
        }
        // Refreshed from the end, as paths are evicted from their end. Runs evicted since the request are gone after
        // this read.
        for (run, _) in wanted.iter().rev() {
            if self.has(*run) {
                self.tier.put(runs, *run);
            }
        }
        self.usage.read += tokens;
        let lasts = tokens.0 as f64 / self.speed.read;
        self.writes_done = from.max(self.writes_done) + Seconds(lasts);
        self.tier.schedule_move(from, lasts)
    }

    #[cfg(test)]
    pub(super) fn tier(&self) -> &LruTier {
        &self.tier
    }
}
