//! The disk below the host tier: what is pushed out there is written here, unless it lies here already.

use vocabulary::Tokens;

use super::tier::LruTier;
use super::{DiskSpeed, DiskTraffic, MemorySizes, RunId, RunTree, Seconds};

/// Seconds. Writes that would begin later are not made: what they wait in is memory, too.
const MAX_WRITE_WAIT: f64 = 1.0;

/// One disk, with a count of what goes there and comes back.
#[derive(Clone, Debug)]
pub(super) struct DiskTier {
    tier: LruTier,
    speed: DiskSpeed,
    usage: DiskTraffic,
    writes_done: Seconds,
    /// Runs that were read at least once.
    was_read: Vec<bool>,
}

impl DiskTier {
    /// An empty one, for runs below `runs`; none without room.
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

    /// A run comes down from the tier above. Reads go before writes, which have the time that is left.
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

    /// Seconds until it can read something else, and of a token's worth.
    pub(super) fn load_cost(&self, now: Seconds) -> (f64, f64) {
        (self.tier.wait(now), 1.0 / self.speed.read)
    }

    /// So much of each of these runs is read, and stays: seconds from `from` until it is there.
    pub(super) fn read(&mut self, runs: &RunTree, wanted: &[(RunId, Tokens)], from: Seconds) -> f64 {
        let mut tokens = Tokens::ZERO;
        for (run, amount) in wanted {
            tokens += *amount;
            if !std::mem::replace(&mut self.was_read[run.0 as usize], true) {
                self.usage.useful += *amount;
            }
        }
        // A path is pushed out from its end; what was pushed out since it was asked for is gone once it is read.
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
