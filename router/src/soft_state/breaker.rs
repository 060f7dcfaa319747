//! Whether Redis is asked at all. After a few failures in a row nobody waits for it until probes say that it is back.

use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr};

/// How Redis stands.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// It answers in time.
    Up,
    /// It takes longer than a request may wait.
    Slow,
    /// It cannot be reached, or answers with errors.
    Gone,
}

/// How a call failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Failure {
    /// No answer in time.
    Timeout,
    /// No connection, or an error in place of an answer.
    Error,
}

impl Failure {
    fn standing(self) -> Standing {
        match self {
            Self::Timeout => Standing::Slow,
            Self::Error => Standing::Gone,
        }
    }
}

/// Failures in a row after which nobody asks any more.
pub(super) const FAILURES: u32 = 3;
/// Probes in a row that must succeed before somebody asks again.
pub(super) const PROBES: u32 = 2;

/// Pure: told of every outcome, it says who may ask.
#[derive(Debug)]
pub(super) struct Breaker {
    standing: Standing,
    in_a_row: u32,
}

impl Breaker {
    /// Closed to requests until the first probes succeed.
    pub(super) fn new() -> Self {
        Self { standing: Standing::Gone, in_a_row: 0 }
    }

    pub(super) fn standing(&self) -> Standing {
        self.standing
    }

    /// A request was answered, or a probe. The new standing, if this changes it.
    pub(super) fn succeeded(&mut self, asked: Asked) -> Option<Standing> {
        match (self.standing, asked) {
            (Standing::Up, _) => self.in_a_row = 0,
            // A late answer to a request from before says nothing about now.
            (_, Asked::Request) => {}
            (_, Asked::Probe) => self.in_a_row += 1,
        }
        (self.standing != Standing::Up && self.in_a_row >= PROBES).then(|| self.becomes(Standing::Up))
    }

    /// A request or a probe failed. The new standing, if this changes it.
    pub(super) fn failed(&mut self, failure: Failure, asked: Asked) -> Option<Standing> {
        match (self.standing, asked) {
            (Standing::Up, _) => {
                self.in_a_row += 1;
                (self.in_a_row >= FAILURES).then(|| self.becomes(failure.standing()))
            }
            (_, Asked::Request) => None,
            (standing, Asked::Probe) => {
                self.in_a_row = 0;
                (standing != failure.standing()).then(|| self.becomes(failure.standing()))
            }
        }
    }

    fn becomes(&mut self, standing: Standing) -> Standing {
        self.standing = standing;
        self.in_a_row = 0;
        standing
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Asked {
    /// A request, or what follows from one.
    Request,
    /// The watch over Redis itself.
    Probe,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up() -> Breaker {
        let mut breaker = Breaker::new();
        while breaker.succeeded(Asked::Probe).is_none() {}
        assert_eq!(breaker.standing(), Standing::Up);
        breaker
    }

    #[test]
    fn it_opens_after_failures_in_a_row_and_says_once_how_redis_stands() {
        for (failure, standing) in [(Failure::Timeout, Standing::Slow), (Failure::Error, Standing::Gone)] {
            let mut breaker = up();
            assert_eq!(breaker.failed(failure, Asked::Request), None);
            assert_eq!(breaker.failed(failure, Asked::Request), None);
            assert_eq!(breaker.succeeded(Asked::Request), None);
            assert_eq!(breaker.failed(failure, Asked::Request), None, "an answer in between starts anew");
            assert_eq!(breaker.failed(failure, Asked::Probe), None);
            assert_eq!(breaker.failed(failure, Asked::Request), Some(standing));
            assert_eq!(breaker.failed(failure, Asked::Request), None, "those that were under way");
        }
    }

    #[test]
    fn only_probes_close_it_again_and_more_than_one() {
        let mut breaker = up();
        while breaker.failed(Failure::Timeout, Asked::Request).is_none() {}
        (0..9).for_each(|_| assert_eq!(breaker.succeeded(Asked::Request), None));
        assert_eq!(breaker.succeeded(Asked::Probe), None);
        assert_eq!(breaker.failed(Failure::Timeout, Asked::Probe), None);
        assert_eq!(breaker.succeeded(Asked::Probe), None);
        assert_eq!(breaker.succeeded(Asked::Probe), Some(Standing::Up));
    }

    #[test]
    fn slow_can_become_gone_and_the_other_way_round() {
        let mut breaker = Breaker::new();
        assert_eq!(breaker.failed(Failure::Error, Asked::Probe), None);
        assert_eq!(breaker.failed(Failure::Timeout, Asked::Probe), Some(Standing::Slow));
        assert_eq!(breaker.failed(Failure::Error, Asked::Probe), Some(Standing::Gone));
    }
}
