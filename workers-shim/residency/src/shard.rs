//! A part of the index: the blocks whose hashes begin alike. Parts are small, so that the growing of one keeps nobody
//! waiting.

use std::sync::LazyLock;

use vocabulary::{BlockHash, Tier};

use crate::holders::{Number, Sets, plane};
use crate::mix::MixMap;
use crate::table::{Table, random, spread};

/// A block's hash, spread evenly: its first bits say in which part of the index it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

/// Bits that number the parts.
const PARTS: u32 = 10;

impl Key {
    pub(crate) const SHARDS: usize = 1 << PARTS;

    pub(crate) fn of(hash: BlockHash) -> Self {
        // Clients choose what is hashed.
        static SALT: LazyLock<u64> = LazyLock::new(random);
        Self(spread(hash.0 ^ *SALT))
    }

    pub(crate) fn shard(self) -> usize {
        (self.0 >> (64 - PARTS)) as usize
    }
}

/// Blocks that one source holds under several of its own names, beyond the first.
type Doubled = MixMap<(Key, u16, u8), u32>;

/// The blocks of one part.
#[derive(Default)]
pub(crate) struct Shard {
    /// The set of who holds each block.
    blocks: Table<PARTS>,
    doubled: Option<Box<Doubled>>,
}

impl Shard {
    pub(crate) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Fetches what a look at `key` reads; see [`Table::glance`].
    pub(crate) fn glance(&self, key: Key) -> u32 {
        self.blocks.glance(key.0)
    }

    /// The set of who holds the block.
    pub(crate) fn holders(&self, key: Key) -> Number {
        self.blocks.get(key.0).map_or(Number::NONE, Number)
    }

    pub(crate) fn hold(&mut self, key: Key, slot: u16, tier: Tier, sets: &mut Sets) {
        let Some(number) = self.blocks.get_mut(key.0) else {
            let mut holders = Number::NONE;
            sets.add(&mut holders, slot, tier);
            return self.blocks.insert(key.0, holders.0);
        };
        let mut holders = Number(*number);
        if sets.add(&mut holders, slot, tier) {
            *number = holders.0;
        } else {
            *self.doubled.get_or_insert_default().entry((key, slot, plane(tier) as u8)).or_default() += 1;
        }
    }

    /// What is removed without being held is ignored.
    pub(crate) fn drop_one(&mut self, key: Key, slot: u16, tier: Tier, sets: &mut Sets) {
        if self.is_doubled(key, slot, tier) {
            return;
        }
        let Some(number) = self.blocks.get_mut(key.0) else { return };
        let mut holders = Number(*number);
        sets.remove(&mut holders, slot, tier);
        *number = holders.0;
        if holders == Number::NONE {
            self.blocks.remove(key.0);
        }
    }

    /// Whether one of several names of the block went, and the block stays.
    fn is_doubled(&mut self, key: Key, slot: u16, tier: Tier) -> bool {
        let Some(doubled) = &mut self.doubled else { return false };
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
