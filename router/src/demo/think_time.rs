//! Synthetic think times: the recording has none. Seeded, so that every policy faces the same pauses.

use std::time::Duration;

use super::corpus::PauseCause;

/// The median time a tool call takes.
const TOOL_MEDIAN: Duration = Duration::from_millis(200);
/// The median time a person takes to read and type. Quick, so that the demo is over in a minute.
const HUMAN_MEDIAN: Duration = Duration::from_millis(600);
/// Spread of the log-normal distribution.
const SIGMA: f64 = 0.6;
/// No pause is longer than this many medians.
const MAX_MEDIANS: f64 = 4.0;
/// Sessions begin within this time, spread evenly.
const RAMP: Duration = Duration::from_millis(2_400);

/// The clockwork of one run: what every pause is multiplied by and the seed of its randomness.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThinkTimeModel {
    /// Same seed, same pauses.
    pub seed: u64,
    /// Multiplies every pause; the speed-up is already in it.
    pub scale: f64,
}

impl ThinkTimeModel {
    /// When session number `session` of `sessions` begins, counted from the start of the run.
    pub(super) fn start(self, session: usize, sessions: usize) -> Duration {
        let place = session as f64 + self.uniform(session, usize::MAX, 0);
        RAMP.mul_f64(self.scale * place / sessions.max(1) as f64)
    }

    /// The pause before step `turn` of session `session`.
    pub(super) fn pause(self, session: usize, turn: usize, pause: PauseCause) -> Duration {
        let median = match pause {
            PauseCause::None => return Duration::ZERO,
            PauseCause::Tool => TOOL_MEDIAN,
            PauseCause::Human => HUMAN_MEDIAN,
        };
        // Box-Muller; 1 - u is never 0.
        let radius = (-2.0 * (1.0 - self.uniform(session, turn, 1)).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.uniform(session, turn, 2)).cos();
        median.mul_f64(self.scale * (SIGMA * normal).exp().min(MAX_MEDIANS))
    }

    /// A number in [0, 1) that depends on nothing but its arguments.
    fn uniform(self, session: usize, turn: usize, draw: u64) -> f64 {
        let place = xxhash_rust::xxh3::xxh3_64_with_seed(
            &[session as u64, turn as u64, draw].map(u64::to_le_bytes).concat(),
            self.seed,
        );
        (place >> 11) as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEMPO: ThinkTimeModel = ThinkTimeModel { seed: 7, scale: 1.0 };

    #[test]
    fn pauses_are_determined_by_the_seed() {
        let pauses =
            |tempo: ThinkTimeModel| (0..9).map(|turn| tempo.pause(3, turn, PauseCause::Tool)).collect::<Vec<_>>();
        assert_eq!(pauses(TEMPO), pauses(TEMPO));
        assert_ne!(pauses(TEMPO), pauses(ThinkTimeModel { seed: 8, ..TEMPO }));
    }

    #[test]
    fn pauses_are_spread_around_the_median_and_bounded() {
        let mut pauses: Vec<_> = (0..999).map(|turn| TEMPO.pause(0, turn, PauseCause::Human)).collect();
        pauses.sort();
        let median = pauses[pauses.len() / 2].as_secs_f64();
        assert!((0.52..0.68).contains(&median), "{median}");
        assert!(pauses[998] <= HUMAN_MEDIAN.mul_f64(MAX_MEDIANS));
        assert!(pauses[998] > HUMAN_MEDIAN.mul_f64(2.0), "some people are slow");
    }

    #[test]
    fn first_step_has_no_pause() {
        assert_eq!(TEMPO.pause(1, 0, PauseCause::None), Duration::ZERO);
    }

    #[test]
    fn session_starts_are_staggered_within_the_ramp() {
        let starts: Vec<_> = (0..10).map(|session| TEMPO.start(session, 10)).collect();
        assert!(starts.is_sorted() && starts[9] <= RAMP && starts[9] > RAMP / 2);
        assert_eq!(ThinkTimeModel { scale: 0.0, ..TEMPO }.start(5, 10), Duration::ZERO);
    }
}
