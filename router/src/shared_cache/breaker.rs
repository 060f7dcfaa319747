//! Whether Redis is asked at all. After a few failures in a row nobody waits for it until probes say that it is back.

use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr};

/// How Redis stands.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum SharedCacheHealth {
    /// It answers in time.
    Up,
    /// It takes longer than a request may wait.
    Slow,
    /// It cannot be reached, or answers with errors.
    Gone,
}

/// How a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RedisFailure {
    /// No answer in time.
    Timeout,
    /// No connection, or an error in place of an answer.
    Error,
}

impl RedisFailure {
    fn health(self) -> SharedCacheHealth {
        match self {
            Self::Timeout => SharedCacheHealth::Slow,
            Self::Error => SharedCacheHealth::Gone,
        }
    }
}

/// Failures in a row after which nobody asks any more.
pub(super) const FAILURES_TO_OPEN: u32 = 3;
/// Probes in a row that must succeed before somebody asks again.
pub(super) const PROBES_TO_CLOSE: u32 = 2;

/// Pure: told of every outcome, it says who may ask.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    health: SharedCacheHealth,
    streak: u32,
}

impl CircuitBreaker {
    /// Closed to requests until the first probes succeed.
    pub(super) fn new() -> Self {
        Self { health: SharedCacheHealth::Gone, streak: 0 }
    }

    pub(super) fn health(&self) -> SharedCacheHealth {
        self.health
    }

    /// A request was answered, or a probe. The new standing, if this changes it.
    pub(super) fn record_success(&mut self, asked: CallPurpose) -> Option<SharedCacheHealth> {
        match (self.health, asked) {
            (SharedCacheHealth::Up, _) => self.streak = 0,
            // A late answer to a request from before says nothing about now.
            (_, CallPurpose::Request) => {}
            (_, CallPurpose::Probe) => self.streak += 1,
        }
        (self.health != SharedCacheHealth::Up && self.streak >= PROBES_TO_CLOSE)
            .then(|| self.transition(SharedCacheHealth::Up))
    }

    /// A request or a probe failed. The new standing, if this changes it.
    pub(super) fn record_failure(&mut self, failure: RedisFailure, asked: CallPurpose) -> Option<SharedCacheHealth> {
        match (self.health, asked) {
            (SharedCacheHealth::Up, _) => {
                self.streak += 1;
                (self.streak >= FAILURES_TO_OPEN).then(|| self.transition(failure.health()))
            }
            (_, CallPurpose::Request) => None,
            (standing, CallPurpose::Probe) => {
                self.streak = 0;
                (standing != failure.health()).then(|| self.transition(failure.health()))
            }
        }
    }

    fn transition(&mut self, standing: SharedCacheHealth) -> SharedCacheHealth {
        self.health = standing;
        self.streak = 0;
        standing
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallPurpose {
    /// A request, or what follows from one.
    Request,
    /// The watch over Redis itself.
    Probe,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closed_breaker() -> CircuitBreaker {
        let mut breaker = CircuitBreaker::new();
        while breaker.record_success(CallPurpose::Probe).is_none() {}
        assert_eq!(breaker.health(), SharedCacheHealth::Up);
        breaker
    }

    #[test]
    fn the_breaker_opens_after_consecutive_failures_and_reports_once() {
        for (failure, standing) in
            [(RedisFailure::Timeout, SharedCacheHealth::Slow), (RedisFailure::Error, SharedCacheHealth::Gone)]
        {
            let mut breaker = closed_breaker();
            assert_eq!(breaker.record_failure(failure, CallPurpose::Request), None);
            assert_eq!(breaker.record_failure(failure, CallPurpose::Request), None);
            assert_eq!(breaker.record_success(CallPurpose::Request), None);
            assert_eq!(breaker.record_failure(failure, CallPurpose::Request), None, "an answer in between starts anew");
            assert_eq!(breaker.record_failure(failure, CallPurpose::Probe), None);
            assert_eq!(breaker.record_failure(failure, CallPurpose::Request), Some(standing));
            assert_eq!(breaker.record_failure(failure, CallPurpose::Request), None, "those that were under way");
        }
    }

    #[test]
    fn the_breaker_closes_only_after_several_successful_probes() {
        let mut breaker = closed_breaker();
        while breaker.record_failure(RedisFailure::Timeout, CallPurpose::Request).is_none() {}
        (0..9).for_each(|_| assert_eq!(breaker.record_success(CallPurpose::Request), None));
        assert_eq!(breaker.record_success(CallPurpose::Probe), None);
        assert_eq!(breaker.record_failure(RedisFailure::Timeout, CallPurpose::Probe), None);
        assert_eq!(breaker.record_success(CallPurpose::Probe), None);
        assert_eq!(breaker.record_success(CallPurpose::Probe), Some(SharedCacheHealth::Up));
    }

    #[test]
    fn health_moves_between_slow_and_down() {
        let mut breaker = CircuitBreaker::new();
        assert_eq!(breaker.record_failure(RedisFailure::Error, CallPurpose::Probe), None);
        assert_eq!(breaker.record_failure(RedisFailure::Timeout, CallPurpose::Probe), Some(SharedCacheHealth::Slow));
        assert_eq!(breaker.record_failure(RedisFailure::Error, CallPurpose::Probe), Some(SharedCacheHealth::Gone));
    }
}
