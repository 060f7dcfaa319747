//! Hash table from hashes to `u32` values, in buckets of five entries. Each bucket is one cache line.
//!
//! An entry whose bucket is full overflows to the next one with room, and every bucket passed on the way counts it, so
//! a search ends at the first bucket without overflow. Inserting, finding and removing nearly always touch one cache
//! line and move no entries. Keys chosen by others must be mixed with a secret salt.

use std::hash::{BuildHasher, RandomState};

/// Returns a random number that is secret to this process.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(())
}

/// Spreads a hash or a counter over the high bits. Bijective.
pub(crate) fn spread(hash: u64) -> u64 {
    hash.wrapping_mul(SPREAD_FACTOR)
}

/// Inverts [`spread`].
pub(crate) fn gather(spread: u64) -> u64 {
    spread.wrapping_mul(SPREAD_INVERSE)
}

const SPREAD_FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
/// The inverse of `SPREAD_FACTOR` modulo 2^64.
const SPREAD_INVERSE: u64 = 0xF1DE_83E1_9937_733D;

const SLOTS: usize = 5;
/// Number of buckets down to which a table shrinks.
const MIN_BUCKETS: usize = 2;

/// One bucket; the used slots come first.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct HashBucket {
    hashes: [u64; SLOTS],
    values: [u32; SLOTS],
    /// Number of entries in this bucket, plus [`OVERFLOW_UNIT`] times the number of entries that passed it on overflow.
    counts: u32,
}

const OVERFLOW_UNIT: u32 = 1 << 3;

impl HashBucket {
    const EMPTY: Self = Self { hashes: [0; SLOTS], values: [0; SLOTS], counts: 0 };

    fn len(&self) -> usize {
        (self.counts % OVERFLOW_UNIT) as usize
    }

    fn find(&self, hash: u64) -> Option<usize> {
        // Compares all slots, because a constant number of comparisons can be vectorised; matches in free slots are
        // ignored.
        self.hashes.iter().position(|its| *its == hash).filter(|slot| *slot < self.len())
    }

    /// Adds an entry; returns false if there is no room.
    fn push(&mut self, hash: u64, value: u32) -> bool {
        let slot = self.len();
        if slot == SLOTS {
            return false;
        }
        (self.hashes[slot], self.values[slot]) = (hash, value);
        self.counts += 1;
        true
    }

    fn take(&mut self, slot: usize) {
        let last = self.len() - 1;
        (self.hashes[slot], self.values[slot]) = (self.hashes[last], self.values[last]);
        self.counts -= 1;
    }

    fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        self.hashes.into_iter().zip(self.values).take(self.len())
    }
}

/// Maps hashes to `u32` values. The hashes must be equal in their first `SKIPPED` bits and evenly distributed in the
/// others.
#[derive(Default)]
pub(crate) struct BucketTable<const SKIPPED: u32> {
    buckets: Vec<HashBucket>,
    len: usize,
}

