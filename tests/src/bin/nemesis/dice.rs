//! Chance from a seed: equal seeds choose equal faults.

/// A generator of choices.
#[derive(Clone, Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    /// From a seed; every seed is another sequence.
    pub(crate) fn new(seed: u64) -> Dice {
        Dice(seed.wrapping_add(0x9e37_79b9_7f4a_7c15))
    }

    /// Another generator, for someone who draws at his own pace.
    pub(crate) fn split(&self, nth: u64) -> Dice {
        let mut dice = Dice::new(self.0 ^ nth.wrapping_mul(0xd134_2543_de82_ef95));
        dice.next();
        dice
    }

    /// 0 up to, not including, `bound`, which is at least 1.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    /// 0 up to 1.
    pub(crate) fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// One of several.
    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> Option<&'a T> {
        of.get(self.below(of.len() as u64) as usize)
    }

    /// SplitMix64, as its authors published it.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_draw_alike_and_others_do_not() {
        let draw = |seed| {
            let mut dice = Dice::new(seed);
            [dice.below(1000), dice.below(1000), dice.split(1).below(1000), dice.split(2).below(1000)]
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        assert!((0.0..1.0).contains(&Dice::new(3).fraction()));
    }
}
