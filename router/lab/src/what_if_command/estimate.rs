//! How sure a mean over steps is, when the steps of one session resemble each other.

use std::collections::BTreeMap;

use serde::Serialize;
use simulator::report::{self, student_t};
use vocabulary::SessionId;

/// A mean per step with its 95 % confidence interval.
#[derive(Clone, Copy, PartialEq, Serialize, Debug)]
pub(super) struct MeanEstimate {
    pub(super) mean: f64,
    /// How far the interval goes to either side; none with fewer than two sessions.
    pub(super) within: Option<f64>,
}

/// Sums by session: the unit that is independent of the others.
#[derive(Debug, Default)]
pub(super) struct SessionSums(BTreeMap<SessionId, (f64, f64)>);

impl SessionSums {
    /// One more step of a session.
    pub(super) fn add(&mut self, session: SessionId, value: f64) {
        let (sum, steps) = self.0.entry(session).or_default();
        (*sum, *steps) = (*sum + value, *steps + 1.0);
    }

    pub(super) fn sessions(&self) -> usize {
        self.0.len()
    }

    /// The mean per step; none without one. Its interval is that of a ratio estimator over clusters (Cochran, Sampling
    /// Techniques, section 9A), with Student's t.
    pub(super) fn estimate(&self) -> Option<MeanEstimate> {
        let clusters = self.0.len() as f64;
        let (sum, steps) = self.0.values().fold((0.0, 0.0), |(sum, steps), (s, n)| (sum + s, steps + n));
        (steps > 0.0).then(|| {
            let mean = sum / steps;
            let squares: f64 = self.0.values().map(|(sum, n)| (sum - mean * n).powi(2)).sum();
            let within = || (squares * clusters / (clusters - 1.0)).sqrt() / steps * student_t(self.0.len() - 1);
            MeanEstimate { mean, within: (self.0.len() > 1).then(within) }
        })
    }
}

/// Returns a percentile, as simulation reports define it; `None` without values. Sorts the values.
pub(super) fn percentile(values: &mut [f64], share: f64) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    (!values.is_empty()).then(|| report::percentile(values, share))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(values: &[(u128, f64)]) -> SessionSums {
        let mut all = SessionSums::default();
        values.iter().for_each(|(session, value)| all.add(SessionId(*session), *value));
        all
    }

    #[test]
    fn single_session_gives_no_interval() {
        assert_eq!(of(&[]).estimate(), None);
        assert_eq!(of(&[(1, 2.0), (1, 4.0)]).estimate(), Some(MeanEstimate { mean: 3.0, within: None }));
    }

    #[test]
    fn interval_of_one_step_per_session_is_students_t() {
        // Mean 3, standard deviation 1.5811, four degrees of freedom.
        let got = of(&[(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]).estimate().unwrap();
        assert_eq!(got.mean, 3.0);
        assert!((got.within.unwrap() - 2.776 * 1.5811 / 5f64.sqrt()).abs() < 1e-3, "{got:?}");
    }

    #[test]
    fn repeated_steps_within_a_session_do_not_narrow_the_interval() {
        let once = of(&[(1, 1.0), (2, 2.0), (3, 6.0)]).estimate().unwrap();
        let often: Vec<_> = [(1, 1.0), (2, 2.0), (3, 6.0)].into_iter().flat_map(|pair| [pair; 50]).collect();
        let often = of(&often).estimate().unwrap();
        assert!((once.within.unwrap() - often.within.unwrap()).abs() < 1e-9, "{once:?} {often:?}");
    }

    #[test]
    fn percentile_is_one_of_the_values() {
        let mut values = [5.0, 1.0, 3.0, 2.0, 4.0];
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|share| percentile(&mut values, share)),
            [Some(1.0), Some(3.0), Some(5.0), Some(5.0)]
        );
        assert_eq!(percentile(&mut [], 0.5), None);
    }
}
