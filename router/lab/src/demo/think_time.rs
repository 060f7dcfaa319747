//! Synthetic think times, because the recordings have none. Seeded, so that every policy has the same pauses.

use std::time::Duration;

use super::corpus::PauseCause;

/// Median duration of a tool call.
const TOOL_MEDIAN: Duration = Duration::from_millis(200);
/// Median time a person takes to read and type. Short, so that the demo takes only a minute.
const HUMAN_MEDIAN: Duration = Duration::from_millis(600);
/// Sigma of the log-normal distribution.
const SIGMA: f64 = 0.6;
/// Maximum pause, in medians.
const MAX_MEDIANS: f64 = 4.0;
/// Period in which sessions start, evenly spread.
const RAMP: Duration = Duration::from_millis(2_400);

/// Pauses of one run: scale and seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThinkTimeModel {
    /// Equal seeds yield equal pauses.
    pub seed: u64,
    /// Factor of every pause, which includes the speed-up.
    pub scale: f64,
}

impl ThinkTimeModel {
    /// Start of session number `session` of `sessions`, from the start of the run.
    pub(super) fn start(self, session: usize, sessions: usize) -> Duration {
        let position = session as f64 + self.uniform(session, usize::MAX, 0);
        RAMP.mul_f64(self.scale * position / sessions.max(1) as f64)
    }

    /// Pause before step `turn` of session `session`.
    pub(super) fn pause(self, session: usize, turn: usize, pause: PauseCause) -> Duration {
        let median = match pause {
            PauseCause::None => return Duration::ZERO,
            PauseCause::Tool => TOOL_MEDIAN,
            PauseCause::Human => HUMAN_MEDIAN,
        };
        // Box-Muller transform; 1 - u is never 0.
        let radius = (-2.0 * (1.0 - self.uniform(session, turn, 1)).ln()).sqrt();
        let normal = radius * (std::f64::consts::TAU * self.uniform(session, turn, 2)).cos();
        median.mul_f64(self.scale * (SIGMA * normal).exp().min(MAX_MEDIANS))
    }

    /// Deterministic number in [0, 1), a hash of the arguments and the seed.
    fn uniform(self, session: usize, turn: usize, draw: u64) -> f64 {
        let hash = xxhash_rust::xxh3::xxh3_64_with_seed(
            &[session as u64, turn as u64, draw].map(u64::to_le_bytes).concat(),
            self.seed,
        );
        (hash >> 11) as f64 / (1_u64 << 53) as f64
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
