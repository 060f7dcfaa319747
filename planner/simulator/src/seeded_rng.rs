//! The only source of chance: one seed.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

/// SplitMix64. Its stream is part of what a seed means and never changes.
#[derive(Clone, Debug)]
pub struct SeededRng(SplitMix64);

impl SeededRng {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::from_seed(seed.to_le_bytes()))
    }

    /// 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Less than `end`; 0 when `end` is.
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
