//! A part of the index: the blocks whose hashes begin alike. Parts are small, so that the growing of one keeps nobody
//! waiting.

use std::sync::LazyLock;

use vocabulary::{BlockHash, Tier};

use crate::bucket_table::{BucketTable, random, spread};
use crate::fold_hash::FoldHashMap;
use crate::holder_sets::{HolderSetId, HolderSets, plane};

/// A block's hash, spread evenly: its first bits say in which part of the index it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ShardKey(u64);

/// Bits that number the parts.
const PARTITION_BITS: u32 = 10;

impl ShardKey {
    pub(crate) const SHARDS: usize = 1 << PARTITION_BITS;

    pub(crate) fn of(hash: BlockHash) -> Self {
        // Clients choose what is hashed.
        static SALT: LazyLock<u64> = LazyLock::new(random);
        Self(spread(hash.0 ^ *SALT))
    }

    pub(crate) fn shard(self) -> usize {
        (self.0 >> (64 - PARTITION_BITS)) as usize
    }
}

/// Blocks that one source holds under several of its own names, beyond the first.
type DuplicateCounts = FoldHashMap<(ShardKey, u16, u8), u32>;

/// The blocks of one part.
#[derive(Default)]
pub(crate) struct IndexShard {
    /// The set of who holds each block.
    blocks: BucketTable<PARTITION_BITS>,
    duplicates: Option<Box<DuplicateCounts>>,
}

impl IndexShard {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Fetches what a look at `key` reads; see [`BucketTable::warm_cpu_cache`].
    pub(crate) fn warm_cpu_cache(&self, key: ShardKey) -> u32 {
        self.blocks.warm_cpu_cache(key.0)
    }

    /// The set of who holds the block.
    pub(crate) fn holders(&self, key: ShardKey) -> HolderSetId {
        self.blocks.get(key.0).map_or(HolderSetId::NONE, HolderSetId)
    }

    pub(crate) fn hold(&mut self, key: ShardKey, slot: u16, tier: Tier, sets: &mut HolderSets) {
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

    /// What is removed without being held is ignored.
    pub(crate) fn release(&mut self, key: ShardKey, slot: u16, tier: Tier, sets: &mut HolderSets) {
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

    /// Whether one of several names of the block went, and the block stays.
    fn has_duplicates(&mut self, key: ShardKey, slot: u16, tier: Tier) -> bool {
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
