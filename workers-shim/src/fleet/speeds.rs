//! Estimates a worker's speeds from completed steps. Pure. One outlier changes little.
//!
//! Every estimate is a moving average of the logarithm (`estimate`), so that twice as fast and half as fast weigh the
//! same.
//!
//! Samples, only from steps that are conclusive:
//! - prefill rate: `computed / (first token - decode step)`, where at least 256 tokens were computed and no other
//!   prompt was queued. The planner adds one decode step to every prediction, so it is subtracted here. The growth of
//!   attention with length is not modelled: workers with long prompts appear slower.
//! - decode step, from a batch of one or two: `time per token - slowdown * (batch - 1)`;
//! - decode slowdown, from larger batches: `(time per token - decode step) / (batch - 1)`, averaged arithmetically,
//!   since it may be 0, and at most one decode step. Both need at least 8 tokens.
//!
//! An answer that arrived in one piece (not streamed, or buffered on the way) gives neither.

use vocabulary::{EngineSpeed, Micros, Tokens};

use super::estimate::{Confidence, LogMovingAverage, MAX_RATIO, WEIGHT};

/// With fewer computed tokens, overheads dominate the rate.
const MIN_COMPUTED: u64 = 256;
/// With fewer generated tokens, noise dominates.
const MIN_DECODED: u64 = 8;
/// No engine generates a token faster; what arrives faster was buffered.
const MIN_TOKEN_TIME: Micros = Micros(20);

/// Measurements of one step at one worker. Zero means not measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct SpeedSample {
    /// Computed prompt tokens; 0 if another prompt was queued.
    pub(super) computed: Tokens,
    pub(super) first_token: Micros,
    /// Answers generated there at the time, this one included.
    pub(super) batch: u32,
    /// Generated tokens after the first.
    pub(super) decoded: Tokens,
    /// Time from the first token to the last.
    pub(super) decoding: Micros,
}

/// A worker's estimated speeds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct SpeedEstimate {
    prefill: LogMovingAverage,
    step: LogMovingAverage,
    slowdown: f64,
}

impl SpeedEstimate {
    /// Starts with a profile. Invalid rates become 1 token per second.
    pub(super) fn new(start: EngineSpeed) -> Self {
        Self {
            prefill: LogMovingAverage::new(start.prefill_tokens_per_second, 1e12),
            step: LogMovingAverage::new(start.decode_step.0 as f64, f64::MAX),
            slowdown: start.decode_slowdown.0 as f64,
        }
    }

    /// Updates the estimates with a step.
    pub(super) fn observe(&mut self, sample: &SpeedSample) {
        if sample.decoding < MIN_TOKEN_TIME * sample.decoded.0 {
            return;
        }
        self.learn_prefill(sample);
        self.learn_decode(sample);
    }

    pub(super) fn speeds(&self) -> EngineSpeed {
        EngineSpeed {
            prefill_tokens_per_second: self.prefill.value(),
            decode_step: Micros(self.step.value().round() as u64),
            decode_slowdown: Micros(self.slowdown.round() as u64),
        }
    }

    /// Returns the confidence in the prefill rate and in the decode step.
    pub(super) fn confidence(&self) -> (Confidence, Confidence) {
        (self.prefill.confidence(), self.step.confidence())
    }

    fn learn_prefill(&mut self, sample: &SpeedSample) {
        if sample.computed.0 < MIN_COMPUTED || sample.first_token == Micros::ZERO {
            return;
        }
        let waited = sample.first_token.0 as f64;
        // An overestimated decode step must not consume the whole sample.
        let computing = (waited - self.step.value()).max(waited / MAX_RATIO);
        self.prefill.learn(sample.computed.0 as f64 * 1e6 / computing);
    }

