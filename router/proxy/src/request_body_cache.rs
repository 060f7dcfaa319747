//! Request body cache: each session's last body, so that the next one is read from where it grew.
//!
//! The next body is compared with the bytes kept here; only what follows the last message that both have is validated,
//! scanned and hashed. Nothing is ever believed by a hash.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use prefix::{BytesCheckpoint, FairLru, KnownConversation};
use prometheus::IntGauge;
use vocabulary::TenantId;
use workers_shim::engine_api::{BodyGrowth, ScannedJson};
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::session_key::SessionKey;

/// Least length in bytes of a body that is kept: reading a smaller one costs less than a lookup.
pub const MIN_BODY: usize = 4 << 10;
/// Maximum bytes that are compared or hashed on a thread of the runtime, which takes up to 100 us.
pub const MAX_INLINE_COMPARISON: usize = 512 << 10;
/// Memory of a checkpoint by that of its body: an id of 16 bytes for each block, of 64 bytes by default.
const CHECKPOINT_SHARE: usize = 4;
/// Memory of an entry beside its body, its positions and its ids, in bytes.
const ENTRY: usize = 1 << 10;
/// A body may take one part in this many of the cache.
const MAX_SHARE: usize = 8;

/// Field whose list grows with each step of a conversation.
const CONVERSATION: &str = "messages";

/// A body, and what identifying its prompt has left for the next one.
#[derive(Debug)]
pub struct KnownBody {
    fields: Arc<ScannedJson>,
    checkpoint: OnceLock<BytesCheckpoint>,
    /// Whether a body under the same key did not continue it.
    was_missed: AtomicBool,
}

impl KnownBody {
    fn new(fields: Arc<ScannedJson>) -> Self {
        Self { fields, checkpoint: OnceLock::new(), was_missed: AtomicBool::new(false) }
    }

    /// Compares `body` with this one. Returns `None` where it does not continue this one's conversation, or this one is
    /// much longer: it is kept in memory until the step is identified.
    pub fn growth_to(&self, body: &[u8]) -> Option<BodyGrowth> {
        let is_comparable = self.fields.body().len() / 2 <= body.len();
        is_comparable.then(|| self.fields.growth_to(body, CONVERSATION)).flatten()
    }

    /// Records a body that does not continue this one; returns whether it is the first one. A session may send other
    /// requests between its steps, such as one for a title.
    fn record_miss(&self) -> bool {
        !self.was_missed.swap(true, Ordering::Relaxed)
    }

    /// Returns what its canonical bytes left for a body that has the same bytes up to `end`.
    fn conversation(&self, end: usize) -> Option<KnownConversation<'_>> {
        Some(KnownConversation { body: self.fields.body(), checkpoint: self.checkpoint.get()?, end })
    }

    /// Keeps what its canonical bytes leave, once.
    fn set_checkpoint(&self, checkpoint: BytesCheckpoint) {
        if checkpoint.memory_bytes() <= self.checkpoint_room() {
            let _ = self.checkpoint.set(checkpoint);
        }
    }

    fn checkpoint_room(&self) -> usize {
        self.fields.body().len() / CHECKPOINT_SHARE + ENTRY / 2
    }

    fn memory_bytes(&self) -> usize {
        self.fields.body().len() + self.fields.memory_bytes() + self.checkpoint_room() + ENTRY / 2
    }
}

/// Key of a body: a digest, by which it is only looked up. Two bodies with one digest miss each other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct BodyKey(u64);

/// Keys of a body, the most specific one last: the session's name in the headers, or else beginnings of the body whose
/// lengths double.
#[derive(Clone, Debug)]
pub struct BodyKeys(Vec<(usize, BodyKey)>);

impl BodyKeys {
    /// Returns the keys; none for a request without messages, a body that is not worth keeping, or one whose beginnings
    /// are too long to hash here.
    pub fn of(incoming: &ClientRequest, endpoint: GenerationEndpoint) -> Self {
        let has_messages = matches!(endpoint, GenerationEndpoint::ChatCompletions | GenerationEndpoint::Messages);
        if !has_messages || incoming.body.len() < MIN_BODY {
            return Self(Vec::new());
        }
        match SessionKey::find(&incoming.headers, None) {
            Some(key) => Self(vec![(0, BodyKey(xxh3_64(key.name.as_bytes())))]),
            None if incoming.body.len() <= MAX_INLINE_COMPARISON => Self::of_beginnings(&incoming.body),
            None => Self(Vec::new()),
        }
    }

    fn of_beginnings(body: &[u8]) -> Self {
        let (mut digest, mut hashed) = (Xxh3::new(), 0);
        let lengths = std::iter::successors(Some(MIN_BODY), |length| length.checked_mul(2));
        let keys = lengths.take_while(|length| *length <= body.len()).map(|length| {
            digest.update(&body[hashed..length]);
            hashed = length;
            (length, BodyKey(digest.digest()))
        });
        Self(keys.collect())
    }

