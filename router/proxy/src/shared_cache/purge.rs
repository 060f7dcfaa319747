//! Finds and deletes what is stored of one tenant, here and in Redis.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use redis::{FromRedisValue, Pipeline};
use tokio::task::spawn_blocking;
use vocabulary::TenantId;

use super::key::namespace_prefix;
use super::local_cache::{CachedValue, ValueOrigin};
use super::redis_client::RedisCallError;
use super::watch::{RedisWrite, WriteCondition};
use super::{CacheEntryKind, CacheKey, RedisBackend, SharedCache, SharedCacheInner};

/// Keys that Redis examines per SCAN call.
const SCAN_COUNT: usize = 512;
/// Limits for one batch of values: their bytes, and their number.
const BATCH_BYTES: usize = 1 << 20;
const MAX_BATCH: usize = 64;
/// Attempts before Redis counts as not answering.
const TRIES: usize = 3;
/// How often values are deleted again that a concurrent write has restored.
const PASSES: usize = 3;
/// Timeout for the whole purge.
const PURGE_TIMEOUT: Duration = Duration::from_secs(60);
/// Kinds that hold people's texts, or their locations.
const KINDS: [CacheEntryKind; 3] =
    [CacheEntryKind::ResponseWorker, CacheEntryKind::Transcript, CacheEntryKind::Checkpoint];

/// Redis did not answer, or did not forget in time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("Redis did not answer, or did not forget in time")]
pub struct PurgeError;

/// Number of deleted values, and of transcripts in Redis that could not be read to see whose they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PurgeCount {
    /// Values that were deleted.
    pub forgotten: usize,
    /// Values that could not be read.
    pub unread: usize,
}

impl SharedCache {
    /// Deletes everything that is currently stored of `tenant`, by its keys: no value is read, so values of another
    /// secret are deleted, too. The memory of other routers is not touched.
    pub(crate) async fn purge(&self, tenant: &TenantId) -> Result<PurgeCount, PurgeError> {
        let work = async {
            let mut keys: HashSet<CacheKey> =
                self.inner.local.lock().of_tenant(tenant).into_iter().map(|(key, _)| key).collect();
            if let Some(shared) = &self.inner.redis {
                keys.extend(shared.kept(tenant).await?.into_iter().map(|(key, _)| key));
            }
            Ok(PurgeCount { forgotten: self.forget_all(keys).await?, unread: 0 })
        };
        tokio::time::timeout(PURGE_TIMEOUT, work).await.map_err(|_| PurgeError)?
    }

    /// Deletes those of the tenant's values that `wanted` selects, given what `read` returns for each transcript.
    pub(crate) async fn purge_some<T: Send + 'static>(
        &self,
        tenant: &TenantId,
        read: fn(&[u8]) -> Option<T>,
        wanted: impl FnOnce(&[(CacheKey, Option<T>)]) -> Vec<CacheKey>,
    ) -> Result<PurgeCount, PurgeError> {
        let work = async {
            let here = self.inner.local.lock().of_tenant(tenant);
            let near = move || here.into_iter().map(|(key, value)| (key, read(&value))).collect();
            let mut found: Vec<_> = spawn_blocking(near).await.map_err(|_| PurgeError)?;
            let mut unread = 0;
            if let Some(shared) = &self.inner.redis {
                let (transcripts, others): (Vec<_>, Vec<_>) =
                    shared.kept(tenant).await?.into_iter().partition(|(key, _)| key.kind == CacheEntryKind::Transcript);
                found.extend(others.into_iter().map(|(key, _)| (key, None)));
                for batch in batches(transcripts) {
                    let (values, failed) = SharedCacheInner::read_batch(&self.inner, batch, read).await?;
                    found.extend(values);
                    unread += failed;
                }
            }
            let keys = wanted(&found).into_iter().collect();
            Ok(PurgeCount { forgotten: self.forget_all(keys).await?, unread })
        };
        tokio::time::timeout(PURGE_TIMEOUT, work).await.map_err(|_| PurgeError)?
    }

    /// Replaces each value by a tombstone, until none is left. Returns how many there were.
    async fn forget_all(&self, keys: HashSet<CacheKey>) -> Result<usize, PurgeError> {
        let count = keys.len();
        let mut left: Vec<CacheKey> = keys.into_iter().collect();
        for _ in 0..PASSES {
            left.iter().for_each(|key| self.inner.local.lock().remove(key));
            let Some(shared) = self.inner.redis.as_ref().filter(|_| !left.is_empty()) else { return Ok(count) };
            shared.mark(&left, self.inner.ttl).await?;
            // Queued writes are written before the next check.
            tokio::time::sleep(self.inner.timeout).await;
            left = shared.unmarked(left).await?.into_iter().map(|(key, _)| key).collect();
        }
        if left.is_empty() { Ok(count) } else { Err(PurgeError) }
    }
}

