//! LRU cache of several owners with one bound in bytes. When it is full, the owner that holds most loses its least
//! recently used value, so an owner below an equal share never loses anything to another.

use std::collections::HashMap;
use std::hash::Hash;

use lru::LruCache;

/// Map bounded in bytes; see the module docs. Each value is charged the size given when it was inserted.
#[derive(Debug)]
pub struct FairLru<O, K: Hash + Eq, V> {
    shares: HashMap<O, OwnerShare<K, V>>,
    owners: HashMap<K, O>,
    bytes: usize,
    max_bytes: usize,
}

#[derive(Debug)]
struct OwnerShare<K: Hash + Eq, V> {
    values: LruCache<K, (V, usize)>,
    bytes: usize,
}

impl<O: Clone + Eq + Hash, K: Clone + Eq + Hash, V> FairLru<O, K, V> {
    /// Creates a map bounded to `max_bytes`.
    pub fn new(max_bytes: usize) -> Self {
        Self { shares: HashMap::new(), owners: HashMap::new(), bytes: 0, max_bytes }
    }

    /// Size of all values in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Returns whether the map is empty.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Returns whether the key exists, without counting as a use.
    pub fn contains(&self, key: &K) -> bool {
        self.owners.contains_key(key)
    }

    /// Returns the value and counts as a use.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let owner = self.owners.get(key)?;
        self.shares.get_mut(owner)?.values.get_mut(key).map(|(value, _)| value)
    }

    /// Returns the value without counting as a use.
    pub fn peek(&self, key: &K) -> Option<&V> {
        let owner = self.owners.get(key)?;
        self.shares.get(owner)?.values.peek(key).map(|(value, _)| value)
    }

    /// Replaces a value in place if the new size fits. Returns `false` if it does not fit or the key does not exist.
    pub fn replace(&mut self, key: &K, (value, bytes): (V, usize)) -> bool {
        let Some(share) = self.owners.get(key).and_then(|owner| self.shares.get_mut(owner)) else { return false };
        let Some((old, charged)) = share.values.peek_mut(key) else { return false };
        let rest = self.bytes - *charged;
        if rest + bytes > self.max_bytes {
            return false;
        }
        share.bytes = share.bytes - *charged + bytes;
        (*old, *charged) = (value, bytes);
        self.bytes = rest + bytes;
        true
    }

    /// Removes a value.
    pub fn remove(&mut self, key: &K) -> Option<V> {
        let owner = self.owners.remove(key)?;
        let share = self.shares.get_mut(&owner)?;
        let (value, bytes) = share.values.pop(key)?;
        share.bytes -= bytes;
        self.bytes -= bytes;
        if share.values.is_empty() {
            self.shares.remove(&owner);
        }
        Some(value)
    }

    /// Removes and returns the next value to evict.
    pub fn evict(&mut self) -> Option<(K, V)> {
        let largest = self.shares.values().max_by_key(|share| share.bytes)?;
        let key = largest.values.peek_lru().map(|(key, _)| key.clone())?;
        self.remove(&key).map(|value| (key, value))
    }

    /// Inserts a value, replacing one under the same key. Returns the evicted values; if the value is larger than the
    /// bound, it is returned itself.
    pub fn insert(&mut self, owner: O, key: K, (value, bytes): (V, usize)) -> Vec<(K, V)> {
        self.remove(&key);
        let mut gone = Vec::new();
        if bytes > self.max_bytes {
            return vec![(key, value)];
        }
        self.owners.insert(key.clone(), owner.clone());
        let share = self.shares.entry(owner).or_insert_with(|| OwnerShare { values: LruCache::unbounded(), bytes: 0 });
        share.values.put(key, (value, bytes));
        share.bytes += bytes;
        self.bytes += bytes;
        while self.bytes > self.max_bytes
            && let Some(evicted) = self.evict()
        {
            gone.push(evicted);
        }
        gone
    }

    /// Removes all values.
    pub fn clear(&mut self) {
        self.shares.clear();
        self.owners.clear();
        self.bytes = 0;
    }

    /// Returns one owner's values, most recently used first.
    pub fn iter_owner(&self, owner: &O) -> impl Iterator<Item = (&K, &V)> {
        let values = self.shares.get(owner).into_iter().flat_map(|share| &share.values);
        values.map(|(key, (value, _))| (key, value))
    }

    /// Returns all values, most recently used first per owner.
    pub fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        let values = self.shares.values().flat_map(|share| &share.values);
        values.map(|(key, (value, _))| (key, value))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn owner_within_its_share_is_not_evicted_by_a_larger_owner() {
        let mut lru = FairLru::new(100);
        for key in 0..4 {
            assert_eq!(lru.insert("small", key, ("s", 10)), []);
        }
        for key in 10..100 {
            lru.insert("large", key, ("l", 10));
        }
        assert_eq!(lru.iter_owner(&"small").count(), 4);
        assert_eq!(lru.iter_owner(&"large").map(|(key, _)| *key).collect::<Vec<_>>(), [99, 98, 97, 96, 95, 94]);
        lru.insert("small", 4, ("s", 10));
        assert_eq!(
            (lru.iter_owner(&"small").count(), lru.iter_owner(&"large").count()),
            (5, 5),
            "up to an equal share"
        );
    }

    #[test]
    fn single_owner_may_fill_the_cache_and_evicts_in_lru_order() {
        let mut lru = FairLru::new(30);
        (0..3).for_each(|key| drop(lru.insert("a", key, (key, 10))));
        assert_eq!(lru.get_mut(&0), Some(&mut 0));
        assert_eq!(lru.insert("a", 3, (3, 10)), [(1, 1)]);
        assert_eq!(lru.insert("a", 4, (4, 31)), [(4, 4)], "larger than everything");
        assert!(lru.replace(&0, (7, 5)) && !lru.replace(&0, (8, 20)) && !lru.replace(&9, (9, 1)));
        assert_eq!((lru.bytes(), lru.peek(&0)), (25, Some(&7)));
    }

    proptest! {
        #[test]
        fn byte_count_is_exact_and_within_the_limit(
            steps in prop::collection::vec((0u8..4, 0u16..40, 0usize..60), 1..200),
        ) {
            let mut lru = FairLru::new(200);
            for (owner, key, bytes) in steps {
                match bytes % 5 {
                    0 => drop(lru.remove(&key)),
                    1 => drop(lru.replace(&key, (bytes, bytes))),
                    _ => drop(lru.insert(owner, key, (bytes, bytes))),
                }
                prop_assert_eq!(lru.bytes(), lru.iter().map(|(_, bytes)| *bytes).sum::<usize>());
                prop_assert_eq!(lru.len(), lru.iter().count());
                prop_assert!(lru.bytes() <= 200);
                prop_assert!(lru.shares.values().all(|share| !share.values.is_empty()));
            }
        }
    }
}
