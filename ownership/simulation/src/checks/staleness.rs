//! A claimed staleness is true: the view contains everything that was acknowledged on any node that long ago.

use std::time::Duration;

use crate::ensure;
use crate::property::PropertyResult;

const BOUNDED: &str = "a bounded read is no older than its bound";
const STATED: &str = "a stated staleness is true";

/// Claim about a view.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StalenessClaim {
    /// A read that asked for this bound.
    BoundedRead(Duration),
    /// The view is at most this old.
    StatedStaleness(Duration),
}

/// Highest acknowledged index by time.
#[derive(Debug, Default)]
pub(crate) struct AcknowledgedIndexes(Vec<(Duration, u64)>);

impl AcknowledgedIndexes {
    /// Called when a client is told that this entry is applied.
    pub(crate) fn add(&mut self, now: Duration, index: u64) {
        if index > self.last() {
            self.0.push((now, index));
        }
    }

    pub(crate) fn last(&self) -> u64 {
        self.0.last().map_or(0, |(_, index)| *index)
    }

    fn last_before(&self, time: Duration) -> u64 {
        let known = self.0.partition_point(|(at, _)| *at < time);
        known.checked_sub(1).and_then(|last| self.0.get(last)).map_or(0, |(_, index)| *index)
    }

    /// Checks a claim, made at `since`, about a view that shows `applied`. Clocks drift by at most 2 %.
    pub(crate) fn check(&self, node: u64, (claim, since): (StalenessClaim, Duration), applied: u64) -> PropertyResult {
        let (check, span) = match claim {
            StalenessClaim::BoundedRead(bound) => (BOUNDED, bound),
            StalenessClaim::StatedStaleness(age) => (STATED, age),
        };
        let due = self.last_before(since.saturating_sub(span.mul_f64(1.03)));
        ensure!(due <= applied, check, "node {node} shows {applied}, and {claim:?} before {since:?} {due} was there")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_view_must_contain_everything_acknowledged_before_its_bound() {
        let second = Duration::from_secs;
        let mut acknowledged = AcknowledgedIndexes::default();
        [(1, 10), (2, 20), (2, 15), (3, 30)].into_iter().for_each(|(at, index)| acknowledged.add(second(at), index));
        assert_eq!(acknowledged.last(), 30);
        for claim in [StalenessClaim::BoundedRead(second(1)), StalenessClaim::StatedStaleness(second(1))] {
            assert_eq!(acknowledged.check(1, (claim, second(3)), 10), Ok(()));
            assert!(acknowledged.check(1, (claim, second(4)), 19).is_err());
            assert_eq!(acknowledged.check(1, (claim, second(4)), 20), Ok(()));
        }
        assert!(acknowledged.check(1, (StalenessClaim::BoundedRead(Duration::ZERO), second(4)), 29).is_err());
    }
}