    /// Returns the key under which a body is kept whose conversation ends at `end`: what follows may change.
    fn for_conversation(&self, end: usize) -> Option<BodyKey> {
        self.0.iter().rev().find(|(length, _)| *length <= end).map(|(_, key)| *key)
    }
}

/// The bodies, bounded in bytes over all tenants.
#[derive(Debug)]
pub struct RequestBodyCache {
    max_bytes: usize,
    bodies: Mutex<FairLru<TenantId, (TenantId, BodyKey), Arc<KnownBody>>>,
    memory: IntGauge,
}

impl RequestBodyCache {
    /// Creates a cache of at most `max_bytes`; with 0 nothing is kept.
    pub fn new(max_bytes: usize, memory: IntGauge) -> Self {
        Self { max_bytes, bodies: Mutex::new(FairLru::new(max_bytes)), memory }
    }

    /// Returns the body of the most specific key that has one.
    pub fn lookup(&self, tenant: &TenantId, keys: &BodyKeys) -> Option<Arc<KnownBody>> {
        if keys.0.is_empty() {
            return None;
        }
        let mut bodies = self.bodies.lock();
        keys.0.iter().rev().find_map(|(_, key)| bodies.get_mut(&(tenant.clone(), *key)).map(|body| body.clone()))
    }

    /// Keeps a body. Where it does not continue the one under its key (`is_grown`), it replaces that one only if the last
    /// body under the key did not either. Returns `None` where the body is not kept.
    pub fn insert(
        &self,
        tenant: &TenantId,
        keys: &BodyKeys,
        (fields, is_grown): (&Arc<ScannedJson>, bool),
    ) -> Option<Arc<KnownBody>> {
        let key = (tenant.clone(), keys.for_conversation(fields.list_end(CONVERSATION)?)?);
        let body = Arc::new(KnownBody::new(fields.clone()));
        let bytes = body.memory_bytes();
        if bytes > self.max_bytes / MAX_SHARE {
            return None;
        }
        let mut bodies = self.bodies.lock();
        if !is_grown && bodies.peek(&key).is_some_and(|known| known.record_miss()) {
            return None;
        }
        // Dropped after the lock: freeing takes time.
        let evicted = bodies.insert(tenant.clone(), key, (body.clone(), bytes));
        self.memory.set(bodies.bytes() as i64);
        drop(bodies);
        drop(evicted);
        Some(body)
    }

    /// Erases all bodies of a tenant.
    pub fn erase(&self, tenant: &TenantId) {
        let mut bodies = self.bodies.lock();
        let keys: Vec<_> = bodies.iter_owner(tenant).map(|(key, _)| key.clone()).collect();
        let erased: Vec<_> = keys.iter().filter_map(|key| bodies.remove(key)).collect();
        self.memory.set(bodies.bytes() as i64);
        drop(bodies);
        drop(erased);
    }
}

/// A step's body in the cache, and the one that it continues.
#[derive(Clone, Debug, Default)]
pub struct BodyLineage {
    previous: Option<(Arc<KnownBody>, usize)>,
    kept: Option<Arc<KnownBody>>,
}

impl BodyLineage {
    /// Creates the lineage of a body that was `kept` and has the same bytes as `previous` up to an offset. A previous
    /// body that has nothing for the identification is released.
    pub fn new(previous: Option<(Arc<KnownBody>, usize)>, kept: Option<Arc<KnownBody>>) -> Self {
        Self { previous: previous.filter(|(body, _)| body.checkpoint.get().is_some()), kept }
    }

    /// Returns how many of `bytes`, the length of the body, are new.
    pub fn new_bytes(&self, bytes: usize) -> usize {
        self.previous.as_ref().map_or(bytes, |(_, end)| bytes.saturating_sub(*end))
    }

