//! Calibration: checks whether first tokens come when prices predict them, with a control chart per worker, so that a
//! worker with wrong prices or a slowdown is noticed.
//!
//! A sample is `x = ln((observed + 50 ms) / (predicted + 50 ms))` of a step that one worker served alone; the 50 ms
//! keep negligible differences from counting. The chart has two cumulative sums (E. S. Page, Continuous inspection
//! schemes, 1954) of x over its usual spread, which counts as at most 4:
//!
//! ```text
//! late  <- max(0, late  + x / spread - 1/2)        at most 16
//! early <- max(0, early - x / spread - 1/2)        at most 16
//! ```
//!
//! Above 8 the worker's prices have drifted, until the sum is back at 0. Prices that are right on average reach 8 once
//! in some 19,000 steps; a worker that takes three times as long reaches it within 20.

use std::collections::HashMap;

use parking_lot::Mutex;
use serde::Serialize;
use strum::AsRefStr;
use utoipa::ToSchema;
use vocabulary::{Incarnation, Micros, WorkerId};

/// Negligible difference, in microseconds.
const NEGLIGIBLE_MICROS: f64 = 50_000.0;
/// Bound for a sample: at most this many times the price, or the price divided by it.
const MAX_RATIO: f64 = 16.0;
/// Weight of a sample in level and spread.
const SAMPLE_WEIGHT: f64 = 0.05;
/// Minimum spread between steps: the queue that the step finds at the engine is not predicted.
const MIN_SPREAD: f64 = 0.3;
/// Sum at which prices have drifted, and the maximum of a sum.
const DRIFT_THRESHOLD: f64 = 8.0;
const MAX_SUM: f64 = 2.0 * DRIFT_THRESHOLD;
/// Maximum of a sample in spreads, since a single step proves nothing.
const MAX_SAMPLE_SPREADS: f64 = 4.0;

/// How prices are off.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, ToSchema, Debug, AsRefStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum DriftDirection {
    /// First tokens come later than predicted.
    Slower,
    /// They come earlier.
    Faster,
}

/// How well the time to first token of one worker is predicted.
#[derive(Clone, Copy, PartialEq, Serialize, ToSchema, Debug)]
#[schema(as = TtftPrediction)]
pub struct PredictionAccuracy {
    /// Steps that were compared, since this router or the worker started.
    pub samples: u64,
    /// Observed divided by predicted time to first token, over about the last twenty steps: 2 is twice as long.
    pub ratio: f64,
    /// How predictions are off; null while they are as exact as usual.
    pub drift: Option<DriftDirection>,
}

#[derive(Clone, Copy, Debug)]
struct CusumChart {
    incarnation: Incarnation,
    steps: u64,
    level: f64,
    spread: f64,
    late_sum: f64,
    early_sum: f64,
    drift: Option<DriftDirection>,
}

impl CusumChart {
    fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, steps: 0, level: 0.0, spread: MIN_SPREAD, late_sum: 0.0, early_sum: 0.0, drift: None }
    }

    fn add(&mut self, predicted: Micros, observed: Micros) {
        let ratio = (observed.0 as f64 + NEGLIGIBLE_MICROS) / (predicted.0 as f64 + NEGLIGIBLE_MICROS);
        let sample = ratio.clamp(1.0 / MAX_RATIO, MAX_RATIO).ln();
        self.steps += 1;
        self.level += SAMPLE_WEIGHT.max(1.0 / self.steps as f64) * (sample - self.level);
        let spread = self.spread.max(MIN_SPREAD);
        // The mean absolute deviation of a normal distribution is 0.8 of its standard deviation.
        self.spread += SAMPLE_WEIGHT * ((sample - self.level).abs() / 0.8 - self.spread);
        let spreads = (sample / spread).clamp(-MAX_SAMPLE_SPREADS, MAX_SAMPLE_SPREADS);
        self.late_sum = (self.late_sum + spreads - 0.5).clamp(0.0, MAX_SUM);
        self.early_sum = (self.early_sum - spreads - 0.5).clamp(0.0, MAX_SUM);
        self.drift = match self.drift {
            _ if self.late_sum > DRIFT_THRESHOLD => Some(DriftDirection::Slower),
            _ if self.early_sum > DRIFT_THRESHOLD => Some(DriftDirection::Faster),
            Some(DriftDirection::Slower) if self.late_sum == 0.0 => None,
            Some(DriftDirection::Faster) if self.early_sum == 0.0 => None,
            unchanged => unchanged,
        };
    }

    fn accuracy(&self) -> PredictionAccuracy {
        PredictionAccuracy { samples: self.steps, ratio: self.level.exp(), drift: self.drift }
    }
}

