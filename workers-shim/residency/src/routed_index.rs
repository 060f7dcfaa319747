//! Which ranks are assumed to hold a prompt's blocks, because prompts that begin like it were routed there.
//!
//! Kept apart from the index of reported blocks, and never mixed with it. To record a step takes time only for its new
//! blocks, and a block within a run takes the memory of its hash. A lookup visits the ranks that hold the prompt's first
//! block.

use vocabulary::{BlockHash, Blocks, DpRank, Micros, Overlap, PrefixChain, Tier, WorkerId};

use crate::fold_hash::FoldHashMap;
use crate::index::ResidencyIndex;
use crate::residency_feed::ApplyProgress;
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
    free: Vec<RoutedRankSlot>,
    /// Ranks by the first blocks of the prompts that they hold.
    holders: FoldHashMap<BlockHash, Vec<RoutedRankSlot>>,
}

/// A rank that was removed, for the caller to drop where nobody waits for it.
#[must_use]
pub struct RemovedRank(#[expect(dead_code, reason = "only dropped")] RoutedRank);

impl RoutedIndex {
    /// Most ranks of which blocks are assumed: as many as the index of reported blocks has.
    pub const MAX_RANKS: usize = ResidencyIndex::MAX_SOURCES;

    /// Adds a rank, which holds nothing yet; `None` if there are too many, which only makes plans less accurate.
    pub fn add_rank(&mut self, worker: WorkerId, rank: DpRank, limits: RoutedBlockLimits) -> Option<RoutedRankSlot> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.ranks.len() < Self::MAX_RANKS => {
                self.ranks.push(None);
                RoutedRankSlot((self.ranks.len() - 1) as u32)
            }
            None => return None,
        };
        self.ranks[slot.0 as usize] = Some(RoutedRank { worker, rank, blocks: RoutedBlocks::new(limits) });
        Some(slot)
    }

    /// Removes a rank with all its blocks.
    pub fn remove_rank(&mut self, slot: RoutedRankSlot) -> Option<RemovedRank> {
        let removed = self.ranks[slot.0 as usize].take()?;
        self.free.push(slot);
        for first in removed.blocks.first_blocks() {
            self.remove_holder(first, slot);
        }
        Some(RemovedRank(removed))
    }

    /// Records the prompts of one step served at a rank whose cache can hold `capacity` chain blocks. `now` must not go
    /// backwards.
    pub fn record_prompts(&mut self, slot: RoutedRankSlot, prompts: &[&PrefixChain], capacity: usize, now: Micros) {
        self.change(slot, |blocks, changes| {
            blocks.set_limit(capacity);
            blocks.record_prompts(prompts, now, changes);
        });
    }

    /// Removes a rank's blocks that are too old, in at most `max_evictions` evictions of a run's last blocks.
    pub fn expire(&mut self, slot: RoutedRankSlot, now: Micros, max_evictions: usize) -> ApplyProgress {
        let mut progress = ApplyProgress::Done;
        self.change(slot, |blocks, changes| progress = blocks.expire(now, max_evictions, changes));
        progress
    }

    fn change(&mut self, slot: RoutedRankSlot, change: impl FnOnce(&mut RoutedBlocks, &mut Vec<FirstBlockChange>)) {
        let Some(rank) = &mut self.ranks[slot.0 as usize] else { return };
        let mut changes = Vec::new();
        change(&mut rank.blocks, &mut changes);
        for change in changes {
            match change {
                FirstBlockChange::Added(first) => self.holders.entry(first).or_default().push(slot),
                FirstBlockChange::Removed(first) => self.remove_holder(first, slot),
            }
        }
    }

    fn remove_holder(&mut self, first: BlockHash, slot: RoutedRankSlot) {
        let Some(holders) = self.holders.get_mut(&first) else { return };
        holders.retain(|holder| *holder != slot);
        if holders.is_empty() {
            self.holders.remove(&first);
        }
    }

    /// Appends which ranks hold leading blocks of `chain`, and how many. In no order.
    pub fn find_overlaps(&self, chain: &PrefixChain, found: &mut Vec<Overlap>) {
        let holders = chain.ids.first().and_then(|first| self.holders.get(&first.block_hash()));
        for rank in holders.into_iter().flatten().filter_map(|slot| self.ranks[slot.0 as usize].as_ref()) {
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
        let [a, b, c] = [(1, 0), (1, 1), (2, 0)].map(|(w, r)| index.add_rank(WorkerId(w), DpRank(r), LIMITS).unwrap());
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
        let [a, b] = [1, 2].map(|worker| index.add_rank(WorkerId(worker), DpRank(0), LIMITS).unwrap());
        index.record_prompts(a, &[&chain(0, 9), &chain(1, 2)], usize::MAX, Micros(0));
        index.record_prompts(b, &[&chain(0, 9)], usize::MAX, Micros(60));
        assert_eq!(index.expire(a, Micros(101), 1), ApplyProgress::More);
        assert_eq!(index.expire(a, Micros(101), 2), ApplyProgress::Done);
        assert_eq!(depths(&index, &chain(0, 9)), [(2, 0, 9)]);
        drop(index.remove_rank(b));
        assert_eq!((index.blocks(), index.holders.len()), (0, 0));
        let c = index.add_rank(WorkerId(3), DpRank(0), LIMITS).unwrap();
        assert_eq!(c, b, "slots are used again");
        index.record_prompts(c, &[&chain(0, 9)], 5, Micros(70));
        index.record_prompts(c, &[&chain(0, 9)], 5, Micros(71));
        assert_eq!(
            (depths(&index, &chain(0, 9)), index.holders[&chain(0, 1).ids[0].block_hash()].len()),
            (vec![(3, 0, 5)], 1)
        );
    }
}
