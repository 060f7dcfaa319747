//! Circuit breaker for Redis: after a few consecutive failures no request waits for it until probes succeed again.

use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr};

/// Health of Redis.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum SharedCacheHealth {
    /// It answers in time.
    Up,
    /// It takes longer than a request may wait.
    Slow,
    /// It cannot be reached, or answers with errors.
    Unreachable,
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
            Self::Error => SharedCacheHealth::Unreachable,
        }
    }
}

/// Consecutive failures that open the breaker.
pub(super) const FAILURES_TO_OPEN: u32 = 3;
/// Consecutive successful probes that close the breaker.
pub(super) const PROBES_TO_CLOSE: u32 = 2;

/// The breaker's state. Pure: it gets every outcome, and tells whether requests may call Redis.
#[derive(Debug)]
pub(super) struct CircuitBreaker {
    health: SharedCacheHealth,
    streak: u32,
}

impl CircuitBreaker {
    /// Returns an open breaker, which lets no request pass until the first probes succeed.
    pub(super) fn new() -> Self {
        Self { health: SharedCacheHealth::Unreachable, streak: 0 }
    }

    pub(super) fn health(&self) -> SharedCacheHealth {
        self.health
    }

    /// Records a successful request or probe. Returns the new health if it changed.
    pub(super) fn record_success(&mut self, purpose: CallPurpose) -> Option<SharedCacheHealth> {
        match (self.health, purpose) {
            (SharedCacheHealth::Up, _) => self.streak = 0,
            // A late answer to an earlier request says nothing about now.
            (_, CallPurpose::Request) => {}
            (_, CallPurpose::Probe) => self.streak += 1,
        }
        (self.health != SharedCacheHealth::Up && self.streak >= PROBES_TO_CLOSE)
            .then(|| self.transition(SharedCacheHealth::Up))
    }

    /// Records a failed request or probe. Returns the new health if it changed.
    pub(super) fn record_failure(&mut self, failure: RedisFailure, purpose: CallPurpose) -> Option<SharedCacheHealth> {
        match (self.health, purpose) {
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

    fn transition(&mut self, health: SharedCacheHealth) -> SharedCacheHealth {
        self.health = health;
        self.streak = 0;
        health
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CallPurpose {
    /// A client's request, or a write that results from one.
    Request,
    /// A health probe of Redis.
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
            [(RedisFailure::Timeout, SharedCacheHealth::Slow), (RedisFailure::Error, SharedCacheHealth::Unreachable)]
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
        assert_eq!(
            breaker.record_failure(RedisFailure::Error, CallPurpose::Probe),
            Some(SharedCacheHealth::Unreachable)
        );
    }
}
