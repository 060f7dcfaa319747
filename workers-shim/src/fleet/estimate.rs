//! Estimate of a positive quantity: a moving average of its logarithm, and the variance of its samples. Pure.
//!
//! ```text
//! value    <- value * clamp(sample / value, 1/4, 4) ^ 1/5              (at most x 1.32 or / 1.32 a sample)
//! variance <- variance + max(1/5, 1/n) * (ln(clamped ratio)^2 - variance)        (n: samples so far)
//! ```
//!
//! For independent samples with this variance, the variance of the average is `w / (2 - w)` of it, with `w` = 1/5: the
//! value is right within a factor of `exp(1.96 * sqrt(variance / 9))` in 95 of 100 cases.

pub(super) const WEIGHT: f64 = 0.2;
/// Samples are clamped to this multiple of the estimate, up or down.
pub(super) const MAX_RATIO: f64 = 4.0;
/// Minimum number of samples for a statement about their variance.
const MIN_SAMPLES: u64 = 5;

/// Confidence in an estimate.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Confidence {
    /// Number of samples; without any, the value is the profile's.
    pub samples: u64,
    /// The true value is within this factor of the estimate, up or down, in 95 of 100 cases. None below five samples.
    pub factor: Option<f64>,
}

/// Confidence in a worker's estimated speeds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct SpeedConfidence {
    /// Prompt tokens per second.
    pub prefill: Confidence,
    /// Duration of a decode step.
    pub decode_step: Confidence,
    /// Fixed cost of a transfer to it.
    pub link_latency: Confidence,
    /// Bytes per second to it.
    pub link_bandwidth: Confidence,
}

/// Estimate of a quantity of at least 1.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LogMovingAverage {
    value: f64,
    max: f64,
    variance: f64,
    samples: u64,
}

impl LogMovingAverage {
    /// Starts with `start`, or 1 if that is not a number, and never exceeds `max`.
    pub(super) fn new(start: f64, max: f64) -> Self {
        let value = if start.is_finite() { start.clamp(1.0, max) } else { 1.0 };
        Self { value, max, variance: 0.0, samples: 0 }
    }

    pub(super) fn value(&self) -> f64 {
        self.value
    }

    /// Updates the estimate with a positive sample.
    pub(super) fn learn(&mut self, sample: f64) {
        let ratio = (sample / self.value).clamp(1.0 / MAX_RATIO, MAX_RATIO);
        if ratio.is_nan() {
            return;
        }
        self.samples += 1;
        let weight = WEIGHT.max(1.0 / self.samples as f64);
        self.variance += weight * (ratio.ln().powi(2) - self.variance);
        self.value = (self.value * ratio.powf(WEIGHT)).clamp(1.0, self.max);
    }

    pub(super) fn confidence(&self) -> Confidence {
        let spread = || (1.96 * (self.variance * WEIGHT / (2.0 - WEIGHT)).sqrt()).exp();
        Confidence { samples: self.samples, factor: (self.samples >= MIN_SAMPLES).then(spread) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taught(samples: impl IntoIterator<Item = f64>) -> LogMovingAverage {
        let mut estimate = LogMovingAverage::new(1_000.0, 1e12);
        samples.into_iter().for_each(|sample| estimate.learn(sample));
        estimate
    }

    #[test]
    fn equal_samples_are_confident_and_few_samples_are_not() {
        assert_eq!(taught([]).confidence(), Confidence { samples: 0, factor: None });
        assert_eq!(taught([500.0; 4]).confidence().factor, None);
        let sure = taught([500.0; 200]).confidence();
        assert_eq!(sure.samples, 200);
        assert!((sure.factor.unwrap() - 1.0).abs() < 0.01, "{sure:?}");
    }

    #[test]
    fn wrong_profile_lowers_confidence_until_learned() {
        let within = |samples: usize| taught(vec![4_000.0; samples]).confidence().factor.unwrap();
        assert!(within(6) > 1.5, "{}", within(6));
        assert!(within(60) < within(20) && within(20) < within(6));
    }

    #[test]
    fn true_value_lies_within_the_factor_95_percent_of_the_time() {
        // Samples with a standard deviation of 30 % of the logarithm: the sum of twelve uniform numbers is nearly
        // normal.
        let mut state = 7u64;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut normal = move || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
        let mut estimate = taught((0..100).map(|_| 1_000.0 * (0.3 * normal()).exp()));
        let covered = (0..2_000).filter(|_| {
            (0..10).for_each(|_| estimate.learn(1_000.0 * (0.3 * normal()).exp()));
            let within = estimate.confidence().factor.unwrap();
            (1_000.0 / within..=1_000.0 * within).contains(&estimate.value())
        });
        let covered = covered.count();
        assert!((1_700..=1_960).contains(&covered), "{covered} of 2000");
    }

    #[test]
    fn estimate_stays_finite_and_bounded() {
        for start in [f64::NAN, f64::INFINITY, -3.0, 0.0] {
            let mut estimate = LogMovingAverage::new(start, 100.0);
            [f64::NAN, f64::INFINITY, 0.0, 1e300]
                .into_iter()
                .cycle()
                .take(400)
                .for_each(|sample| estimate.learn(sample));
            assert!((1.0..=100.0).contains(&estimate.value()), "{estimate:?}");
            assert!(estimate.confidence().factor.unwrap().is_finite());
        }
    }
}
