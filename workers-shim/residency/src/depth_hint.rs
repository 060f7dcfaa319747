//! Depths at which the holders of a session's prefix ended in its last lookup; the next lookup starts there. Only a
//! hint: every depth is checked before it is returned.

use vocabulary::{Blocks, Overlap};

/// Up to three depths in one number, none of them 0.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DepthHint(u64);

impl DepthHint {
    const DEPTHS: usize = 3;
    const BITS: u32 = 21;

    /// Selects depths from a result: the smallest one, at which holders end that only share how conversations begin,
    /// and the deepest ones.
    pub fn from_depths(found: &[Overlap]) -> Self {
        let mut depths: Vec<u64> =
            found.iter().map(|overlap| overlap.blocks.0).filter(|n| n >> Self::BITS == 0).collect();
        depths.sort_unstable();
        depths.dedup();
        if depths.len() > Self::DEPTHS {
            depths.drain(Self::DEPTHS - 1..depths.len() - 1);
        }
        Self(depths.into_iter().fold(0, |all, depth| all << Self::BITS | depth))
    }

    /// Restores a hint from [`Self::packed`].
    pub fn from_packed(number: u64) -> Self {
        Self(number)
    }

    /// Returns the hint as a number.
    pub fn packed(self) -> u64 {
        self.0
    }

    /// Returns the depths in ascending order; 0 is none.
    pub fn depths(self) -> [Blocks; Self::DEPTHS] {
        [2, 1, 0].map(|place| Blocks(self.0 >> (place * Self::BITS) & ((1 << Self::BITS) - 1)))
    }
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Tier, WorkerId};

    use super::*;

    fn near(depths: &[u64]) -> [u64; 3] {
        let overlap =
            |blocks: &u64| Overlap { worker: WorkerId(1), rank: DpRank(0), tier: Tier::Hbm, blocks: Blocks(*blocks) };
        let hint = DepthHint::from_depths(&depths.iter().map(overlap).collect::<Vec<_>>());
        assert_eq!(DepthHint::from_packed(hint.packed()), hint);
        hint.depths().map(|depth| depth.0)
    }

    #[test]
    fn depth_hint_keeps_three_depths_including_the_extremes() {
        assert_eq!(near(&[]), [0, 0, 0]);
        assert_eq!(near(&[7]), [0, 0, 7]);
        assert_eq!(near(&[8000, 512, 512]), [0, 512, 8000]);
        assert_eq!(near(&[30, 5, 20, 10, 40, 5]), [5, 10, 40]);
        assert_eq!(near(&[1 << 21, 6, (1 << 21) - 1]), [0, 6, (1 << 21) - 1], "too deep to be kept");
    }
}
