//! Source of all randomness: a seeded generator.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// SplitMix64. Its stream is part of the meaning of a seed and must never change.
#[derive(Clone, Debug)]
pub struct SeededRng(SplitMix64);

impl SeededRng {
    /// Creates the generator of a seed.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::from_seed(seed.to_le_bytes()))
    }

    /// Returns 64 random bits.
    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `end`; 0 if `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::SeededRng;

    #[test]
    fn seeded_rng_stream_is_stable() {
        let mut chance = SeededRng::new(1);
        assert_eq!([chance.draw(), chance.draw()], [0x910a_2dec_8902_5cc1, 0xbeeb_8da1_658e_ec67]);
        assert!((0..1_000).all(|_| chance.below(3) < 3));
        assert_eq!(chance.below(0), 0);
    }
}
