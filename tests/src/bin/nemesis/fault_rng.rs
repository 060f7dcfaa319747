//! Chance from a seed: equal seeds choose equal faults.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng};

/// A generator of choices.
#[derive(Clone, Debug)]
pub(crate) struct FaultRng(SplitMix64);

impl FaultRng {
    /// From a seed; every seed is another sequence.
    pub(crate) fn new(seed: u64) -> FaultRng {
        let mut rng = SplitMix64::from_seed(seed.to_le_bytes());
        rng.next_u64();
        FaultRng(rng)
    }

    /// Another generator, for someone who draws at his own pace.
    pub(crate) fn split(&self, nth: u64) -> FaultRng {
        let drawn = self.0.clone().next_u64();
        FaultRng::new(drawn ^ nth.wrapping_mul(0xd134_2543_de82_ef95))
    }

    /// 0 up to, not including, `bound`, which is at least 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound.max(1)
    }

    /// 0 up to 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of several.
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
