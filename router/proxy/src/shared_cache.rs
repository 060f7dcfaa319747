//! Shared cache: data that makes requests cheaper and whose loss breaks nothing. Kept in local memory, and in Redis
//! behind it where several routers share it.
//!
//! A Redis that is slow, unreachable, flushed or corrupt counts as a cache miss and is reported; a request waits for it
//! no longer than its timeout. Nothing is looked up across tenants: the tenant is part of every key.

mod breaker;
mod config;
mod key;
mod local_cache;
mod purge;
mod redis_client;
mod value_cipher;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ownership::SupervisedTasks;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;

use self::key::namespace_prefix;
use crate::telemetry::shared_cache_metrics::SharedCacheMetrics;
pub use breaker::SharedCacheHealth;
pub use config::{RedisUrl, SharedCacheConfig};
pub use key::{CacheEntryKind, CacheKey};
use local_cache::{CachedValue, LocalCache, ValueOrigin};
pub use purge::{PurgeCount, PurgeError};
use redis_client::RedisClient;
use value_cipher::ValueCipher;
use watch::{RedisWrite, RedisWriteQueue};

/// How a lookup ends that found a mark in place of a value.
const TOMBSTONE_OUTCOME: &str = "deleted";

/// The cache of this router, local or shared with other routers.
#[derive(Debug)]
pub struct SharedCache {
    inner: Arc<SharedCacheInner>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct SharedCacheInner {
    local: Mutex<LocalCache>,
    redis: Option<RedisBackend>,
    ttl: Duration,
    timeout: Duration,
    transcript_limit: usize,
    /// Number of routers that share the cache, as last reported by Redis.
    routers_seen: AtomicU32,
    metrics: SharedCacheMetrics,
}

/// The connection to Redis, and how values are stored there.
#[derive(Debug)]
struct RedisBackend {
    client: RedisClient,
    cipher: ValueCipher,
    namespace: String,
    writes: RedisWriteQueue,
    /// Whether Redis may lack values that this router holds.
    unsynced: AtomicBool,
    /// Whether another router of the namespace encrypts with another secret.
    other_secret: AtomicBool,
}

/// The address of Redis cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("shared_cache.redis_url: {address} cannot be used: {reason}")]
pub struct RedisUrlError {
    address: String,
    reason: String,
}

impl RedisUrlError {
    fn of(url: &RedisUrl, error: &redis::RedisError) -> Self {
        Self { address: url.address().to_owned(), reason: error.to_string() }
    }
}

impl SharedCache {
    /// Checks whether the address of Redis can be used, before the ledger is opened. Does not connect.
    pub fn check(config: &SharedCacheConfig) -> Result<(), RedisUrlError> {
        let Some(url) = &config.redis_url else { return Ok(()) };
        redis_client::check(url).map_err(|error| RedisUrlError::of(url, &error))
    }

    /// Starts the cache: local memory works at once, Redis as soon as it answers. `cluster` is the namespace of the
    /// keys where none is configured.
    pub fn start(
        config: &SharedCacheConfig,
        (cluster, supervision): (&str, &Arc<SupervisedTasks>),
        metrics: SharedCacheMetrics,
    ) -> Result<Self, RedisUrlError> {
        metrics.set_health(None);
        let (writes, waiting) = RedisWriteQueue::new();
        let shared = match &config.redis_url {
            None => None,
            Some(url) => {
                let link =
                    RedisClient::new(url, config, metrics.clone()).map_err(|error| RedisUrlError::of(url, &error))?;
                let namespace = config.key_prefix.clone().unwrap_or_else(|| cluster.to_owned());
                if url.is_exposed() {
                    let redis = url.address();
                    tracing::warn!(
                        redis,
                        "Redis is reached over the network without TLS: anyone on the network path can read its password and change its values. Set shared_cache.redis_url to a rediss:// URL"
                    );
                }
                if config.allow_plaintext {
                    tracing::warn!(
                        redis = url.address(),
                        "shared_cache.allow_plaintext: prompts and answers are stored in Redis unencrypted. Set shared_cache.encryption_secret"
                    );
                }
                let sealer = ValueCipher::new(config.encryption_secret.as_ref());
                Some(RedisBackend {
                    client: link,
                    cipher: sealer,
                    namespace,
                    writes,
                    unsynced: AtomicBool::new(false),
                    other_secret: AtomicBool::new(false),
                })
            }
        };
        let inner = Arc::new(SharedCacheInner {
            local: Mutex::new(LocalCache::new(config.memory_limit.0)),
            redis: shared,
            ttl: config.ttl.0,
            timeout: config.timeout.0,
            transcript_limit: config.max_transcript_size.0,
            routers_seen: AtomicU32::new(1),
            metrics,
        });
        let tasks = match inner.redis {
            Some(_) => {
                let (watched, written) = (inner.clone(), (inner.clone(), Arc::new(AsyncMutex::new(waiting))));
                vec![
                    supervision.supervise("redis_watch", move || watch::watch(watched.clone())),
                    supervision.supervise("redis_writes", move || {
                        let (inner, waiting) = written.clone();
                        async move { watch::write_all(inner, &mut *waiting.lock().await).await }
                    }),
                ]
            }
            None => Vec::new(),
        };
        Ok(Self { inner, tasks })
    }

