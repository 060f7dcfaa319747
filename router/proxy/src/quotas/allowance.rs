//! What a tenant may still use of one unit, as counted by this router. Pure: time is an argument.

use std::time::{Duration, Instant};

const MINUTE: f64 = 60.0;
/// Routers lease 1/50 of a minute's quota ahead of need. Leased units are not available to the other routers.
const LEASE_DIVISOR: u64 = 50;

/// How the allowance is refilled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RefillSource {
    /// It refills locally; the quota is divided among this number of routers.
    Share(u32),
    /// It is leased from the count that all routers share.
    Leased,
}

/// A token bucket that holds one minute's quota.
#[derive(Debug)]
pub(crate) struct Allowance {
    per_minute: u64,
    supply: RefillSource,
    level: f64,
    updated_at: Instant,
    /// What was left for all routers at the last lease.
    shared_left: f64,
}

/// The units that a request lacks, and the time until they are available.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct QuotaShortfall {
    pub(crate) missing: u64,
    pub(crate) retry_after: Duration,
}

impl Allowance {
    /// Returns an allowance: empty if it is leased, else full.
    pub(crate) fn new(per_minute: u64, source: RefillSource, now: Instant) -> Self {
        let level = if source == RefillSource::Leased { 0.0 } else { per_minute as f64 };
        Self { per_minute, supply: source, level, updated_at: now, shared_left: per_minute as f64 }
    }

    pub(crate) fn per_minute(&self) -> u64 {
        self.per_minute
    }

    /// Advances the clock, refills, and switches the refill source.
    pub(crate) fn advance(&mut self, now: Instant, source: RefillSource) {
        let passed = now.saturating_duration_since(self.updated_at).as_secs_f64();
        self.updated_at = now;
        match source {
            RefillSource::Share(routers) => {
                if self.supply == RefillSource::Leased {
                    // Each router continues with its part of what all had left.
                    self.level += self.shared_left / f64::from(routers.max(1));
                }
                let full = full(self.per_minute, source);
                self.level = (self.level + passed * full / MINUTE).min(full);
            }
            // What accumulated without the shared count must be given up.
            RefillSource::Leased if self.supply != source => self.level = self.level.min(self.chunk() as f64),
            RefillSource::Leased => {}
        }
        self.supply = source;
    }

    /// Takes `cost`. A cost above a whole minute's quota needs a full bucket, and leaves a debt.
    pub(crate) fn take(&mut self, cost: u64) -> Result<(), QuotaShortfall> {
        let need = (cost as f64).min(full(self.per_minute, self.supply));
        if self.level >= need {
            self.level -= cost as f64;
            return Ok(());
        }
        let missing = need - self.level;
        let known = if self.supply == RefillSource::Leased { self.shared_left } else { 0.0 };
        let seconds = (missing - known).max(0.0) * MINUTE / full(self.per_minute, self.supply);
        Err(QuotaShortfall {
            missing: missing.ceil() as u64,
            retry_after: Duration::from_secs_f64(seconds.min(24.0 * 3600.0)),
        })
    }

    /// Replaces the `taken` units of a request by the `used` ones.
    pub(crate) fn settle(&mut self, taken: u64, used: u64) {
        self.level += taken as f64 - used as f64;
        if let RefillSource::Share(_) = self.supply {
            self.level = self.level.min(full(self.per_minute, self.supply));
        }
    }

    /// Applies a lease: this router gets `units` more (fewer if negative), and `left` are left for all.
    pub(crate) fn apply_lease(&mut self, units: i64, left: u64) {
        self.level += units as f64;
        self.shared_left = left as f64;
    }

    /// Returns the units to lease ahead of need, or to return if negative; zero if nothing needs to change.
    pub(crate) fn lease_change(&self) -> i64 {
        let chunk = self.chunk() as f64;
        if self.supply != RefillSource::Leased || (self.level >= chunk / 2.0 && self.level <= 4.0 * chunk.max(1.0)) {
            return 0;
        }
        match (chunk - self.level).trunc() as i64 {
            // Small quotas are leased one unit at a time, on demand.
            ahead if ahead > 0 && chunk < 1.0 && self.level >= 0.0 => 0,
            wanted => wanted,
        }
    }

    /// Returns the units to lease for a request that falls short: what it lacks, and some for the next one.
    pub(crate) fn lease_for(&self, short: QuotaShortfall) -> i64 {
        i64::try_from(short.missing.saturating_add(self.chunk())).unwrap_or(i64::MAX)
    }

    /// Returns the units that a client can count on, and the time until the quota is full again.
    pub(crate) fn remaining(&self) -> (u64, Duration) {
        let full = full(self.per_minute, self.supply);
        let level = if self.supply == RefillSource::Leased { self.level + self.shared_left } else { self.level };
        let remaining = level.clamp(0.0, full);
        (remaining as u64, Duration::from_secs_f64((full - level.min(full)) * MINUTE / full))
    }

