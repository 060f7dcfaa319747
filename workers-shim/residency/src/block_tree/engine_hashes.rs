//! Maps engine hashes to nodes. Partitioned, so that growing one partition takes little time and its old memory can be
//! reused for the next one.

use crate::bucket_table::{BucketTable, gather, random, spread};
use crate::kv_event::EngineHash;

/// Bits of the partition number.
const PARTITION_BITS: u32 = 8;

pub(super) struct EngineHashTable {
    parts: Box<[BucketTable<PARTITION_BITS>]>,
    len: usize,
    /// Random for each table, so that nobody can choose hashes that collide, and so that a table filled in the order of
    /// another one does not fill up from one end.
    salt: u64,
}

impl Default for EngineHashTable {
    fn default() -> Self {
        let parts = std::iter::repeat_with(BucketTable::default).take(1 << PARTITION_BITS).collect();
        Self { parts, len: 0, salt: random() }
    }
}

impl EngineHashTable {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    fn partition(&self, name: EngineHash) -> (usize, u64) {
        let hash = spread(name.0 ^ self.salt);
        ((hash >> (u64::BITS - PARTITION_BITS)) as usize, hash)
    }

    pub(super) fn get(&self, name: EngineHash) -> Option<u32> {
        let (part, hash) = self.partition(name);
        self.parts[part].get(hash)
    }

    /// See [`BucketTable::warm_cpu_cache`].
    pub(super) fn warm_cpu_cache(&self, name: EngineHash) -> u32 {
        let (part, hash) = self.partition(name);
        self.parts[part].warm_cpu_cache(hash)
    }

    /// Adds a hash that is not in the table.
    pub(super) fn insert(&mut self, name: EngineHash, at: u32) {
        let (part, hash) = self.partition(name);
        self.parts[part].insert(hash, at);
        self.len += 1;
    }

    pub(super) fn remove(&mut self, name: EngineHash) {
        let (part, hash) = self.partition(name);
        self.parts[part].remove(hash);
        self.len -= 1;
    }

    /// Applies new node indexes after compaction.
    pub(super) fn renumber(&mut self, numbers: &[u32]) {
        self.parts.iter_mut().for_each(|part| part.renumber(numbers));
    }

    /// Iterates over hashes and the nodes of their blocks.
    pub(super) fn entries(&self) -> impl Iterator<Item = (EngineHash, u32)> {
        let name = |(hash, at): (u64, u32)| (EngineHash(gather(hash) ^ self.salt), at);
        self.parts.iter().flat_map(BucketTable::entries).map(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_hashes_are_found_listed_and_placed_differently_per_table() {
        let (mut names, mut others) = (EngineHashTable::default(), EngineHashTable::default());
        let all: Vec<EngineHash> = (0..5000).map(|n| EngineHash(n << 50 | n)).collect();
        for (at, name) in (0..).zip(&all) {
            names.insert(*name, at);
            others.insert(*name, at);
        }
        assert!((0..).zip(&all).all(|(at, name)| names.get(*name) == Some(at)));
        let entries = |names: &EngineHashTable| names.entries().collect::<Vec<_>>();
        let (mut one, mut other) = (entries(&names), entries(&others));
        assert_ne!(one, other);
        one.sort_unstable();
        other.sort_unstable();
        let mut expected: Vec<_> = all.iter().copied().zip(0..).collect();
        expected.sort_unstable();
        assert_eq!((&one, &other), (&expected, &expected));
        all.iter().for_each(|name| names.remove(*name));
        assert_eq!((names.len(), names.entries().count()), (0, 0));
    }
}
