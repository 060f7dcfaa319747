//! What this router remembers itself: bounded by bytes, what the tenant that holds most used least recently goes first. Pure: time is an argument.

use std::time::{Duration, Instant};

use bytes::Bytes;
use prefix::FairLru;
use vocabulary::TenantId;

use super::key::{Key, Kind};

/// Bytes that an entry takes beside its names and value, about.
const ENTRY: usize = 192;

/// Where a value came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Origin {
    /// It was put here; Redis learned it from us.
    Ours,
    /// Redis had it.
    Shared,
}

/// A value with how long it holds.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) value: Bytes,
    pub(super) ttl: Duration,
    pub(super) origin: Origin,
}

#[derive(Debug)]
pub(super) struct Memory {
    limit: usize,
    entries: FairLru<TenantId, Key, Entry>,
}

#[derive(Debug)]
struct Entry {
    held: Held,
    expires: Instant,
}

impl Memory {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, entries: FairLru::new(limit) }
    }

    /// Of everything that is held, about.
    pub(super) fn bytes(&self) -> usize {
        self.entries.bytes()
    }

    /// The value of `key`; using it makes it newer, and it holds for its whole time again.
    pub(super) fn get(&mut self, key: &Key, now: Instant) -> Option<Bytes> {
        let entry = self.entries.get_mut(key)?;
        if entry.expires <= now {
            self.remove(key);
            return None;
        }
        entry.expires = now + entry.held.ttl;
        Some(entry.held.value.clone())
    }

    /// Puts a value; one that is larger than a quarter of everything is not kept.
    pub(super) fn put(&mut self, key: Key, held: Held, now: Instant) {
        self.remove(&key);
        let size = size(&key, &held.value);
        if size > self.limit / 4 {
            return;
        }
        let entry = Entry { expires: now + held.ttl, held };
        self.entries.put(key.tenant.clone(), key, (entry, size));
    }

    pub(super) fn remove(&mut self, key: &Key) {
        self.entries.remove(key);
    }

    /// What is held of this tenant's words, and where they are.
    pub(super) fn of_tenant(&self, tenant: &TenantId) -> Vec<(Key, Bytes)> {
        let is_kept = |key: &Key| matches!(key.kind, Kind::Maker | Kind::Transcript | Kind::Checkpoint);
        let kept = self.entries.of(tenant).filter(|(key, _)| is_kept(key));
        kept.map(|(key, entry)| (key.clone(), entry.held.value.clone())).collect()
    }

    /// What was put here and still holds, each tenant's newest first, with the time it has left.
    pub(super) fn ours(&self, now: Instant) -> Vec<(Key, Held)> {
        let held = self.entries.iter().filter_map(|(key, entry)| {
            let ttl = entry.expires.checked_duration_since(now)?;
            (entry.held.origin == Origin::Ours).then(|| (key.clone(), Held { ttl, ..entry.held.clone() }))
        });
        held.collect()
    }
}

fn size(key: &Key, value: &Bytes) -> usize {
    ENTRY + 2 * (key.name.len() + key.tenant.0.len()) + value.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn key(name: &str) -> Key {
        Key::new(Kind::Maker, &TenantId("t".into()), name)
    }

    fn held(bytes: usize) -> Held {
        Held { value: vec![7; bytes].into(), ttl: TTL, origin: Origin::Ours }
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let now = Instant::now();
        let mut memory = Memory::new(10 * size(&key("a"), &held(100).value));
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
            .iter()
            .for_each(|name| memory.put(key(name), held(100), now));
        assert!(memory.get(&key("a"), now).is_some());
        memory.put(key("k"), held(100), now);
        assert!(memory.get(&key("a"), now).is_some());
        assert!(memory.get(&key("b"), now).is_none());
    }

    #[test]
    fn a_value_goes_when_it_was_not_used_for_its_time() {
        let start = Instant::now();
        let mut memory = Memory::new(1 << 20);
        memory.put(key("a"), held(1), start);
        assert!(memory.get(&key("a"), start + TTL / 2).is_some());
        assert!(memory.get(&key("a"), start + TTL).is_some(), "it was used meanwhile");
        assert!(memory.get(&key("a"), start + TTL * 2).is_none());
        assert_eq!(memory.bytes(), 0);
    }

    #[test]
    fn one_huge_value_does_not_push_out_all_others() {
        let now = Instant::now();
        let mut memory = Memory::new(4096);
        memory.put(key("a"), held(10), now);
        memory.put(key("b"), held(4000), now);
        assert!(memory.get(&key("a"), now).is_some());
        assert!(memory.get(&key("b"), now).is_none());
    }

    #[test]
    fn only_what_was_put_here_is_ours() {
        let now = Instant::now();
        let mut memory = Memory::new(1 << 20);
        memory.put(key("a"), held(1), now);
        memory.put(key("b"), Held { origin: Origin::Shared, ..held(1) }, now);
        memory.put(key("c"), held(1), now);
        let ours = memory.ours(now + TTL / 2);
        let names: Vec<_> = ours.iter().map(|(key, held)| (&*key.name, held.ttl)).collect();
        assert_eq!(names, [("c", TTL / 2), ("a", TTL / 2)]);
        assert_eq!(memory.ours(now + TTL * 2).len(), 0);
    }

    proptest! {
        #[test]
        fn memory_stays_within_its_bound_and_counts_right(
            steps in prop::collection::vec((0u8..3, "[a-f]", 0usize..600), 0..200),
        ) {
            let now = Instant::now();
            let mut memory = Memory::new(3000);
            for (step, name, bytes) in steps {
                match step {
                    0 => memory.put(key(&name), held(bytes), now),
                    1 => drop(memory.get(&key(&name), now)),
                    _ => memory.remove(&key(&name)),
                }
                let counted: usize = memory.entries.iter().map(|(key, entry)| size(key, &entry.held.value)).sum();
                prop_assert_eq!(memory.bytes(), counted);
                prop_assert!(memory.bytes() <= 3000);
            }
        }
    }
}
