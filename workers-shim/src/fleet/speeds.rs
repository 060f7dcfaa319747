//! How fast a worker is, learned from what its requests took. Simple and slow to change on purpose.

use vocabulary::{Micros, Speeds, Tokens};

/// Weight of a new observation.
const WEIGHT: f64 = 0.2;
/// Prompts below this are mostly overhead and teach nothing about rates.
const TELLING_PROMPT: Tokens = Tokens(256);
/// Answers below this teach nothing about decode steps.
const TELLING_ANSWER: Tokens = Tokens(8);
/// An observation may move an estimate by this factor at most: one stall is no slow machine.
const MOST_CHANGE: f64 = 4.0;

/// What one finished request showed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Sample {
    /// Prompt tokens computed and time to the first token, where nothing else was in the way.
    pub(super) prompt: Option<(Tokens, Micros)>,
    /// Tokens of the answer, and the time from the first to the last.
    pub(super) decode: (Tokens, Micros),
    /// Requests that ran there at its end, itself included.
    pub(super) running: u64,
}

/// Learned figures; none before the first observation that tells.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Estimate {
    prefill_tokens_per_second: Option<f64>,
    decode_step: Option<f64>,
    decode_slowdown: Option<f64>,
}

impl Estimate {
    pub(super) fn learn(&mut self, sample: &Sample) {
        if let Some((tokens, took)) = sample.prompt
            && tokens >= TELLING_PROMPT
            && took > Micros::ZERO
        {
            merge(&mut self.prefill_tokens_per_second, tokens.0 as f64 / took.duration().as_secs_f64());
        }
        let (answer, took) = sample.decode;
        if answer < TELLING_ANSWER || took == Micros::ZERO {
            return;
        }
        let step = took.0 as f64 / (answer.0 - 1) as f64;
        match (sample.running, self.decode_step) {
            (0..=1, _) => merge(&mut self.decode_step, step),
            (running, Some(alone)) => {
                merge(&mut self.decode_slowdown, (step - alone).max(0.0) / (running - 1) as f64);
            }
            (_, None) => {}
        }
    }

    /// The learned figures, and the profile's where nothing was learned.
    pub(super) fn over(&self, profile: Speeds) -> Speeds {
        let micros = |learned: Option<f64>, assumed| learned.map_or(assumed, |value| Micros(value as u64));
        Speeds {
            prefill_tokens_per_second: self.prefill_tokens_per_second.unwrap_or(profile.prefill_tokens_per_second),
            decode_step: micros(self.decode_step, profile.decode_step),
            decode_slowdown: micros(self.decode_slowdown, profile.decode_slowdown),
        }
    }
}

fn merge(estimate: &mut Option<f64>, seen: f64) {
    *estimate = Some(match *estimate {
        None => seen,
        Some(old) if old <= 0.0 => WEIGHT * seen,
        Some(old) => old + WEIGHT * (seen.clamp(old / MOST_CHANGE, old * MOST_CHANGE) - old),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(tokens: u64, micros: u64) -> Sample {
        Sample { prompt: Some((Tokens(tokens), Micros(micros))), decode: (Tokens(0), Micros(0)), running: 1 }
    }

    fn decoded(answer: u64, micros: u64, running: u64) -> Sample {
        Sample { prompt: None, decode: (Tokens(answer), Micros(micros)), running }
    }

    const PROFILE: Speeds =
        Speeds { prefill_tokens_per_second: 100.0, decode_step: Micros(9), decode_slowdown: Micros(7) };

    #[test]
    fn the_profile_holds_until_something_telling_was_seen() {
        let mut estimate = Estimate::default();
        estimate.learn(&alone(10, 1));
        estimate.learn(&decoded(3, 100, 1));
        estimate.learn(&decoded(100, 100, 5));
        assert_eq!(estimate.over(PROFILE), PROFILE);
    }

    #[test]
    fn rates_follow_what_is_seen_and_one_stall_does_not_count_for_much() {
        let mut estimate = Estimate::default();
        estimate.learn(&alone(1000, 100_000));
        assert_eq!(estimate.over(PROFILE).prefill_tokens_per_second, 10_000.0);
        estimate.learn(&alone(1000, 100_000_000));
        let after_stall = estimate.over(PROFILE).prefill_tokens_per_second;
        assert!((8_400.0..8_600.0).contains(&after_stall), "{after_stall}");
        for _ in 0..40 {
            estimate.learn(&alone(1000, 200_000));
        }
        let settled = estimate.over(PROFILE).prefill_tokens_per_second;
        assert!((4_990.0..5_010.0).contains(&settled), "{settled}");
    }

    #[test]
    fn company_is_told_apart_from_slowness() {
        let mut estimate = Estimate::default();
        estimate.learn(&decoded(101, 1_000_000, 1));
        estimate.learn(&decoded(101, 1_400_000, 5));
        let speeds = estimate.over(PROFILE);
        assert_eq!((speeds.decode_step, speeds.decode_slowdown), (Micros(10_000), Micros(1_000)));
    }
}