/// Groups keys into batches whose values are read at once.
fn batches(keys: Vec<(CacheKey, usize)>) -> Vec<Vec<CacheKey>> {
    let (mut batches, mut bytes) = (Vec::<Vec<CacheKey>>::new(), 0);
    for (key, size) in keys {
        match batches.last_mut().filter(|batch| batch.len() < MAX_BATCH && bytes + size <= BATCH_BYTES) {
            Some(batch) => batch.push(key),
            None => {
                batches.push(vec![key]);
                bytes = 0;
            }
        }
        bytes += size;
    }
    batches
}

impl SharedCacheInner {
    /// Returns what `read` returns for these values, and how many cannot be read. Tombstones are skipped.
    async fn read_batch<T: Send + 'static>(
        inner: &Arc<Self>,
        batch: Vec<CacheKey>,
        read: fn(&[u8]) -> Option<T>,
    ) -> Result<(Vec<(CacheKey, Option<T>)>, usize), PurgeError> {
        let Some(shared) = &inner.redis else { return Ok((Vec::new(), 0)) };
        let mut pipeline = redis::pipe();
        for key in &batch {
            let most = inner.max_value_bytes(key.kind) + super::value_cipher::OVERHEAD;
            pipeline.cmd("GETRANGE").arg(key.redis_key(&shared.namespace)).arg(0).arg(most);
        }
        let values: Vec<Vec<u8>> = shared.browse(&pipeline).await?;
        let inner = inner.clone();
        let work = move || {
            let (mut found, mut unread) = (Vec::new(), 0);
            let Some(shared) = &inner.redis else { return (found, unread) };
            // A value that is gone by now is empty.
            for (key, sealed) in batch.into_iter().zip(values).filter(|(_, sealed)| !sealed.is_empty()) {
                match inner.read(shared, key.kind, &key.redis_key(&shared.namespace), sealed) {
                    None => unread += 1,
                    Some(value) if value.is_empty() => {}
                    Some(value) => found.push((key, read(&value))),
                }
            }
            (found, unread)
        };
        spawn_blocking(work).await.map_err(|_| PurgeError)
    }
}

impl RedisBackend {
    /// Calls Redis with a few attempts: a scan takes long, and no request waits for it.
    async fn browse<T: FromRedisValue>(&self, pipeline: &Pipeline) -> Result<T, PurgeError> {
        for _ in 0..TRIES {
            match self.client.browse(pipeline).await {
                Ok(answer) => return Ok(answer),
                Err(RedisCallError::Failed(_)) => {}
                Err(RedisCallError::Skipped | RedisCallError::Foreign) => break,
            }
        }
        Err(PurgeError)
    }

    /// Returns the keys in Redis with texts of `tenant`, and the size of each value; without tombstones.
    async fn kept(&self, tenant: &TenantId) -> Result<Vec<(CacheKey, usize)>, PurgeError> {
        let prefixes = KINDS.map(|kind| (kind, CacheKey::new(kind, tenant, "").redis_key(&self.namespace)));
        let namespace = namespace_prefix(&self.namespace);
        let pattern = format!("{}:*:{}:{}:*", escape_glob(&namespace), tenant.0.len(), escape_glob(&tenant.0));
        let (mut keys, mut cursor) = (HashSet::new(), 0u64);
        loop {
            let mut pipeline = redis::pipe();
            pipeline.cmd("SCAN").arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(SCAN_COUNT);
            let ((next, page),): ((u64, Vec<String>),) = self.browse(&pipeline).await?;
            for name in &page {
                let of = prefixes.iter().find_map(|(kind, prefix)| Some((*kind, name.strip_prefix(prefix.as_str())?)));
                keys.extend(of.map(|(kind, rest)| CacheKey::new(kind, tenant, rest)));
            }
            cursor = next;
            if cursor == 0 {
                return self.unmarked(keys.into_iter().collect()).await;
            }
        }
    }