/// Detector of prediction drift: a chart for each worker, as many as there are configured workers.
#[derive(Debug, Default)]
pub struct PredictionDriftDetector(Mutex<HashMap<WorkerId, CusumChart>>);

impl PredictionDriftDetector {
    /// Adds a step that this worker incarnation served alone. Returns the drift if its direction changed.
    pub fn add(
        &self,
        (worker, incarnation): (WorkerId, Incarnation),
        predicted: Micros,
        observed: Micros,
    ) -> Option<PredictionAccuracy> {
        let mut charts = self.0.lock();
        let chart = charts.entry(worker).or_insert_with(|| CusumChart::new(incarnation));
        if chart.incarnation != incarnation {
            *chart = CusumChart::new(incarnation);
        }
        let before = chart.drift;
        chart.add(predicted, observed);
        (chart.drift != before).then(|| chart.accuracy())
    }

    /// Returns how well this worker's first tokens are predicted; `None` before its first step.
    pub fn of(&self, worker: WorkerId) -> Option<PredictionAccuracy> {
        self.0.lock().get(&worker).map(CusumChart::accuracy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: (WorkerId, Incarnation) = (WorkerId(1), Incarnation(1));

    /// Samples around 0 with a standard deviation of about `spread`: sums of twelve uniform ones.
    fn noise(spread: f64) -> impl Iterator<Item = f64> {
        let mut state = 1u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        std::iter::repeat_with(move || spread * ((0..12).map(|_| uniform()).sum::<f64>() - 6.0))
    }

    /// Adds a step with a prediction of 2 s.
    fn step(calibration: &PredictionDriftDetector, factor: f64) -> Option<PredictionAccuracy> {
        calibration.add(WORKER, Micros(2_000_000), Micros((2e6 * factor) as u64))
    }

    #[test]
    fn noise_alone_is_not_drift() {
        for spread in [0.1, 0.3, 0.5] {
            let calibration = PredictionDriftDetector::default();
            let drifts = noise(spread).take(2_000).filter_map(|x| step(&calibration, x.exp())).count();
            assert_eq!(drifts, 0, "{spread}");
            let prediction = calibration.of(WORKER.0).unwrap();
            assert_eq!(prediction.samples, 2_000);
            assert!((0.6..1.6).contains(&prediction.ratio), "{prediction:?}");
        }
    }

    #[test]
    fn a_slow_worker_shows_drift_within_twenty_steps() {
        for (factor, direction) in
            [(3.0, DriftDirection::Slower), (2.0, DriftDirection::Slower), (0.33, DriftDirection::Faster)]
        {
            let calibration = PredictionDriftDetector::default();
            noise(0.3).take(300).for_each(|x| assert_eq!(step(&calibration, x.exp()), None));
            let drift =
                noise(0.3).take(20).find_map(|x| step(&calibration, factor * x.exp())).expect("within twenty steps");
            assert_eq!(drift.drift, Some(direction));
        }
    }

    #[test]
    fn drift_is_detected_while_the_cost_model_adapts() {
        let calibration = PredictionDriftDetector::default();
        noise(0.3).take(300).for_each(|x| assert_eq!(step(&calibration, x.exp()), None));
        // With each step, a fifth of the remaining error is learned.
        let remaining_error = |n: i32| (3f64.ln() * 0.8f64.powi(n)).exp();
        assert!(noise(0.1).zip(0..20).any(|(x, n)| step(&calibration, remaining_error(n) * x.exp()).is_some()));
    }

    #[test]
    fn accurate_steps_end_drift_and_a_new_incarnation_resets_it() {
        let calibration = PredictionDriftDetector::default();
        assert!((0..20).any(|_| step(&calibration, 4.0).is_some()));
        assert_eq!(calibration.of(WORKER.0).unwrap().drift, Some(DriftDirection::Slower));
        let prediction = (0..40).find_map(|_| step(&calibration, 1.0)).expect("it ends");
        assert_eq!(prediction.drift, None);
        assert!((0..20).any(|_| step(&calibration, 4.0).is_some()));
        calibration.add((WORKER.0, Incarnation(2)), Micros(1_000_000), Micros(1_000_000));
        assert_eq!(calibration.of(WORKER.0), Some(PredictionAccuracy { samples: 1, ratio: 1.0, drift: None }));
    }

    #[test]
    fn millisecond_errors_and_a_single_outlier_are_not_drift() {
        let calibration = PredictionDriftDetector::default();
        (0..200).for_each(|_| assert_eq!(calibration.add(WORKER, Micros(1_000), Micros(5_000)), None));
        assert_eq!(calibration.add(WORKER, Micros(1), Micros(u64::MAX)), None);
        assert_eq!(calibration.add(WORKER, Micros(u64::MAX), Micros(0)), None);
    }
}