    /// Returns the health of Redis; `None` where none is configured.
    pub fn health(&self) -> Option<SharedCacheHealth> {
        self.inner.redis.as_ref().map(|shared| shared.client.health())
    }

    /// Returns the health of Redis if it is not up: for receipts and probes.
    pub fn degraded_health(&self) -> Option<SharedCacheHealth> {
        self.health().filter(|standing| *standing != SharedCacheHealth::Up)
    }

    /// Whether values of other routers cannot be read here because they use another secret.
    pub fn has_other_secret(&self) -> bool {
        self.inner.redis.as_ref().is_some_and(|shared| shared.other_secret.load(Ordering::Relaxed))
    }

    /// Longest time until a value that another router has just put is found here; `None` where nothing is shared.
    pub fn max_propagation_delay(&self) -> Option<Duration> {
        self.inner.redis.as_ref().map(|_| self.inner.timeout)
    }

    /// Timeout for operations that call Redis several times.
    pub fn multi_call_timeout(&self) -> Duration {
        self.inner.timeout * 10
    }

    /// Approximate size of the local memory, in bytes.
    pub fn bytes(&self) -> usize {
        self.inner.local.lock().bytes()
    }

    /// Largest transcript that is kept, in bytes.
    pub fn transcript_limit(&self) -> usize {
        self.inner.transcript_limit
    }

    /// Returns the value of `key` from local memory only.
    pub fn get_local(&self, key: &CacheKey) -> Option<Bytes> {
        let value = self.inner.local.lock().get(key, Instant::now())?;
        self.inner.metrics.count_lookup(key.kind, "local_hit");
        Some(value)
    }

    /// Returns the value of `key` from local memory, else from Redis within the timeout.
    pub async fn get(&self, key: &CacheKey) -> Option<Bytes> {
        if let Some(value) = self.get_local(key) {
            return Some(value);
        }
        let (outcome, value) = match &self.inner.redis {
            None => ("miss", None),
            Some(_) if !key.is_cacheable() => ("miss", None),
            Some(shared) => self.inner.fetch(shared, key).await,
        };
        self.inner.metrics.count_lookup(key.kind, outcome);
        value
    }

    /// Returns the value of `key` as all routers see it, for values that one of them may have deleted: from Redis, and
    /// from local memory only where Redis has neither value nor tombstone.
    pub async fn get_shared(&self, key: &CacheKey) -> Option<Bytes> {
        let Some(shared) = self.inner.redis.as_ref().filter(|_| key.is_cacheable()) else { return self.get_local(key) };
        let (outcome, value) = self.inner.fetch(shared, key).await;
        self.inner.metrics.count_lookup(key.kind, outcome);
        match value {
            None if outcome == TOMBSTONE_OUTCOME => None,
            None => self.get_local(key),
            found => found,
        }
    }

