//! Retry budget: limits what retries may cost all requests together, so that sick workers do not cause ever more load.
//!
//! A token bucket, with one token per retry. Each request adds a fraction of a token, and so does time, so that a
//! router with few requests can still retry. Pure: time is an argument.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::TenantId;

use crate::routing::Percent;

/// Time in which an empty bucket refills without any request.
const REFILL_TIME: Duration = Duration::from_secs(60);
/// Fractions per token.
const PARTS_PER_TOKEN: u64 = 100;

/// Section `[retries]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct RetryBudgetConfig {
    /// Retries as a percentage of all requests.
    #[default(Percent::try_from(20).expect("20 is one"))]
    pub budget_percent: Percent,
    /// Retries beyond that, as a burst. When a worker dies, up to this many of its running answers resume at other
    /// workers.
    #[default(256)]
    pub burst: u32,
}

/// The retry budget of a router.
#[derive(Debug)]
pub struct RetryBudget {
    config: RetryBudgetConfig,
    /// Share of the budget that one tenant may take.
    share: TenantShare,
    buckets: Mutex<RetryBuckets>,
}

/// Share of the budget that one tenant gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TenantShare {
    /// All of it: there is one tenant.
    All,
    /// Half of it: there are several tenants.
    Half,
}

#[derive(Debug)]
struct RetryBuckets {
    all: RetryBucket,
    /// Buckets of tenants that have retried, until they are full again.
    tenants: HashMap<TenantId, RetryBucket>,
}

#[derive(Debug)]
struct RetryBucket {
    parts: u64,
    max: u64,
    filled: Instant,
}

impl RetryBucket {
    fn full(max: u64, now: Instant) -> Self {
        Self { parts: max, max, filled: now }
    }

    fn earn(&mut self, parts: u64) {
        self.parts = (self.parts + parts).min(self.max);
    }

    /// Adds what has accumulated over time.
    fn advance(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.filled);
        let earned = u128::from(self.max) * passed.as_millis() / REFILL_TIME.as_millis();
        if earned > 0 {
            let earned = u64::try_from(earned).unwrap_or(u64::MAX);
            self.parts = self.parts.saturating_add(earned).min(self.max);
            self.filled = now;
        }
    }
}

impl RetryBudget {
    /// Returns a full budget.
    pub fn new(config: RetryBudgetConfig, share: TenantShare) -> Self {
        let all = RetryBucket::full(u64::from(config.burst) * PARTS_PER_TOKEN, Instant::now());
        Self { config, share, buckets: Mutex::new(RetryBuckets { all, tenants: HashMap::new() }) }
    }

    /// Adds a request's fraction of a token.
    pub fn earn(&self, tenant: &TenantId) {
        let parts = u64::from(u8::from(self.config.budget_percent));
        let mut buckets = self.buckets.lock();
        buckets.all.earn(parts);
        if let Some(bucket) = buckets.tenants.get_mut(tenant) {
            bucket.earn(parts);
        }
    }

    /// Takes one retry of this tenant; false where none is left, for it or for all.
    pub fn spend(&self, tenant: &TenantId, now: Instant) -> bool {
        let mut buckets = self.buckets.lock();
        let RetryBuckets { all, tenants } = &mut *buckets;
        all.advance(now);
        if self.share == TenantShare::All {
            return all.spend();
        }
        let most = (all.max / 2 / PARTS_PER_TOKEN).max(1) * PARTS_PER_TOKEN;
        tenants.retain(|_, bucket| {
            bucket.advance(now);
            bucket.parts < bucket.max
        });
        let bucket = tenants.entry(tenant.clone()).or_insert_with(|| RetryBucket::full(most, now));
        bucket.parts >= PARTS_PER_TOKEN && all.spend() && bucket.spend()
    }
}

impl RetryBucket {
    fn spend(&mut self) -> bool {
        let left = self.parts.checked_sub(PARTS_PER_TOKEN);
        self.parts = left.unwrap_or(self.parts);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(percent: u8, burst: u32) -> (RetryBudget, Instant) {
        let config = RetryBudgetConfig { budget_percent: Percent::try_from(i64::from(percent)).unwrap(), burst };
        let budget = RetryBudget::new(config, TenantShare::All);
        let begun = budget.buckets.lock().all.filled;
        (budget, begun)
    }

    fn spend_count(budget: &RetryBudget, now: Instant) -> usize {
        (0..1000).take_while(|_| budget.spend(&TenantId::default(), now)).count()
    }

    #[test]
    fn retries_are_limited_to_a_burst_plus_a_share_of_requests() {
        let (budget, begun) = budget(20, 8);
        assert_eq!(spend_count(&budget, begun), 8);
        (0..25).for_each(|_| budget.earn(&TenantId::default()));
        assert_eq!(spend_count(&budget, begun), 5);
        (0..1000).for_each(|_| budget.earn(&TenantId::default()));
        assert_eq!(spend_count(&budget, begun), 8, "what nobody needs is not kept");
    }

    #[test]
    fn the_retry_budget_refills_over_time() {
        let (budget, begun) = budget(0, 60);
        assert_eq!(spend_count(&budget, begun), 60);
        budget.earn(&TenantId::default());
        assert_eq!(spend_count(&budget, begun + Duration::from_millis(900)), 0);
        assert_eq!(spend_count(&budget, begun + Duration::from_secs(10)), 10);
        assert_eq!(spend_count(&budget, begun + Duration::from_secs(3600)), 60);
        assert_eq!(spend_count(&budget, begun), 0, "a clock that is behind gives nothing");
    }

    #[test]
    fn a_zero_budget_allows_no_retry() {
        let (budget, begun) = budget(100, 0);
        budget.earn(&TenantId::default());
        assert!(!budget.spend(&TenantId::default(), begun));
    }

    #[test]
    fn one_tenants_failures_leave_half_of_the_budget_to_others() {
        let config = RetryBudgetConfig { budget_percent: Percent::try_from(0).unwrap(), burst: 8 };
        let budget = RetryBudget::new(config, TenantShare::Half);
        let begun = budget.buckets.lock().all.filled;
        let spent = |name: &str, now| (0..100).take_while(|_| budget.spend(&TenantId(name.into()), now)).count();
        assert_eq!((spent("a", begun), spent("a", begun)), (4, 0));
        assert_eq!(spent("b", begun), 4);
        assert_eq!(spent("c", begun), 0, "all of them are gone");
        let later = begun + REFILL_TIME;
        assert_eq!(spent("c", later), 4);
        assert!(budget.buckets.lock().tenants.len() <= 1, "who has a full share is not remembered");
    }
}
