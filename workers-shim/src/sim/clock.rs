//! Engine time: real time since the start, multiplied by the speed-up.

use std::time::{Duration, Instant};

use vocabulary::Micros;

/// A clock that starts when it is created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineClock {
    start: Instant,
    speed_up: f64,
}

impl EngineClock {
    pub(crate) fn new(speed_up: f64) -> Self {
        Self { start: Instant::now(), speed_up }
    }

    pub(crate) fn now(&self) -> Micros {
        Micros((self.start.elapsed().as_secs_f64() * 1e6 * self.speed_up) as u64)
    }

    /// Returns when the engine time will be `at`.
    pub(crate) fn instant_at(&self, at: Micros) -> Instant {
        self.start + self.real_duration(at)
    }

    /// Converts a span of engine time to real time.
    pub(crate) fn real_duration(&self, span: Micros) -> Duration {
        const YEAR: f64 = 31_536_000.0;
        Duration::from_secs_f64((span.0 as f64 / 1e6 / self.speed_up).min(YEAR))
    }
}