    /// Stores `value`. Never waits: local memory has it at once, Redis soon.
    pub fn put(&self, key: CacheKey, value: Bytes) {
        if !key.is_cacheable() || value.len() > self.inner.max_value_bytes(key.kind) {
            self.inner.metrics.count_write(key.kind, "too_large");
            return;
        }
        let cached = CachedValue { value, ttl: self.inner.ttl, origin: ValueOrigin::Local };
        self.inner.local.lock().put(key.clone(), cached.clone(), Instant::now());
        self.inner.write(RedisWrite { key, value: cached });
    }

    /// Stores `value` unless the key holds another one, here or in Redis. Returns whether the local memory now holds
    /// `value`. Never waits: only [`Self::get_shared`] shows which value holds for all routers.
    pub fn put_if_absent(&self, key: CacheKey, value: Bytes) -> bool {
        if !key.is_cacheable() || value.len() > self.inner.max_value_bytes(key.kind) {
            self.inner.metrics.count_write(key.kind, "too_large");
            return false;
        }
        let cached = CachedValue { value, ttl: self.inner.ttl, origin: ValueOrigin::Local };
        {
            let (mut memory, now) = (self.inner.local.lock(), Instant::now());
            if let Some(first) = memory.get(&key, now) {
                return first == cached.value;
            }
            memory.put(key.clone(), cached.clone(), now);
        }
        self.inner.write(RedisWrite { key, value: cached });
        true
    }

    /// Stores `value` in local memory only.
    pub fn put_local(&self, key: CacheKey, value: Bytes) {
        let cached = CachedValue { value, ttl: self.inner.ttl, origin: ValueOrigin::Local };
        self.inner.local.lock().put(key, cached, Instant::now());
    }

    /// Deletes `key`, here and in Redis, where a tombstone replaces it: other routers may still hold the value.
    pub fn forget(&self, key: &CacheKey) {
        self.inner.local.lock().remove(key);
        let cached = CachedValue { value: Bytes::new(), ttl: self.inner.ttl, origin: ValueOrigin::Shared };
        self.inner.write(RedisWrite { key: key.clone(), value: cached });
    }
}

impl Drop for SharedCache {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl SharedCacheInner {
    fn write(&self, write: RedisWrite) {
        let Some(shared) = &self.redis else { return };
        let kind = write.key.kind;
        if !shared.writes.push(write) {
            self.metrics.count_write(kind, "queue_full");
        }
    }

    /// Largest value of a kind, in bytes. Larger ones are neither written nor read.
    fn max_value_bytes(&self, kind: CacheEntryKind) -> usize {
        match kind {
            CacheEntryKind::ResponseWorker
            | CacheEntryKind::ResponseTenant
            | CacheEntryKind::Quota
            | CacheEntryKind::QuotaCharge => 64,
            CacheEntryKind::Transcript => self.transcript_limit,
            CacheEntryKind::Checkpoint => 4 << 20,
        }
    }

    /// Decrypts a value of this kind, stored under `name`; `None` for what is too large or was not written by a router
    /// with the same secret.
    fn read(&self, backend: &RedisBackend, kind: CacheEntryKind, name: &str, sealed: Vec<u8>) -> Option<Bytes> {
        let most = self.max_value_bytes(kind);
        let opened =
            (sealed.len() <= most + value_cipher::OVERHEAD).then(|| backend.cipher.open(name, sealed)).flatten();
        opened.filter(|value| value.len() <= most)
    }

