//! The only source of chance: one seed.

/// SplitMix64. Its stream is part of what a seed means, so it is written out here and never changes.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Less than `end`; 0 when `end` is.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw() % end.max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::Chance;

    #[test]
    fn a_seed_is_a_stream_that_never_changes() {
        let mut chance = Chance::new(1);
        assert_eq!([chance.draw(), chance.draw()], [0x910a_2dec_8902_5cc1, 0xbeeb_8da1_658e_ec67]);
        assert!((0..1_000).all(|_| chance.below(3) < 3));
        assert_eq!(chance.below(0), 0);
    }
}