    fn chunk(&self) -> u64 {
        self.per_minute / LEASE_DIVISOR
    }
}

fn full(per_minute: u64, source: RefillSource) -> f64 {
    match source {
        RefillSource::Leased => per_minute as f64,
        RefillSource::Share(routers) => (per_minute as f64 / f64::from(routers.max(1))).max(1.0),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALONE: RefillSource = RefillSource::Share(1);

    fn seconds(count: f64) -> Duration {
        Duration::from_secs_f64(count)
    }

    #[test]
    fn a_used_up_quota_refills_over_time() {
        let start = Instant::now();
        let mut allowance = Allowance::new(60, ALONE, start);
        (0..60).for_each(|_| allowance.take(1).unwrap());
        assert_eq!(allowance.take(1), Err(QuotaShortfall { missing: 1, retry_after: seconds(1.0) }));
        assert_eq!(allowance.remaining(), (0, seconds(60.0)));
        allowance.advance(start + seconds(2.5), ALONE);
        assert_eq!(
            [allowance.take(1).is_ok(), allowance.take(1).is_ok(), allowance.take(1).is_ok()],
            [true, true, false]
        );
        allowance.advance(start + seconds(3600.0), ALONE);
        assert_eq!(allowance.remaining(), (60, seconds(0.0)), "never more than a minute's");
    }

    #[test]
    fn a_cost_above_a_minutes_quota_is_served_and_owed() {
        let start = Instant::now();
        let mut allowance = Allowance::new(100, ALONE, start);
        allowance.take(300).unwrap();
        assert_eq!(allowance.take(10).unwrap_err().retry_after, seconds(126.0));
        allowance.advance(start + seconds(126.0), ALONE);
        allowance.take(10).unwrap();
    }

    #[test]
    fn a_share_is_a_fraction_of_the_quota() {
        let start = Instant::now();
        let mut allowance = Allowance::new(60, RefillSource::Leased, start);
        allowance.apply_lease(2, 30);
        allowance.advance(start, RefillSource::Share(3));
        assert_eq!((0..60).filter(|_| allowance.take(1).is_ok()).count(), 12, "leased, and a third of what was left");
        allowance.advance(start + seconds(600.0), RefillSource::Share(3));
        assert_eq!((0..60).filter(|_| allowance.take(1).is_ok()).count(), 20);
    }

    #[test]
    fn large_quotas_are_leased_ahead_and_small_ones_are_not() {
        let start = Instant::now();
        let mut large = Allowance::new(5000, RefillSource::Leased, start);
        assert_eq!(large.lease_change(), 100);
        large.apply_lease(100, 4000);
        assert_eq!(large.lease_change(), 0);
        large.settle(1000, 0);
        assert_eq!(large.lease_change(), -1000);
        let mut small = Allowance::new(10, RefillSource::Leased, start);
        assert_eq!(small.lease_change(), 0);
        let short = small.take(1).unwrap_err();
        assert_eq!((small.lease_for(short), short.retry_after), (1, seconds(0.0)));
        small.apply_lease(0, 0);
        assert_eq!(small.take(1).unwrap_err().retry_after, seconds(6.0));
    }

    #[test]
    fn refill_accrued_while_unshared_is_dropped_when_leases_resume() {
        let start = Instant::now();
        let mut allowance = Allowance::new(600, RefillSource::Share(2), start);
        allowance.advance(start + seconds(60.0), RefillSource::Share(2));
        allowance.advance(start + seconds(60.0), RefillSource::Leased);
        assert_eq!((0..600).filter(|_| allowance.take(1).is_ok()).count(), 12);
    }

    proptest! {
        #[test]
        fn total_use_never_exceeds_quota_plus_refill(
            per_minute in 1u64..1000, steps in prop::collection::vec((0u64..3000, 0u64..50), 1..80),
        ) {
            let start = Instant::now();
            let (mut now, mut taken, mut largest) = (start, 0, 0);
            let mut allowance = Allowance::new(per_minute, ALONE, start);
            for (millis, cost) in steps {
                now += Duration::from_millis(millis);
                allowance.advance(now, ALONE);
                // Costs above the quota leave a debt that is paid off first.
                largest = largest.max(cost);
                taken += if allowance.take(cost).is_ok() { cost } else { 0 };
                let most = per_minute as f64 * (1.0 + (now - start).as_secs_f64() / 60.0) + largest as f64;
                prop_assert!(taken as f64 <= most + 1e-6, "{} of {}", taken, most);
            }
        }
    }
}
