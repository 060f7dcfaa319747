//! What tries after the first may cost all requests together: workers that are sick are not asked ever more for it.
//!
//! A bucket of tokens, one a try. Each request puts a share of one into it, and time does, so that a router with few
//! requests is not left without any. Pure: time is an argument.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Deserialize;
use smart_default::SmartDefault;

use crate::pipeline::steering::Percent;

/// In how long an empty bucket is full again without any request.
const FULL_AFTER: Duration = Duration::from_secs(60);
/// Parts of a token.
const PARTS: u64 = 100;

/// Section `[retries]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Tries after the first, of all requests.
    #[default(Percent::try_from(20).expect("20 is one"))]
    pub percent: Percent,
    /// Tries beyond that, at once. A worker that dies with so many answers under way has all of them go on elsewhere.
    #[default(256)]
    pub burst: u32,
}

/// How many tries are left.
#[derive(Debug)]
pub struct RetryBudget {
    config: RetryConfig,
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct Bucket {
    parts: u64,
    filled: Instant,
}

impl RetryBudget {
    /// A full one.
    pub fn new(config: RetryConfig) -> Self {
        let bucket = Bucket { parts: u64::from(config.burst) * PARTS, filled: Instant::now() };
        Self { config, bucket: Mutex::new(bucket) }
    }

    fn most(&self) -> u64 {
        u64::from(self.config.burst) * PARTS
    }

    /// A request came.
    pub fn earn(&self) {
        let mut bucket = self.bucket.lock();
        bucket.parts = (bucket.parts + u64::from(u8::from(self.config.percent))).min(self.most());
    }

    /// Takes one try; false where none is left.
    pub fn spend(&self, now: Instant) -> bool {
        let mut bucket = self.bucket.lock();
        let passed = now.saturating_duration_since(bucket.filled);
        let earned = u128::from(self.most()) * passed.as_millis() / FULL_AFTER.as_millis();
        if earned > 0 {
            let earned = u64::try_from(earned).unwrap_or(u64::MAX);
            bucket.parts = bucket.parts.saturating_add(earned).min(self.most());
            bucket.filled = now;
        }
        let left = bucket.parts.checked_sub(PARTS);
        bucket.parts = left.unwrap_or(bucket.parts);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(percent: u8, burst: u32) -> (RetryBudget, Instant) {
        let budget = RetryBudget::new(RetryConfig { percent: Percent::try_from(i64::from(percent)).unwrap(), burst });
        let begun = budget.bucket.lock().filled;
        (budget, begun)
    }

    fn spent(budget: &RetryBudget, now: Instant) -> usize {
        (0..1000).take_while(|_| budget.spend(now)).count()
    }

    #[test]
    fn so_many_tries_are_there_at_once_and_then_a_share_of_all_requests() {
        let (budget, begun) = budget(20, 8);
        assert_eq!(spent(&budget, begun), 8);
        (0..25).for_each(|_| budget.earn());
        assert_eq!(spent(&budget, begun), 5);
        (0..1000).for_each(|_| budget.earn());
        assert_eq!(spent(&budget, begun), 8, "what nobody needs is not kept");
    }

    #[test]
    fn time_makes_good_what_was_spent() {
        let (budget, begun) = budget(0, 60);
        assert_eq!(spent(&budget, begun), 60);
        budget.earn();
        assert_eq!(spent(&budget, begun + Duration::from_millis(900)), 0);
        assert_eq!(spent(&budget, begun + Duration::from_secs(10)), 10);
        assert_eq!(spent(&budget, begun + Duration::from_secs(3600)), 60);
        assert_eq!(spent(&budget, begun), 0, "a clock that is behind gives nothing");
    }

    #[test]
    fn without_a_budget_nothing_is_tried_again() {
        let (budget, begun) = budget(100, 0);
        budget.earn();
        assert!(!budget.spend(begun));
    }
}