    /// Returns the keys for which Redis holds a value rather than a tombstone, with its size. A tombstone is recognised
    /// by its first byte and length.
    async fn unmarked(&self, keys: Vec<CacheKey>) -> Result<Vec<(CacheKey, usize)>, PurgeError> {
        let (version, length) = self.cipher.mark();
        let mut found = Vec::new();
        for page in keys.chunks(SCAN_COUNT) {
            let (mut sizes, mut begins) = (redis::pipe(), redis::pipe());
            for key in page {
                let name = key.redis_key(&self.namespace);
                sizes.cmd("STRLEN").arg(&name);
                begins.cmd("GETRANGE").arg(&name).arg(0).arg(0);
            }
            let sizes: Vec<usize> = self.browse(&sizes).await?;
            let begins: Vec<Vec<u8>> = self.browse(&begins).await?;
            for ((key, size), begin) in page.iter().zip(sizes).zip(begins) {
                let is_mark = size == length && begin == [version];
                if size > 0 && !is_mark {
                    found.push((key.clone(), size));
                }
            }
        }
        Ok(found)
    }

    async fn mark(&self, keys: &[CacheKey], ttl: Duration) -> Result<(), PurgeError> {
        for page in keys.chunks(SCAN_COUNT) {
            let tombstone = CachedValue { value: Bytes::new(), ttl, origin: ValueOrigin::Shared };
            let writes: Vec<RedisWrite> =
                page.iter().map(|key| RedisWrite { key: key.clone(), value: tombstone.clone() }).collect();
            if self.save(&writes, WriteCondition::Always).await != "stored" {
                return Err(PurgeError);
            }
        }
        Ok(())
    }
}

/// Escapes a text so that it matches only itself in a Redis glob pattern.
fn escape_glob(text: &str) -> String {
    let mut pattern = String::with_capacity(text.len());
    for letter in text.chars() {
        if matches!(letter, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            pattern.push('\\');
        }
        pattern.push(letter);
    }
    pattern
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_purge_erases_one_tenant_only() {
        let metrics = crate::telemetry::metrics::Metrics::default().shared_cache;
        let state = SharedCache::start(&Default::default(), ("c", &std::sync::Arc::default()), metrics).unwrap();
        let key = |kind, tenant: &str, name: &str| CacheKey::new(kind, &TenantId(tenant.into()), name);
        for tenant in ["a", "b"] {
            state.put(key(CacheEntryKind::Transcript, tenant, "resp_1"), Bytes::from_static(b"words"));
            state.put(key(CacheEntryKind::Checkpoint, tenant, "s"), Bytes::from_static(b"ids"));
            state.put(key(CacheEntryKind::QuotaCharge, tenant, "c"), Bytes::from_static(b"7"));
        }
        let purged = |forgotten| Ok(PurgeCount { forgotten, unread: 0 });
        assert_eq!(state.purge(&TenantId("a".into())).await, purged(2));
        assert_eq!(state.get_local(&key(CacheEntryKind::Transcript, "a", "resp_1")), None);
        assert_eq!(state.get_local(&key(CacheEntryKind::Checkpoint, "a", "s")), None);
        assert!(
            state.get_local(&key(CacheEntryKind::QuotaCharge, "a", "c")).is_some(),
            "what it owes is not forgotten"
        );
        assert!(state.get_local(&key(CacheEntryKind::Transcript, "b", "resp_1")).is_some());
        assert_eq!(state.purge(&TenantId("a".into())).await, purged(0));
        let transcripts = |kept: &[(CacheKey, Option<usize>)]| {
            let known = kept.iter().filter(|(_, length)| *length == Some(5));
            known.map(|(key, _)| key.clone()).collect::<Vec<_>>()
        };
        let some = state.purge_some(&TenantId("b".into()), |value| Some(value.len()), transcripts).await;
        assert_eq!(some, purged(1));
        assert_eq!(state.get_local(&key(CacheEntryKind::Transcript, "b", "resp_1")), None);
        assert!(state.get_local(&key(CacheEntryKind::Checkpoint, "b", "s")).is_some());
    }

    #[test]
    fn large_values_are_read_few_at_once() {
        let key = |n: usize| CacheKey::new(CacheEntryKind::Transcript, &TenantId("a".into()), &n.to_string());
        let sizes = |size: usize, count: usize| {
            let batches = batches((0..count).map(|n| (key(n), size)).collect());
            batches.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(BATCH_BYTES / 2, 5), [2, 2, 1]);
        assert_eq!(sizes(4 * BATCH_BYTES, 2), [1, 1]);
        assert_eq!(sizes(1, 100), [64, 36]);
    }

    #[test]
    fn glob_characters_in_a_name_are_escaped() {
        assert_eq!(escape_glob("a:[b]*?\\"), "a:\\[b\\]\\*\\?\\\\");
    }
}
