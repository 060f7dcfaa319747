//! The only source of randomness: one seed, and independent streams derived from it.

use std::time::Duration;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng};

/// A stream of SplitMix64. Its values are part of what a seed means and must never change.
#[derive(Clone, Debug)]
pub(crate) struct Rng(SplitMix64);

impl Rng {
    /// Returns a separate stream per purpose, so that drawing more for one does not change the others.
    pub(crate) fn stream(seed: u64, purpose: &str) -> Self {
        let tag = purpose.bytes().fold(seed ^ 0x9e37_79b9_7f4a_7c15, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
        });
        let mut rng = Self::from_state(tag);
        rng.draw();
        rng
    }

    fn from_state(state: u64) -> Self {
        Self(SplitMix64::from_seed(state.to_le_bytes()))
    }

    /// Derives another stream from this one.
    pub(crate) fn fork(&mut self) -> Self {
        Self::from_state(self.draw())
    }

    /// Draws 64 bits.
    pub(crate) fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Draws a number below `end`; 0 if `end` is 0.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }

    /// Draws a number from `low` to `high`, inclusive.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// Returns true with a probability of `permille` / 1,000.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.below(1_000) < permille
    }

    pub(crate) fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len() as u64) as usize)
    }

    /// Draws a duration from `low` to `high` microseconds.
    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.within(low, high))
    }

    /// Draws a duration from `low` to `high` milliseconds.
    pub(crate) fn millis(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_millis(self.within(low, high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_random_stream_is_deterministic_by_seed_and_purpose() {
        let draw = |seed, purpose| {
            let mut rng = Rng::stream(seed, purpose);
            [rng.draw(), rng.draw(), rng.draw()]
        };
        assert_eq!(draw(7, "faults"), draw(7, "faults"));
        assert_ne!(draw(7, "faults"), draw(8, "faults"));
        assert_ne!(draw(7, "faults"), draw(7, "network"));
        // The meaning of seeds must stay the same between versions, because the regression seeds depend on it.
        assert_eq!(Rng::stream(1, "plan").draw(), 10_637_416_764_279_130_723);
    }

    #[test]
    fn random_draws_stay_within_bounds() {
        let mut rng = Rng::stream(3, "bounds");
        assert!((0..1_000).all(|_| (5..=7).contains(&rng.within(5, 7))));
        assert!((0..1_000).all(|_| rng.below(0) == 0 && !rng.chance(0) && rng.chance(1_000)));
        assert_eq!(rng.pick::<u8>(&[]), None);
    }
}
