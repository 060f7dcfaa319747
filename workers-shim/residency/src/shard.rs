//! A partition of the index: the blocks whose mixed hashes have the same first bits. Partitions are small, so that
//! growing one does not block readers for long.

use std::sync::LazyLock;

use vocabulary::{BlockHash, Tier};

use crate::bucket_table::{BucketTable, random, spread};
use crate::fold_hash::FoldHashMap;
use crate::holder_sets::{HolderSetId, HolderSets, plane};

/// A mixed block hash, whose first bits are the number of its partition.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct MixedBlockHash(u64);

/// Bits of the partition number.
const PARTITION_BITS: u32 = 10;

impl MixedBlockHash {
    pub(crate) const SHARDS: usize = 1 << PARTITION_BITS;

    pub(crate) fn of(hash: BlockHash) -> Self {
        // Salted, because clients choose the hashed contents.
        static SALT: LazyLock<u64> = LazyLock::new(random);
        Self(spread(hash.0 ^ *SALT))
    }

    pub(crate) fn shard(self) -> usize {
        (self.0 >> (64 - PARTITION_BITS)) as usize
    }
}

/// Number of further engine hashes under which one source holds the same chain block.
type HashAliasCounts = FoldHashMap<(MixedBlockHash, u16, u8), u32>;

/// The blocks of one partition.
#[derive(Default)]
pub(crate) struct IndexShard {
    /// Maps each block to the set of its holders.
    blocks: BucketTable<PARTITION_BITS>,
    duplicates: Option<Box<HashAliasCounts>>,
}

impl IndexShard {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Prefetches what a lookup of `key` reads; see [`BucketTable::warm_cpu_cache`].
    pub(crate) fn warm_cpu_cache(&self, key: MixedBlockHash) -> u32 {
        self.blocks.warm_cpu_cache(key.0)
    }

    /// Returns the set of the block's holders.
    pub(crate) fn holders(&self, key: MixedBlockHash) -> HolderSetId {
        self.blocks.get(key.0).map_or(HolderSetId::NONE, HolderSetId)
    }

    pub(crate) fn hold(&mut self, key: MixedBlockHash, slot: u16, tier: Tier, sets: &mut HolderSets) {
        let Some(number) = self.blocks.get_mut(key.0) else {
            let mut holders = HolderSetId::NONE;
            sets.add(&mut holders, slot, tier);
            return self.blocks.insert(key.0, holders.0);
        };
        let mut holders = HolderSetId(*number);
        if sets.add(&mut holders, slot, tier) {
            *number = holders.0;
        } else {
            *self.duplicates.get_or_insert_default().entry((key, slot, plane(tier) as u8)).or_default() += 1;
        }
    }

    /// Removes a holder. Has no effect if it is none.
    pub(crate) fn release(&mut self, key: MixedBlockHash, slot: u16, tier: Tier, sets: &mut HolderSets) {
        if self.has_duplicates(key, slot, tier) {
            return;
        }
        let Some(number) = self.blocks.get_mut(key.0) else { return };
        let mut holders = HolderSetId(*number);
        sets.remove(&mut holders, slot, tier);
        *number = holders.0;
        if holders == HolderSetId::NONE {
            self.blocks.remove(key.0);
        }
    }

    /// Removes one of several engine hashes of the block; returns whether there were several, so that the block stays.
    fn has_duplicates(&mut self, key: MixedBlockHash, slot: u16, tier: Tier) -> bool {
        let Some(doubled) = &mut self.duplicates else { return false };
        let name = (key, slot, plane(tier) as u8);
        let Some(count) = doubled.get_mut(&name) else { return false };
        *count -= 1;
        if *count == 0 {
            doubled.remove(&name);
        }
        true
    }
}

#[cfg(test)]
mod tests;