    async fn fetch(&self, backend: &RedisBackend, key: &CacheKey) -> (&'static str, Option<Bytes>) {
        let text = key.redis_key(&backend.namespace);
        let most = self.max_value_bytes(key.kind) + value_cipher::OVERHEAD;
        let mut pipeline = redis::pipe();
        // Reads one byte more than the limit, so that an oversized value is recognised without reading all of it.
        pipeline.cmd("GETRANGE").arg(&text).arg(0).arg(most);
        let start = Instant::now();
        let answer = backend.client.call::<(Vec<u8>,)>(&pipeline).await;
        self.metrics.lookup_seconds.observe(start.elapsed().as_secs_f64());
        let sealed = match answer {
            Err(no_answer) => return (no_answer.as_str(), None),
            Ok((sealed,)) if sealed.is_empty() => return ("miss", None),
            Ok((sealed,)) => sealed,
        };
        match self.read(backend, key.kind, &text, sealed) {
            None => ("corrupt", None),
            Some(value) if value.is_empty() => (TOMBSTONE_OUTCOME, None),
            Some(value) => {
                let cached = CachedValue { value: value.clone(), ttl: self.ttl, origin: ValueOrigin::Shared };
                self.local.lock().put(key.clone(), cached, Instant::now());
                ("shared_hit", Some(value))
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CounterLease {
    /// A lease, and what is left after it.
    Granted {
        /// Units for this router; negative for units that it has returned.
        units: i64,
        left: u64,
    },
    /// Redis was not reachable, or did not answer.
    Unavailable,
}

/// A token bucket that fills within a minute: `ARGV` is its size and the wanted units. A key that holds no bucket is
/// replaced by a full one.
const LEASE_SCRIPT: &str = r"
local size, want = tonumber(ARGV[1]), tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local bucket = redis.pcall('HMGET', KEYS[1], 'level', 'at')
if bucket.err then
  redis.call('DEL', KEYS[1])
  bucket = {}
end
local level, at = tonumber(bucket[1] or ''), tonumber(bucket[2] or '')
if not level or not at or level ~= level then level, at = size, now end
level = math.min(size, level + math.max(0, now - at) * size / 60000)
local granted = want
if want > 0 then granted = math.max(0, math.min(want, math.floor(level))) end
level = math.min(size, level - granted)
redis.call('HSET', KEYS[1], 'level', string.format('%.3f', level), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], 120000)
return {granted, math.max(0, math.floor(level))}
";

/// Counts the routers that were seen in the last ten seconds, including this one: `ARGV` is its name.
const COUNT_ROUTERS_SCRIPT: &str = r"
local now = tonumber(redis.call('TIME')[1])
local added = redis.pcall('ZADD', KEYS[1], now, ARGV[1])
if type(added) == 'table' then
  redis.call('DEL', KEYS[1])
  redis.call('ZADD', KEYS[1], now, ARGV[1])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 10)
redis.call('EXPIRE', KEYS[1], 60)
return redis.call('ZCARD', KEYS[1])
";

impl SharedCache {
    /// Returns the number of routers where each must keep to its own share of a quota: without Redis, or while Redis is
    /// not up. `None` while quotas are leased from the shared count.
    pub(crate) fn isolated_router_count(&self) -> Option<u32> {
        match &self.inner.redis {
            None => Some(1),
            Some(shared) if shared.client.health() == SharedCacheHealth::Up => None,
            Some(_) => Some(self.router_count()),
        }
    }

    /// Returns the last known number of routers, including this one.
    pub(crate) fn router_count(&self) -> u32 {
        self.inner.routers_seen.load(std::sync::atomic::Ordering::Relaxed).max(1)
    }

    /// Leases `want` units of `key`, or returns units if negative. Waits no longer than the timeout.
    pub(crate) async fn lease(&self, key: &CacheKey, per_minute: u64, want: i64) -> CounterLease {
        let Some(shared) = &self.inner.redis else { return CounterLease::Unavailable };
        let mut pipeline = redis::pipe();
        pipeline.cmd("EVAL").arg(LEASE_SCRIPT).arg(1).arg(key.redis_key(&shared.namespace)).arg(per_minute).arg(want);
        let (outcome, leased) = match shared.client.call::<((i64, u64),)>(&pipeline).await {
            Ok(((units, left),)) => ("shared_hit", CounterLease::Granted { units, left }),
            Err(no_answer) => (no_answer.as_str(), CounterLease::Unavailable),
        };
        self.inner.metrics.count_lookup(key.kind, outcome);
        leased
    }
}

/// Adds the router count to a probe.
fn count_routers(pipeline: &mut redis::Pipeline, namespace: &str, name: &str) {
    pipeline
        .cmd("EVAL")
        .arg(COUNT_ROUTERS_SCRIPT)
        .arg(1)
        .arg(format!("{}:routers", namespace_prefix(namespace)))
        .arg(name);
}