    fn learn_decode(&mut self, sample: &SpeedSample) {
        if sample.decoded.0 < MIN_DECODED || sample.decoding == Micros::ZERO || sample.batch == 0 {
            return;
        }
        let token = sample.decoding.0 as f64 / sample.decoded.0 as f64;
        let others = f64::from(sample.batch - 1);
        if sample.batch <= 2 {
            let alone = (token - self.slowdown * others).max(token / MAX_RATIO);
            self.step.learn(alone);
        } else {
            let step = self.step.value();
            let each = ((token - step) / others).clamp(0.0, step);
            self.slowdown += WEIGHT * (each - self.slowdown);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: EngineSpeed =
        EngineSpeed { prefill_tokens_per_second: 10_000.0, decode_step: Micros(10_000), decode_slowdown: Micros(200) };

    fn prefill(computed: u64, first_token: u64) -> SpeedSample {
        SpeedSample { computed: Tokens(computed), first_token: Micros(first_token), batch: 1, ..SpeedSample::default() }
    }

    fn decode(batch: u32, token: u64) -> SpeedSample {
        SpeedSample { batch, decoded: Tokens(100), decoding: Micros(100 * token), ..SpeedSample::default() }
    }

    fn after(seen: &[SpeedSample]) -> EngineSpeed {
        let mut estimate = SpeedEstimate::new(START);
        seen.iter().for_each(|seen| estimate.observe(seen));
        estimate.speeds()
    }

    #[test]
    fn many_equal_steps_set_the_estimate() {
        // 5,000 tokens in 1 s, and a decode step of 10 ms.
        let rate = after(&[prefill(5_000, 1_010_000); 60]).prefill_tokens_per_second;
        assert!((rate - 5_000.0).abs() < 50.0, "{rate}");
    }

    #[test]
    fn one_outlier_changes_little() {
        let slower = after(&[prefill(300, 3_600_000_000)]).prefill_tokens_per_second;
        assert!((7_500.0..8_000.0).contains(&slower), "{slower}");
        let faster = after(&[prefill(1 << 40, 1)]).prefill_tokens_per_second;
        assert!((13_000.0..13_300.0).contains(&faster), "{faster}");
    }

    #[test]
    fn correct_estimate_is_a_fixed_point() {
        // The planner predicts computed / rate + decode step.
        let rate = after(&[prefill(20_000, 2_000_000 + 10_000)]).prefill_tokens_per_second;
        assert!((rate - 10_000.0).abs() < 1e-6, "{rate}");
    }

    #[test]
    fn uninformative_steps_are_ignored() {
        let taught = after(&[prefill(255, 1_000_000), prefill(5_000, 0), SpeedSample::default()]);
        assert_eq!(taught, START);
        let short = SpeedSample { decoded: Tokens(7), ..decode(1, 50_000) };
        let nobody = SpeedSample { batch: 0, ..decode(1, 50_000) };
        assert_eq!(after(&[short, nobody]), START);
    }

    #[test]
    fn unstreamed_answer_yields_no_prefill_sample() {
        let whole = SpeedSample { decoded: Tokens(40), decoding: Micros(15), ..prefill(5_000, 2_000_000) };
        assert_eq!(after(&[whole; 10]), START);
        let streamed = SpeedSample { decoding: Micros(400_000), ..whole };
        assert_ne!(after(&[streamed]), START);
    }

    #[test]
    fn batch_size_separates_step_and_slowdown() {
        let truth = |batch: u32| decode(batch, 20_000 + 500 * u64::from(batch - 1));
        let seen: Vec<_> = (0..200).map(|turn| truth(if turn % 2 == 0 { 1 } else { 9 })).collect();
        let speeds = after(&seen);
        assert!((19_800..=20_200).contains(&speeds.decode_step.0), "{speeds:?}");
        assert!((450..=550).contains(&speeds.decode_slowdown.0), "{speeds:?}");
    }

    #[test]
    fn slowdown_stays_between_zero_and_a_step() {
        assert!(after(&[decode(9, 10_000); 100]).decode_slowdown <= Micros(1));
        assert!(after(&[decode(3, 1 << 40); 1000]).decode_slowdown <= START.decode_step);
    }

    #[test]
    fn invalid_profile_still_gives_finite_estimates() {
        for rate in [f64::NAN, f64::INFINITY, -3.0, 0.0] {
            let start =
                EngineSpeed { prefill_tokens_per_second: rate, decode_step: Micros(0), decode_slowdown: Micros(0) };
            let mut estimate = SpeedEstimate::new(start);
            for seen in [prefill(u64::MAX, u64::MAX), prefill(256, 1), decode(1, 1), decode(u32::MAX, 1)] {
                estimate.observe(&seen);
                let rate = estimate.speeds().prefill_tokens_per_second;
                assert!(rate.is_finite() && rate >= 1.0, "{rate} from {start:?}");
                assert!(estimate.speeds().decode_step >= Micros(1));
            }
        }
    }
}
