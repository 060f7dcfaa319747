//! Which ranks are assumed to hold a prompt's blocks, because prompts that begin like it were routed there.
//!
//! Apart from the index of blocks that engines report: a step that is routed costs what is new in it, and no block costs
//! more than its hash. A lookup visits the ranks that hold the prompt's first block.

use vocabulary::{BlockHash, Blocks, DpRank, Micros, Overlap, PrefixChain, Tier, WorkerId};

use crate::fold_hash::FoldHashMap;
use crate::routed_blocks::{FirstBlockChange, RoutedBlockLimits, RoutedBlocks};

/// A rank's slot in the [`RoutedIndex`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoutedRankSlot(u32);

struct RoutedRank {
    worker: WorkerId,
    rank: DpRank,
    blocks: RoutedBlocks,
}

/// The assumed blocks of all ranks.
#[derive(Default)]
pub struct RoutedIndex {
    ranks: Vec<Option<RoutedRank>>,
    free: Vec<u32>,
    /// Ranks by the first blocks of the prompts that they hold.
    holders: FoldHashMap<BlockHash, Vec<u32>>,
}

impl RoutedIndex {
    /// Adds a rank, which holds nothing yet.
    pub fn add_rank(&mut self, worker: WorkerId, rank: DpRank, limits: RoutedBlockLimits) -> RoutedRankSlot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.ranks.push(None);
            (self.ranks.len() - 1) as u32
        });
        self.ranks[slot as usize] = Some(RoutedRank { worker, rank, blocks: RoutedBlocks::new(limits) });
        RoutedRankSlot(slot)
    }

    /// Removes a rank with all its blocks.
    pub fn remove_rank(&mut self, slot: RoutedRankSlot) {
        let Some(removed) = self.ranks[slot.0 as usize].take() else { return };
        self.free.push(slot.0);
        for first in removed.blocks.first_blocks() {
            self.remove_holder(first, slot);
        }
    }

    /// Records the prompts of one step served at a rank whose cache can hold `capacity` chain blocks. `now` must not go
    /// backwards.
    pub fn record_prompts(&mut self, slot: RoutedRankSlot, prompts: &[&PrefixChain], capacity: usize, now: Micros) {
        self.change(slot, |blocks, changes| {
            blocks.set_limit(capacity);
            blocks.record_prompts(prompts, now, changes);
        });
    }

    /// Removes a rank's blocks that are too old.
    pub fn expire(&mut self, slot: RoutedRankSlot, now: Micros) {
        self.change(slot, |blocks, changes| blocks.expire(now, changes));
    }

    fn change(&mut self, slot: RoutedRankSlot, change: impl FnOnce(&mut RoutedBlocks, &mut Vec<FirstBlockChange>)) {
        let Some(rank) = &mut self.ranks[slot.0 as usize] else { return };
        let mut changes = Vec::new();
        change(&mut rank.blocks, &mut changes);
        for change in changes {
            match change {
                FirstBlockChange::Added(first) => self.holders.entry(first).or_default().push(slot.0),
                FirstBlockChange::Removed(first) => self.remove_holder(first, slot),
            }
        }
    }

    fn remove_holder(&mut self, first: BlockHash, slot: RoutedRankSlot) {
        let Some(holders) = self.holders.get_mut(&first) else { return };
        holders.retain(|holder| *holder != slot.0);
        if holders.is_empty() {
            self.holders.remove(&first);
        }
    }

    /// Appends which ranks hold leading blocks of `chain`, and how many. In no order.
    pub fn find_overlaps(&self, chain: &PrefixChain, found: &mut Vec<Overlap>) {
        let holders = chain.ids.first().and_then(|first| self.holders.get(&first.block_hash()));
        for rank in holders.into_iter().flatten().filter_map(|slot| self.ranks[*slot as usize].as_ref()) {
            let blocks = Blocks(rank.blocks.depth(chain) as u64);
            found.push(Overlap { worker: rank.worker, rank: rank.rank, tier: Tier::Hbm, blocks });
        }
    }

    /// Returns the number of blocks; one that several ranks hold counts for each.
    pub fn blocks(&self) -> usize {
        self.ranks.iter().flatten().map(|rank| rank.blocks.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::SEED;
    use vocabulary::{PrefixId, Tokens};

    const LIMITS: RoutedBlockLimits = RoutedBlockLimits { blocks: 1_000, age: Micros(100) };

    fn chain(first: u32, blocks: u32) -> PrefixChain {
        let tokens: Vec<u32> = (0..4 * blocks).map(|n| n + first * 10_000).collect();
        PrefixChain::over_tokens(PrefixId(1), SEED, Tokens(4), &tokens)
    }

    fn depths(index: &RoutedIndex, chain: &PrefixChain) -> Vec<(u64, u16, u64)> {
        let mut found = Vec::new();
        index.find_overlaps(chain, &mut found);
        let mut depths: Vec<_> =
            found.iter().map(|overlap| (overlap.worker.0, overlap.rank.0, overlap.blocks.0)).collect();
        depths.sort_unstable();
        depths
    }

    #[test]
    fn a_lookup_finds_every_rank_that_holds_the_first_block() {
        let mut index = RoutedIndex::default();
        let [a, b, c] = [(1, 0), (1, 1), (2, 0)].map(|(w, r)| index.add_rank(WorkerId(w), DpRank(r), LIMITS));
        index.record_prompts(a, &[&chain(0, 9)], usize::MAX, Micros(0));
        index.record_prompts(b, &[&chain(0, 4), &chain(7, 3)], usize::MAX, Micros(0));
        index.record_prompts(c, &[&chain(7, 5)], usize::MAX, Micros(0));
        assert_eq!(depths(&index, &chain(0, 6)), [(1, 0, 6), (1, 1, 4)]);
        assert_eq!(depths(&index, &chain(7, 9)), [(1, 1, 3), (2, 0, 5)]);
        assert_eq!((depths(&index, &chain(3, 9)), depths(&index, &chain(0, 0))), (Vec::new(), Vec::new()));
        assert_eq!(index.blocks(), 9 + 4 + 3 + 5);
    }

    #[test]
    fn ranks_that_leave_and_blocks_that_expire_leave_nothing_behind() {
        let mut index = RoutedIndex::default();
        let (a, b) = (index.add_rank(WorkerId(1), DpRank(0), LIMITS), index.add_rank(WorkerId(2), DpRank(0), LIMITS));
        index.record_prompts(a, &[&chain(0, 9), &chain(1, 2)], usize::MAX, Micros(0));
        index.record_prompts(b, &[&chain(0, 9)], usize::MAX, Micros(60));
        index.expire(a, Micros(101));
        assert_eq!(depths(&index, &chain(0, 9)), [(2, 0, 9)]);
        index.remove_rank(b);
        assert_eq!((index.blocks(), index.holders.len()), (0, 0));
        let c = index.add_rank(WorkerId(3), DpRank(0), LIMITS);
        assert_eq!(c, b, "slots are used again");
        index.record_prompts(c, &[&chain(0, 9)], 5, Micros(70));
        index.record_prompts(c, &[&chain(0, 9)], 5, Micros(71));
        assert_eq!(
            (depths(&index, &chain(0, 9)), index.holders[&chain(0, 1).ids[0].block_hash()].len()),
            (vec![(3, 0, 5)], 1)
        );
    }
}
