//! The prompts that a worker was lately given to compute. Where many come answers are slow, and who computes one makes the
//! next ones wait.

use serde::{Deserialize, Serialize};
use vocabulary::Micros;

/// What was given longer ago than this counts e times less, and so on: long enough for a few answers, short enough that
/// roles follow the load.
const LATELY: Micros = Micros(30_000_000);

/// Within this time fading makes no difference: three in a hundred.
const STILL: Micros = Micros(1_000_000);

/// What comes to a worker to be computed.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug, Default)]
pub struct Inflow {
    /// Share of its time that prompts take, 0 to 1, in millionths.
    pub share: f64,
    /// Prompts a second, in millionths.
    pub rate: f64,
}

impl Inflow {
    /// Whether nothing comes.
    pub(super) fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Sums over the past that fade.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lately {
    /// Microseconds of computing.
    work: f64,
    prompts: f64,
    last: Micros,
    /// As it was after the last prompt.
    then: Inflow,
}

impl Lately {
    /// One more prompt, which takes so long to compute.
    pub(super) fn add(&mut self, work: Micros, now: Micros) {
        let left = self.left(now);
        self.work = self.work * left + work.min(LATELY).0 as f64;
        self.prompts = self.prompts * left + 1.0;
        self.last = now;
        self.then = self.after(1.0);
    }

    /// Every plan asks every worker, so that what makes no difference is not worked out.
    pub(super) fn inflow(&self, now: Micros) -> Inflow {
        if now - self.last < STILL { self.then } else { self.after(self.left(now)) }
    }

    fn after(&self, left: f64) -> Inflow {
        let seconds = LATELY.0 as f64 / 1e6;
        // As a decision log says them.
        let millionths = |value: f64| (value * 1e6).round() / 1e6;
        let share = millionths((self.work * left / LATELY.0 as f64).min(1.0));
        Inflow { share, rate: millionths(self.prompts * left / seconds) }
    }

    fn left(&self, now: Micros) -> f64 {
        (-((now - self.last).0 as f64) / LATELY.0 as f64).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Micros {
        Micros(seconds * 1_000_000)
    }

    /// Prompts of half a second's computing, one a second, until `end`.
    fn steady(end: u64) -> Lately {
        let mut lately = Lately::default();
        (0..=end).for_each(|second| lately.add(Micros(500_000), seconds(second)));
        lately
    }

    #[test]
    fn a_steady_flow_is_told_as_it_is() {
        let Inflow { share, rate } = steady(300).inflow(seconds(300));
        assert!((share - 0.5).abs() < 0.02 && (rate - 1.0).abs() < 0.03, "{share} {rate}");
    }

    #[test]
    fn what_was_given_long_ago_is_forgotten() {
        let (before, after) = (steady(300).inflow(seconds(300)), steady(300).inflow(seconds(330)));
        assert!((after.share / before.share - 0.368).abs() < 0.001, "{after:?}");
        assert!(steady(300).inflow(seconds(3_000)).is_none());
        assert!(Lately::default().inflow(seconds(1)).is_none());
    }

    #[test]
    fn no_prompt_takes_more_than_all_of_the_time() {
        let mut lately = Lately::default();
        (0..9).for_each(|_| lately.add(Micros(u64::MAX), seconds(5)));
        assert_eq!(lately.inflow(seconds(5)).share, 1.0);
        assert!(lately.inflow(seconds(600)).share < 1e-4, "and even that is forgotten");
    }
}
