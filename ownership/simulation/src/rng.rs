//! The only source of chance: one seed, and independent streams drawn from it.

use std::time::Duration;

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng};

/// A stream of SplitMix64. What it draws is part of what a seed means, and never changes.
#[derive(Clone, Debug)]
pub(crate) struct Rng(SplitMix64);

impl Rng {
    /// A stream of its own for each purpose, so that drawing more for one leaves the others as they were.
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

    /// Another stream, from this one.
    pub(crate) fn fork(&mut self) -> Self {
        Self::from_state(self.draw())
    }

    /// 64 bits.
    pub(crate) fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Less than `end`; 0 when `end` is.
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }

    /// At least `low`, at most `high`.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high.saturating_sub(low) + 1)
    }

    /// True in so many of 1,000 cases.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.below(1_000) < permille
    }

    pub(crate) fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        all.get(self.below(all.len() as u64) as usize)
    }

    /// A span between two, in microseconds.
    pub(crate) fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(self.within(low, high))
    }

    /// A span between two, in milliseconds.
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
        // What a seed means is kept between versions: a committed seed list depends on it.
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
