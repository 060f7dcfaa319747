//! Values of several owners within one bound of bytes. Where there is no room, the owner that holds most gives up what it
//! used least recently: nobody who holds less than an equal share loses anything to another.

use std::collections::HashMap;
use std::hash::Hash;

use lru::LruCache;

/// A map of bounded size; see the module. Each value is charged the bytes that it was put with.
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
    /// At most `bound` bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self { shares: HashMap::new(), owners: HashMap::new(), bytes: 0, max_bytes }
    }

    /// Bytes of all values.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Whether there is a value, which is not used by that.
    pub fn contains(&self, key: &K) -> bool {
        self.owners.contains_key(key)
    }

    /// The value, which is used by that.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let owner = self.owners.get(key)?;
        self.shares.get_mut(owner)?.values.get_mut(key).map(|(value, _)| value)
    }

    /// The value, which is not used by that.
    pub fn peek(&self, key: &K) -> Option<&V> {
        let owner = self.owners.get(key)?;
        self.shares.get(owner)?.values.peek(key).map(|(value, _)| value)
    }

    /// Exchanges a value in its place for one of as many bytes as there is room for; `false` where there is not, or no
    /// such value.
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

    /// Takes a value out.
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

    /// Takes the value out that has to go when one has to.
    pub fn evict(&mut self) -> Option<(K, V)> {
        let largest = self.shares.values().max_by_key(|share| share.bytes)?;
        let key = largest.values.peek_lru().map(|(key, _)| key.clone())?;
        self.remove(&key).map(|value| (key, value))
    }

    /// Puts a value in, in the place of one under the same key. Returns what had to go for it, which is the value itself
    /// where it is larger than everything.
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

    /// Takes all out.
    pub fn clear(&mut self) {
        self.shares.clear();
        self.owners.clear();
        self.bytes = 0;
    }

    /// One owner's values, the most recently used first.
    pub fn iter_owner(&self, owner: &O) -> impl Iterator<Item = (&K, &V)> {
        let values = self.shares.get(owner).into_iter().flat_map(|share| &share.values);
        values.map(|(key, (value, _))| (key, value))
    }

    /// All values: of each owner the most recently used first.
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
