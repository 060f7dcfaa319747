//! Points on a chain, by which a command tells the ledger which prefixes a range of blocks contains.
//!
//! A segment does not have to list every block. The ledger needs its waypoints (for binary search of later prompts),
//! its end, and enough points in between to detect whether another session's head lies on it.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, PrefixChain, PrefixId};

/// Every artifact keeps a boundary wherever the block count is a multiple of this.
pub const WAYPOINT: u64 = 64;

/// Maximum number of points in a segment.
pub const MAX_POINTS: usize = 8_192;

/// Segments list every block this close to either end.
const DENSE_BLOCKS: u64 = 256;

/// A prefix and its length in blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
pub struct PrefixPoint {
    /// Number of blocks from the root.
    pub blocks: Blocks,
    /// Prefix that ends there.
    pub id: PrefixId,
}

impl PrefixPoint {
    /// Returns the prefix of the chain's first `blocks` blocks; `None` beyond its end.
    pub fn on_chain(chain: &PrefixChain, blocks: Blocks) -> Option<Self> {
        chain.prefix(blocks).map(|id| Self { blocks, id })
    }

    /// Returns whether the chain contains this point.
    pub fn is_on_chain(self, chain: &PrefixChain) -> bool {
        chain.prefix(self.blocks) == Some(self.id)
    }
}

/// A range of one chain: where it attaches, and some of its points in ascending order, ending with its end.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ChainSegment {
    /// Deepest prefix of the chain that the writer saw in the ledger; zero blocks is the root, which is always known.
    pub base: PrefixPoint,
    /// Points after the base: every waypoint, the end, and some in between.
    pub points: Vec<PrefixPoint>,
}

impl ChainSegment {
    /// Returns the segment of `chain` from block `base` to block `end`. `None` unless base < end <= the chain's blocks.
    pub fn of(chain: &PrefixChain, base: Blocks, end: Blocks) -> Option<Self> {
        if base >= end {
            return None;
        }
        let listed = |n: &u64| *n <= base.0 + DENSE_BLOCKS || *n + DENSE_BLOCKS > end.0 || n.is_multiple_of(WAYPOINT);
        let first = PrefixPoint::on_chain(chain, base)?;
        PrefixPoint::on_chain(chain, end)?;
        let points =
            (base.0 + 1..=end.0).filter(listed).filter_map(|n| PrefixPoint::on_chain(chain, Blocks(n))).collect();
        Some(Self { base: first, points })
    }

    /// Returns the deepest point.
    pub fn end(&self) -> PrefixPoint {
        self.points.last().copied().unwrap_or(self.base)
    }

    /// Returns whether the points increase, are not too many, and include every waypoint.
    pub fn is_well_formed(&self) -> bool {
        if self.points.is_empty() || self.points.len() > MAX_POINTS {
            return false;
        }
        let mut last = self.base.blocks.0;
        self.points.iter().all(|point| {
            let skipped = (last / WAYPOINT + 1) * WAYPOINT < point.blocks.0;
            let rises = point.blocks.0 > last;
            last = point.blocks.0;
            rises && !skipped
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vocabulary::{HashSeed, Tokens};

    fn chain(blocks: u64) -> PrefixChain {
        let tokens: Vec<u32> = (0..blocks as u32).collect();
        PrefixChain::over_tokens(PrefixId(9), HashSeed(1), Tokens(1), &tokens)
    }

    #[test]
    fn a_short_segment_lists_every_block() {
        let chain = chain(100);
        let run = ChainSegment::of(&chain, Blocks(40), Blocks(100)).unwrap();
        assert_eq!(run.points.len(), 60);
        assert_eq!(run.end(), PrefixPoint { blocks: Blocks(100), id: chain.head() });
        assert!(run.is_well_formed());
    }

    #[test]
    fn a_long_segment_lists_both_ends_and_every_waypoint() {
        let chain = chain(10_000);
        let run = ChainSegment::of(&chain, Blocks(0), Blocks(9_999)).unwrap();
        assert!(run.is_well_formed());
        assert!(run.points.len() < 700, "{} points", run.points.len());
        let has = |n| run.points.iter().any(|p| p.blocks == Blocks(n));
        assert!(has(1) && has(256) && has(320) && has(9_984) && has(9_999) && !has(300) && !has(10_000));
    }

    #[test]
    fn a_segment_needs_its_base_before_its_end_on_the_chain() {
        let chain = chain(10);
        assert_eq!(ChainSegment::of(&chain, Blocks(10), Blocks(10)), None);
        assert_eq!(ChainSegment::of(&chain, Blocks(5), Blocks(11)), None);
    }

    #[test]
    fn a_segment_that_skips_a_waypoint_descends_or_is_empty_is_malformed() {
        let chain = chain(300);
        let good = ChainSegment::of(&chain, Blocks(10), Blocks(300)).unwrap();
        assert!(good.is_well_formed());
        let mut skips = good.clone();
        skips.points.retain(|p| p.blocks != Blocks(128));
        let mut falls = good.clone();
        falls.points.swap(3, 4);
        let empty = ChainSegment { points: Vec::new(), ..good };
        for bad in [skips, falls, empty] {
            assert!(!bad.is_well_formed());
        }
    }

    #[test]
    fn the_end_of_a_segment_may_skip_blocks_but_no_waypoint() {
        let chain = chain(130);
        let at = |n| PrefixPoint::on_chain(&chain, Blocks(n)).unwrap();
        let run = |points: &[u64]| ChainSegment { base: at(60), points: points.iter().map(|n| at(*n)).collect() };
        assert!(run(&[64, 128, 130]).is_well_formed());
        assert!(run(&[63]).is_well_formed());
        assert!(run(&[64]).is_well_formed());
        assert!(!run(&[65]).is_well_formed());
        assert!(!run(&[64, 130]).is_well_formed());
    }
}
