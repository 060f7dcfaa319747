//! The disk below the host tier: what is pushed out there is written here, unless it lies here already.

use vocabulary::Tokens;

use super::tier::Tier;
use super::{DiskSpeed, DiskUse, RunId, Runs, Seconds, Sizes};

/// Seconds. Writes that would begin later are not made: what they wait in is memory, too.
const LONGEST_WAIT: f64 = 1.0;

/// One disk, with a count of what goes there and comes back.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    tier: Tier,
    speed: DiskSpeed,
    usage: DiskUse,
    written: Seconds,
    /// Runs that were read at least once.
    read: Vec<bool>,
}

impl Disk {
    /// An empty one, for runs below `runs`; none without room.
    pub(super) fn of(sizes: &Sizes, runs: usize) -> Option<Self> {
        let tier = Tier::of(sizes.disk, runs)?;
        Some(Self {
            tier,
            speed: sizes.disk_speed,
            usage: DiskUse::default(),
            written: Seconds::ZERO,
            read: vec![false; runs],
        })
    }

    pub(super) fn has(&self, run: RunId) -> bool {
        self.tier.has(run)
    }

    pub(super) fn usage(&self) -> DiskUse {
        self.usage
    }

    /// A run comes down from the tier above. Reads go before writes, which have the time that is left.
    pub(super) fn write(&mut self, runs: &Runs, run: RunId, now: Seconds) {
        let tokens = runs.stored(run);
        if !self.has(run) {
            let begin = now.max(self.written);
            if (begin - now).0 > LONGEST_WAIT {
                self.usage.dropped += tokens;
                return;
            }
            self.usage.written += tokens;
            self.written = begin + Seconds(tokens.0 as f64 / self.speed.written);
        }
        self.tier.put(runs, run);
        while self.tier.push_out(runs).is_some() {}
    }

    /// Seconds until it can read something else, and of a token's worth.
    pub(super) fn price(&self, now: Seconds) -> (f64, f64) {
        (self.tier.wait(now), 1.0 / self.speed.read)
    }

    /// So much of each of these runs is read, and stays: seconds from `from` until it is there.
    pub(super) fn read(&mut self, runs: &Runs, wanted: &[(RunId, Tokens)], from: Seconds) -> f64 {
        let mut tokens = Tokens::ZERO;
        for (run, amount) in wanted {
            tokens += *amount;
            if !std::mem::replace(&mut self.read[run.0 as usize], true) {
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
        self.written = from.max(self.written) + Seconds(lasts);
        self.tier.moves(from, lasts)
    }

    #[cfg(test)]
    pub(super) fn tier(&self) -> &Tier {
        &self.tier
    }
}
