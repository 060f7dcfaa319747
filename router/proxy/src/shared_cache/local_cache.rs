//! Local memory of the shared cache: bounded in bytes; evicts the least recently used value of the tenant that holds
//! most. Pure: time is an argument.

use std::time::{Duration, Instant};

use bytes::Bytes;
use prefix::FairLru;
use vocabulary::TenantId;

use super::key::{CacheEntryKind, CacheKey};

/// Approximate size of an entry without its names and value.
const ENTRY_OVERHEAD_BYTES: usize = 192;

/// Where a value came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ValueOrigin {
    /// This router created it, and wrote it to Redis.
    Local,
    /// It was read from Redis.
    Shared,
}

/// A value with its time to live.
#[derive(Clone, Debug)]
pub(super) struct CachedValue {
    pub(super) value: Bytes,
    pub(super) ttl: Duration,
    pub(super) origin: ValueOrigin,
}

#[derive(Debug)]
pub(super) struct LocalCache {
    limit: usize,
    entries: FairLru<TenantId, CacheKey, LocalCacheEntry>,
}

#[derive(Debug)]
struct LocalCacheEntry {
    cached: CachedValue,
    expires: Instant,
}

impl LocalCache {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: FairLru::new(limit) }
    }

    /// Approximate size of all entries, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.entries.bytes()
    }

    /// Returns the value of `key`; marks it as recently used and restarts its time to live.
    pub(super) fn get(&mut self, key: &CacheKey, now: Instant) -> Option<Bytes> {
        let entry = self.entries.get_mut(key)?;
        if entry.expires <= now {
            self.remove(key);
            return None;
        }
        entry.expires = now + entry.cached.ttl;
        Some(entry.cached.value.clone())
    }

    /// Stores a value, unless it is larger than a quarter of the limit.
    pub(super) fn put(&mut self, key: CacheKey, held: CachedValue, now: Instant) {
        self.remove(&key);
        let size = entry_size(&key, &held.value);
        if size > self.limit / 4 {
            return;
        }
        let entry = LocalCacheEntry { expires: now + held.ttl, cached: held };
        self.entries.insert(key.tenant.clone(), key, (entry, size));
    }

    pub(super) fn remove(&mut self, key: &CacheKey) {
        self.entries.remove(key);
    }

    /// Returns the entries that hold this tenant's texts, or their locations.
    pub(super) fn of_tenant(&self, tenant: &TenantId) -> Vec<(CacheKey, Bytes)> {
        let is_kept = |key: &CacheKey| {
            matches!(key.kind, CacheEntryKind::ResponseWorker | CacheEntryKind::Transcript | CacheEntryKind::Checkpoint)
        };
        let entries = self.entries.iter_owner(tenant).filter(|(key, _)| is_kept(key));
        entries.map(|(key, entry)| (key.clone(), entry.cached.value.clone())).collect()
    }

    /// Returns the unexpired values that this router created, newest first per tenant, with their remaining time to
    /// live.
    pub(super) fn local_values(&self, now: Instant) -> Vec<(CacheKey, CachedValue)> {
        let entries = self.entries.iter().filter_map(|(key, entry)| {
            let ttl = entry.expires.checked_duration_since(now)?;
            (entry.cached.origin == ValueOrigin::Local)
                .then(|| (key.clone(), CachedValue { ttl, ..entry.cached.clone() }))
        });
        entries.collect()
    }
}

fn entry_size(key: &CacheKey, value: &Bytes) -> usize {
    ENTRY_OVERHEAD_BYTES + 2 * (key.name.len() + key.tenant.0.len()) + value.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn key(name: &str) -> CacheKey {
        CacheKey::new(CacheEntryKind::ResponseWorker, &TenantId("t".into()), name)
    }

    fn cached(bytes: usize) -> CachedValue {
        CachedValue { value: vec![7; bytes].into(), ttl: TTL, origin: ValueOrigin::Local }
    }

    #[test]
    fn the_least_recently_used_entry_is_evicted_first() {
        let now = Instant::now();
        let mut memory = LocalCache::new(10 * entry_size(&key("a"), &cached(100).value));
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
            .iter()
            .for_each(|name| memory.put(key(name), cached(100), now));
        assert!(memory.get(&key("a"), now).is_some());
        memory.put(key("k"), cached(100), now);
        assert!(memory.get(&key("a"), now).is_some());
        assert!(memory.get(&key("b"), now).is_none());
    }

    #[test]
    fn an_entry_expires_when_unused_for_its_ttl() {
        let start = Instant::now();
        let mut memory = LocalCache::new(1 << 20);
        memory.put(key("a"), cached(1), start);
        assert!(memory.get(&key("a"), start + TTL / 2).is_some());
        assert!(memory.get(&key("a"), start + TTL).is_some(), "it was used meanwhile");
        assert!(memory.get(&key("a"), start + TTL * 2).is_none());
        assert_eq!(memory.bytes(), 0);
    }

    #[test]
    fn an_oversized_value_does_not_evict_the_others() {
        let now = Instant::now();
        let mut memory = LocalCache::new(4096);
        memory.put(key("a"), cached(10), now);
        memory.put(key("b"), cached(4000), now);
        assert!(memory.get(&key("a"), now).is_some());
        assert!(memory.get(&key("b"), now).is_none());
    }

    #[test]
    fn only_locally_written_values_are_resent() {
        let now = Instant::now();
        let mut memory = LocalCache::new(1 << 20);
        memory.put(key("a"), cached(1), now);
        memory.put(key("b"), CachedValue { origin: ValueOrigin::Shared, ..cached(1) }, now);
        memory.put(key("c"), cached(1), now);
        let ours = memory.local_values(now + TTL / 2);
        let names: Vec<_> = ours.iter().map(|(key, held)| (&*key.name, held.ttl)).collect();
        assert_eq!(names, [("c", TTL / 2), ("a", TTL / 2)]);
        assert_eq!(memory.local_values(now + TTL * 2).len(), 0);
    }

    proptest! {
        #[test]
        fn the_local_cache_stays_within_its_limit_and_counts_correctly(
            steps in prop::collection::vec((0u8..3, "[a-f]", 0usize..600), 0..200),
        ) {
            let now = Instant::now();
            let mut memory = LocalCache::new(3000);
            for (step, name, bytes) in steps {
                match step {
                    0 => memory.put(key(&name), cached(bytes), now),
                    1 => drop(memory.get(&key(&name), now)),
                    _ => memory.remove(&key(&name)),
                }
                let counted: usize = memory.entries.iter().map(|(key, entry)| entry_size(key, &entry.cached.value)).sum();
                prop_assert_eq!(memory.bytes(), counted);
                prop_assert!(memory.bytes() <= 3000);
            }
        }
    }
}