impl<const SKIPPED: u32> BucketTable<SKIPPED> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    fn home_bucket(&self, hash: u64) -> usize {
        ((u128::from(hash << SKIPPED) * self.buckets.len() as u128) >> 64) as usize
    }

    fn next_bucket(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Reads from the first bucket of a search for `hash`. Doing this for many hashes first lets the processor prefetch
    /// them in parallel.
    pub(crate) fn warm_cpu_cache(&self, hash: u64) -> u32 {
        self.buckets.get(self.home_bucket(hash)).map_or(0, |bucket| bucket.counts)
    }

    fn locate(&self, hash: u64) -> Option<(usize, usize)> {
        let mut at = self.home_bucket(hash);
        // Every bucket may have overflowed.
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            if let Some(slot) = bucket.find(hash) {
                return Some((at, slot));
            }
            if bucket.counts < OVERFLOW_UNIT {
                return None;
            }
            at = self.next_bucket(at);
        }
        None
    }

    pub(crate) fn get(&self, hash: u64) -> Option<u32> {
        self.locate(hash).map(|(bucket, slot)| self.buckets[bucket].values[slot])
    }

    /// Returns a mutable reference to the value.
    pub(crate) fn get_mut(&mut self, hash: u64) -> Option<&mut u32> {
        self.locate(hash).map(|(bucket, slot)| &mut self.buckets[bucket].values[slot])
    }

    /// Adds a hash that is not in the table.
    pub(crate) fn insert(&mut self, hash: u64, value: u32) {
        let capacity = self.buckets.len() * SLOTS;
        if self.len >= capacity - capacity / 8 {
            self.resize(self.buckets.len() + self.buckets.len() / 2 + 1);
        }
        self.len += 1;
        self.put(hash, value);
    }

    fn put(&mut self, hash: u64, value: u32) {
        let mut at = self.home_bucket(hash);
        loop {
            let bucket = &mut self.buckets[at];
            if bucket.push(hash, value) {
                return;
            }
            bucket.counts += OVERFLOW_UNIT;
            at = self.next_bucket(at);
        }
    }

    pub(crate) fn remove(&mut self, hash: u64) {
        let Some((found, slot)) = self.locate(hash) else { return };
        let mut at = self.home_bucket(hash);
        while at != found {
            self.buckets[at].counts -= OVERFLOW_UNIT;
            at = self.next_bucket(at);
        }
        self.buckets[found].take(slot);
        self.len -= 1;
        // A quarter full; after shrinking it is half full, far from growing again.
        if self.buckets.len() > MIN_BUCKETS && self.len < self.buckets.len() * SLOTS / 4 {
            self.resize(self.buckets.len() / 2);
        }
    }

    /// Replaces every value `n` by `numbers[n]`.
    pub(crate) fn renumber(&mut self, numbers: &[u32]) {
        for bucket in &mut self.buckets {
            let len = bucket.len();
            bucket.values[..len].iter_mut().for_each(|value| *value = numbers[*value as usize]);
        }
    }

    pub(crate) fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        self.buckets.iter().flat_map(HashBucket::entries)
    }

    /// Rebuilds the table in one pass that reads and writes memory in the same order.
    #[cold]
    fn resize(&mut self, buckets: usize) {
        let old = std::mem::replace(&mut self.buckets, vec![HashBucket::EMPTY; buckets]);
        for bucket in &old {
            for slot in 0..bucket.len() {
                self.put(bucket.hashes[slot], bucket.values[slot]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bucket_table_agrees_with_a_map(
            // Few hashes, clustered at both ends, so that they overflow to other buckets, also past the last one.
            steps in proptest::collection::vec((0u64..60, any::<u32>(), prop::bool::weighted(0.7)), 1..600),
        ) {
            let (mut table, mut map) = (BucketTable::<4>::default(), BTreeMap::new());
            for (hash, value, add) in steps {
                let hash = if hash < 20 { hash } else { (u64::MAX >> 4) - (hash - 20) };
                match (add, map.contains_key(&hash)) {
                    (true, false) => table.insert(hash, value),
                    (true, true) => *table.get_mut(hash).unwrap() = value,
                    (false, _) => table.remove(hash),
                }
                if add { map.insert(hash, value) } else { map.remove(&hash) };
                prop_assert_eq!(table.len(), map.len());
                let mut held: Vec<_> = table.entries().collect();
                held.sort_unstable();
                prop_assert_eq!(held, map.iter().map(|(hash, value)| (*hash, *value)).collect::<Vec<_>>());
                for hash in (0..20).chain((0..40).map(|n| (u64::MAX >> 4) - n)) {
                    prop_assert_eq!(table.get(hash), map.get(&hash).copied());
                }
            }
            let numbers: Vec<u32> = (0..=u8::MAX).map(|n| u32::from(n) * 3).collect();
            map.values_mut().for_each(|value| *value %= 256);
            map.iter().for_each(|(hash, value)| *table.get_mut(*hash).unwrap() = *value);
            table.renumber(&numbers);
            prop_assert!(map.iter().all(|(hash, value)| table.get(*hash) == Some(value * 3)));
            map.keys().for_each(|hash| table.remove(*hash));
            prop_assert!(table.buckets.iter().all(|bucket| bucket.counts == 0), "nothing is left of what went on");
            prop_assert!(table.buckets.capacity() <= MIN_BUCKETS);
        }
    }

    #[test]
    fn many_entries_are_found_in_few_buckets() {
        let mut table = BucketTable::<0>::default();
        let hashes: Vec<u64> = (1..100_000).map(spread).collect();
        hashes.iter().zip(0..).for_each(|(hash, n)| table.insert(*hash, n));
        assert!(hashes.iter().zip(0..).all(|(hash, n)| table.get(*hash) == Some(n)));
        assert_eq!((size_of::<HashBucket>(), align_of::<HashBucket>()), (64, 64));
        assert!(table.buckets.capacity() < 29_000, "{}", table.buckets.capacity());
        hashes[..50_000].iter().for_each(|hash| table.remove(*hash));
        assert!(hashes[..50_000].iter().all(|hash| table.get(*hash).is_none()));
        assert!(hashes[50_000..].iter().all(|hash| table.get(*hash).is_some()));
    }

    #[test]
    fn table_shrinks_after_removals() {
        let mut table = BucketTable::<0>::default();
        (1..100_000).for_each(|n| table.insert(spread(n), n as u32));
        (1..99_000).for_each(|n| table.remove(spread(n)));
        assert!((99_000..100_000).all(|n| table.get(spread(n)) == Some(n as u32)));
        assert!(table.buckets.capacity() < 1000, "{}", table.buckets.capacity());
        // Just after shrinking or before growing, single insertions and removals must not resize again.
        let mut sizes = std::collections::BTreeSet::new();
        for n in 1..10_000 {
            table.insert(spread(n), 0);
            table.remove(spread(n));
            sizes.insert(table.buckets.len());
        }
        assert_eq!(sizes.len(), 1, "{sizes:?}");
    }

    #[test]
    fn gather_inverts_spread() {
        assert!((0..64).map(|bit| 1 << bit).chain([0, 3, u64::MAX, 12345]).all(|n| gather(spread(n)) == n));
    }
}
