//! Seeded random numbers: equal seeds choose equal faults.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng};

/// Random number generator for fault choices.
#[derive(Clone, Debug)]
pub(crate) struct FaultRng(SplitMix64);

impl FaultRng {
    /// Creates a generator; every seed yields a different sequence.
    pub(crate) fn new(seed: u64) -> FaultRng {
        let mut rng = SplitMix64::from_seed(seed.to_le_bytes());
        rng.next_u64();
        FaultRng(rng)
    }

    /// Returns an independent generator for a consumer that draws at its own pace.
    pub(crate) fn split(&self, nth: u64) -> FaultRng {
        let drawn = self.0.clone().next_u64();
        FaultRng::new(drawn ^ nth.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// Draws from 0 to `bound`, exclusive. `bound` is at least 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound.max(1)
    }

    /// Draws from 0 to 1, exclusive.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Picks one element.
    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len() as u64) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_draw_equal_numbers_and_other_seeds_do_not() {
        let draw = |seed| {
            let mut dice = FaultRng::new(seed);
            [dice.below(1000), dice.below(1000), dice.split(1).below(1000), dice.split(2).below(1000)]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((0.0..1.0).contains(&FaultRng::new(3).fraction()));
    }
}
