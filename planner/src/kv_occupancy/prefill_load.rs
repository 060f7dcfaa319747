//! Recent prefill load of a worker. A high load slows down running answers, and each prefill delays the next.

use serde::{Deserialize, Serialize};
use vocabulary::Micros;

/// Time constant of the exponential decay: long enough for a few answers, short enough for roles to follow the load.
const DECAY_TIME: Micros = Micros(30_000_000);

/// Decay within this time is ignored: it is 3%.
const MIN_DECAY_INTERVAL: Micros = Micros(1_000_000);

/// Recent prefill load of a worker.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct RecentPrefillLoad {
    /// Share of the worker's time that prefill takes, 0 to 1, rounded to millionths.
    pub utilization: f64,
    /// Prompts per second, rounded to millionths.
    pub prompts_per_second: f64,
}

impl RecentPrefillLoad {
    /// Returns whether there is no load.
    pub(super) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Exponentially decaying sums.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PrefillLoadAverage {
    /// Microseconds of prefill.
    work: f64,
    prompts: f64,
    last: Micros,
    /// Load right after the last prompt.
    load_after_last: RecentPrefillLoad,
}

impl PrefillLoadAverage {
    /// Adds a prompt that takes `work` microseconds to compute.
    pub(super) fn add(&mut self, work: Micros, now: Micros) {
        let decay = self.decay_factor(now);
        self.work = self.work * decay + work.min(DECAY_TIME).0 as f64;
        self.prompts = self.prompts * decay + 1.0;
        self.last = now;
        self.load_after_last = self.decayed(1.0);
    }

    /// Returns the load at a time. Every plan asks every worker, so a decay too short to matter is not computed.
    pub(super) fn load_at(&self, now: Micros) -> RecentPrefillLoad {
        if now - self.last < MIN_DECAY_INTERVAL { self.load_after_last } else { self.decayed(self.decay_factor(now)) }
    }

    fn decayed(&self, decay: f64) -> RecentPrefillLoad {
        let seconds = DECAY_TIME.0 as f64 / 1e6;
        // Rounded as the decision log stores them.
        let millionths = |value: f64| (value * 1e6).round() / 1e6;
        let share = millionths((self.work * decay / DECAY_TIME.0 as f64).min(1.0));
        RecentPrefillLoad { utilization: share, prompts_per_second: millionths(self.prompts * decay / seconds) }
    }

    fn decay_factor(&self, now: Micros) -> f64 {
        (-((now - self.last).0 as f64) / DECAY_TIME.0 as f64).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    /// Prompts of 0.5 s of compute each, one per second, until `end`.
    fn steady(end: u64) -> PrefillLoadAverage {
        let mut average = PrefillLoadAverage::default();
        (0..=end).for_each(|second| average.add(Micros(500_000), seconds(second)));
        average
    }

    #[test]
    fn steady_prefill_load_reports_its_share_and_rate() {
        let RecentPrefillLoad { utilization: share, prompts_per_second: rate } = steady(300).load_at(seconds(300));
        assert!((share - 0.5).abs() < 0.02 && (rate - 1.0).abs() < 0.03, "{share} {rate}");
    }

    #[test]
    fn prefill_load_decays_over_time() {
        let (before, after) = (steady(300).load_at(seconds(300)), steady(300).load_at(seconds(330)));
        assert!((after.utilization / before.utilization - 0.368).abs() < 0.001, "{after:?}");
        assert!(steady(300).load_at(seconds(3_000)).is_none());
        assert!(PrefillLoadAverage::default().load_at(seconds(1)).is_none());
    }

    #[test]
    fn prefill_load_share_is_capped_at_one() {
        let mut average = PrefillLoadAverage::default();
        (0..9).for_each(|_| average.add(Micros(u64::MAX), seconds(5)));
        assert_eq!(average.load_at(seconds(5)).utilization, 1.0);
        assert!(average.load_at(seconds(600)).utilization < 1e-4, "and even that is forgotten");
    }
}