    /// Returns the conversation that the step continues.
    pub fn conversation(&self) -> Option<KnownConversation<'_>> {
        let (previous, end) = self.previous.as_ref()?;
        previous.conversation(*end)
    }

    /// Keeps what the step's canonical bytes leave for the next step.
    pub fn set_checkpoint(&self, checkpoint: Option<BytesCheckpoint>) {
        if let (Some(kept), Some(checkpoint)) = (&self.kept, checkpoint) {
            kept.set_checkpoint(checkpoint);
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn body(messages: usize, filler: &str) -> Arc<ScannedJson> {
        let messages = vec![format!("{{\"role\":\"user\",\"content\":\"{filler}\"}}"); messages].join(",");
        Arc::new(ScannedJson::scan(Bytes::from(format!("{{\"messages\":[{messages}]}}")), &[]).unwrap())
    }

    fn tenant(name: &str) -> TenantId {
        TenantId(name.into())
    }

    fn cache(bytes: usize) -> RequestBodyCache {
        RequestBodyCache::new(bytes, IntGauge::new("memory", "memory").unwrap())
    }

    fn named(key: u64) -> BodyKeys {
        BodyKeys(vec![(0, BodyKey(key))])
    }

    #[test]
    fn a_body_is_found_by_its_tenant_and_session_only() {
        let (bodies, known) = (cache(1 << 20), body(2, "a"));
        bodies.insert(&tenant("a"), &named(1), (&known, true));
        assert!(bodies.lookup(&tenant("a"), &named(2)).is_none() && bodies.lookup(&tenant("b"), &named(1)).is_none());
        let found = bodies.lookup(&tenant("a"), &named(1)).unwrap();
        let growth = found.growth_to(body(3, "a").body()).unwrap();
        assert_eq!(growth.end(), known.body().len() - 2, "after the last message come only ]}}");
        assert!(found.growth_to(body(3, "b").body()).is_none());
        assert!(
            bodies.insert(&tenant("a"), &named(3), (&body(0, ""), true)).is_none(),
            "nothing can continue an empty list"
        );
    }

    #[test]
    fn an_unnamed_body_is_found_by_its_longest_known_beginning() {
        let keys = |body: &ScannedJson| BodyKeys::of_beginnings(body.body());
        let (bodies, filler) = (cache(1 << 20), "x".repeat(1000));
        let known = body(20, &filler);
        bodies.insert(&tenant("a"), &keys(&known), (&known, true));
        let found = bodies.lookup(&tenant("a"), &keys(&body(40, &filler))).unwrap();
        assert!(Arc::ptr_eq(&found.fields, &known));
        assert!(bodies.lookup(&tenant("a"), &keys(&body(20, &"y".repeat(1000)))).is_none());
        assert!(
            bodies.lookup(&tenant("a"), &keys(&body(8, &filler))).is_none(),
            "16 KiB of the known body are its key"
        );
        assert!(keys(&body(1, "short")).0.is_empty());
    }

    #[test]
    fn memory_is_bounded_and_a_small_tenant_keeps_its_body() {
        let large = body(100, &"x".repeat(100));
        let most = 16 * large.body().len();
        let bodies = cache(most);
        bodies.insert(&tenant("small"), &named(0), (&body(1, "a"), true));
        for key in 0..40 {
            bodies.insert(&tenant("large"), &named(key), (&large, true));
            assert!(bodies.memory.get() as usize <= most);
        }
        assert!(bodies.lookup(&tenant("small"), &named(0)).is_some());
        assert!(bodies.lookup(&tenant("large"), &named(39)).is_some());
        assert!(bodies.lookup(&tenant("large"), &named(0)).is_none());
        let none = cache(0);
        none.insert(&tenant("a"), &named(1), (&body(2, "a"), true));
        assert!(none.lookup(&tenant("a"), &named(1)).is_none() && none.memory.get() == 0);
    }

    #[test]
    fn a_body_is_replaced_by_the_second_one_in_a_row_that_does_not_continue_it() {
        let bodies = cache(1 << 20);
        let insert = |count: usize, is_grown: bool| {
            bodies.insert(&tenant("a"), &named(1), (&body(count, "a"), is_grown)).is_some()
        };
        assert!(insert(1, false), "there is none before");
        assert!(!insert(2, false) && insert(2, true) && !insert(3, false) && insert(3, false));
        assert!(
            bodies.insert(&tenant("a"), &named(2), (&body(2, "a"), false)).is_some(),
            "another key has none before"
        );
    }

    #[test]
    fn erasing_a_tenants_bodies_leaves_those_of_others() {
        let bodies = cache(1 << 20);
        for (name, key) in [("a", 1), ("a", 2), ("b", 1)] {
            bodies.insert(&tenant(name), &named(key), (&body(2, "a"), true));
        }
        bodies.erase(&tenant("a"));
        assert!(bodies.lookup(&tenant("a"), &named(1)).is_none() && bodies.lookup(&tenant("a"), &named(2)).is_none());
        assert!(bodies.lookup(&tenant("b"), &named(1)).is_some() && bodies.memory.get() > 0);
        bodies.erase(&tenant("b"));
        assert_eq!(bodies.memory.get(), 0);
    }

    #[test]
    fn a_much_longer_body_is_not_compared_and_one_that_would_fill_the_cache_is_not_kept() {
        let (long, short) = (body(100, "a"), body(10, "a"));
        assert!(KnownBody::new(long.clone()).growth_to(short.body()).is_none());
        assert!(KnownBody::new(short).growth_to(long.body()).is_some());
        assert!(cache(2 * long.body().len()).insert(&tenant("a"), &named(1), (&long, true)).is_none());
    }
}
