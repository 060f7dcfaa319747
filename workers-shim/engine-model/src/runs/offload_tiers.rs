//! Tiers below device memory: evicted runs move to the next tier below, and are loaded when requested.

use vocabulary::Tokens;

use super::disk_tier::DiskTier;
use super::tier::LruTier;
use super::{DiskTraffic, MemorySizes, RunId, RunTree, Seconds};

/// The optional host tier and disk of one worker.
#[derive(Clone, Debug)]
pub(super) struct OffloadTiers {
    host: Option<LruTier>,
    host_tokens_per_second: f64,
    disk: Option<DiskTier>,
    now: Seconds,
}

/// The slowest tier involved in a load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SlowestTier {
    Host,
    Disk,
}

/// The amounts of a prompt to load from each tier, in token equivalents.
#[derive(Clone, Debug, Default)]
pub(super) struct LowerTierHit {
    pub(super) host: Tokens,
    pub(super) disk: Vec<(RunId, Tokens)>,
}

/// Seconds until loaded parts are available, including waiting.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct RestoreTime {
    /// Loading from the host tier.
    pub host: f64,
    /// Loading from disk, which follows.
    pub disk: f64,
}

impl RestoreTime {
    /// Returns the sum.
    pub fn total(&self) -> f64 {
        self.host + self.disk
    }
}

impl OffloadTiers {
    pub(super) fn new(sizes: &MemorySizes, runs: usize) -> Self {
        Self {
            host: LruTier::of(sizes.host, runs),
            host_tokens_per_second: sizes.host_tokens_per_second,
            disk: DiskTier::of(sizes, runs),
            now: Seconds::ZERO,
        }
    }

    pub(super) fn is_none(&self) -> bool {
        self.host.is_none() && self.disk.is_none()
    }

    pub(super) fn on_host(&self, run: RunId) -> bool {
        self.host.as_ref().is_some_and(|host| host.has(run))
    }

    pub(super) fn on_disk(&self, run: RunId) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.has(run))
    }

    /// Returns the traffic of the disk.
    pub(super) fn disk_use(&self) -> DiskTraffic {
        self.disk.as_ref().map(DiskTier::usage).unwrap_or_default()
    }

    /// Returns the seconds until a tier can start another load, and its seconds per token.
    pub(super) fn load_cost(&self, from: SlowestTier) -> (f64, f64) {
        match (from, &self.disk, &self.host) {
            (SlowestTier::Disk, Some(disk), _) => disk.load_cost(self.now),
            (_, _, Some(host)) => (host.wait(self.now), 1.0 / self.host_tokens_per_second),
            _ => (0.0, 0.0),
        }
    }

    /// Sets the current time.
    pub(super) fn advance_clock(&mut self, now: Seconds) {
        self.now = now;
    }

    /// Moves a run that was evicted from device memory to the next tier; runs that this evicts there move to the tier
    /// below.
    pub(super) fn offload(&mut self, runs: &RunTree, run: RunId) {
        let Self { host, disk, now, .. } = self;
        let mut fall = |run| disk.iter_mut().for_each(|disk| disk.write(runs, run, *now));
        let Some(host) = host else { return fall(run) };
        host.put(runs, run);
        while let Some(last) = host.evict_oldest(runs) {
            fall(last);
        }
    }

    /// Loads part of a prompt: first from the host tier, then from disk. Each waits for earlier loads from the same
    /// tier.
    pub(super) fn restore(&mut self, runs: &RunTree, below: &LowerTierHit) -> RestoreTime {
        let mut restoring = RestoreTime::default();
        if let Some(host) = self.host.as_mut().filter(|_| below.host > Tokens::ZERO) {
            restoring.host = host.schedule_move(self.now, below.host.0 as f64 / self.host_tokens_per_second);
        }
        if let Some(disk) = self.disk.as_mut().filter(|_| !below.disk.is_empty()) {
            restoring.disk = disk.read(runs, &below.disk, self.now + Seconds(restoring.host));
        }
        restoring
    }

    /// Returns the tokens in the host tier and on disk.
    #[cfg(test)]
    pub(super) fn used(&self) -> [Tokens; 2] {
        let used = |tier: Option<&LruTier>| tier.map(LruTier::used).unwrap_or_default();
        [used(self.host.as_ref()), used(self.disk.as_ref().map(DiskTier::tier))]
    }
}
