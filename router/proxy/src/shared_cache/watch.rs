//! Watches Redis: probes, resending values after an outage or a flush, and the queue of writes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::Pipeline;
use tokio::sync::mpsc;

use super::breaker::SharedCacheHealth;
use super::key::{CacheEntryKind, CacheKey, namespace_prefix};
use super::local_cache::CachedValue;
use super::redis_client::RedisCallError;
use super::value_cipher::OVERHEAD;
use super::{RedisBackend, SharedCacheInner, count_routers};
use crate::request_id::new_request_id;

/// Time between two probes while Redis is up, and while it is not.
const HEALTHY_PROBE_INTERVAL: Duration = Duration::from_secs(1);
const UNHEALTHY_PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// How long a flush sentinel lives without renewal, in seconds.
const SENTINEL_TTL_SECONDS: u64 = 600;
/// Plaintext of the canary, by which secrets are compared, and its lifetime without renewal in seconds.
const CANARY: &[u8] = b"ownerserve";
const CANARY_SECONDS: u64 = 60;
/// Maximum number of writes in one pipeline.
const MAX_BATCH: usize = 64;
/// Limits of the write queue: number of writes, and their bytes.
pub(super) const MAX_QUEUED_WRITES: usize = 1024;
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// A write to Redis; an empty value is a tombstone.
#[derive(Debug)]
pub(super) struct RedisWrite {
    pub(super) key: CacheKey,
    pub(super) value: CachedValue,
}

impl RedisWrite {
    fn bytes(&self) -> usize {
        self.value.value.len()
    }
}

/// When a write may replace an existing value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteCondition {
    Always,
    /// Never: another router may have deleted it meanwhile.
    IfAbsent,
}

/// Sending side of the write queue, which never waits.
#[derive(Clone, Debug)]
pub(super) struct RedisWriteQueue {
    queue: mpsc::Sender<RedisWrite>,
    bytes: Arc<AtomicUsize>,
}

impl RedisWriteQueue {
    pub(super) fn new() -> (Self, mpsc::Receiver<RedisWrite>) {
        let (queue, waiting) = mpsc::channel(MAX_QUEUED_WRITES);
        (Self { queue, bytes: Arc::default() }, waiting)
    }

    /// Queues a write; returns whether there was room for it.
    pub(super) fn push(&self, write: RedisWrite) -> bool {
        let bytes = write.bytes();
        if self.bytes.load(Ordering::Relaxed) + bytes > MAX_QUEUED_BYTES {
            return false;
        }
        let is_queued = self.queue.try_send(write).is_ok();
        if is_queued {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        is_queued
    }

    fn release_bytes(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Writes the queue to Redis, in order and in batches.
pub(super) async fn write_all(inner: Arc<SharedCacheInner>, waiting: &mut mpsc::Receiver<RedisWrite>) {
    let Some(shared) = &inner.redis else { return };
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while waiting.recv_many(&mut batch, MAX_BATCH).await > 0 {
        let outcome = shared.save(&batch, WriteCondition::Always).await;
        if outcome != "stored" {
            shared.mark_unsynced();
        }
        for write in batch.drain(..) {
            shared.writes.release_bytes(write.bytes());
            inner.metrics.count_write(write.key.kind, outcome);
        }
    }
}

impl RedisBackend {
    /// Notes that Redis may lack values: after the next successful probe this router resends all that it holds.
    fn mark_unsynced(&self) {
        self.unsynced.store(true, Ordering::Relaxed);
    }

    /// Writes a batch and returns the outcome as a metric label. What was not saved stays in local memory and is
    /// resent.
    pub(super) async fn save(&self, batch: &[RedisWrite], over: WriteCondition) -> &'static str {
        let mut pipeline = redis::pipe();
        batch.iter().for_each(|write| self.push_command(write, over, &mut pipeline));
        match self.client.call_in_background::<()>(&pipeline).await {
            Ok(()) => "stored",
            Err(RedisCallError::Skipped) => "skipped",
            Err(RedisCallError::Failed(_) | RedisCallError::Foreign) => "failed",
        }
    }

    fn push_command(&self, write: &RedisWrite, over: WriteCondition, pipeline: &mut Pipeline) {
        let key = write.key.redis_key(&self.namespace);
        let millis = u64::try_from(write.value.ttl.as_millis()).unwrap_or(u64::MAX).max(1);
        let Some(value) = self.cipher.seal(&key, &write.value.value) else { return };
        pipeline.cmd("SET").arg(&key).arg(value).arg("PX").arg(millis);
        if over == WriteCondition::IfAbsent || write.key.kind == CacheEntryKind::ResponseTenant {
            pipeline.arg("NX");
        }
        pipeline.ignore();
    }
}

/// An encrypted value that all routers of a namespace share: a router that cannot decrypt it uses another secret than
/// the others.
struct SecretCanary {
    ask: Pipeline,
    renew: Pipeline,
    key: String,
}

impl SecretCanary {
    /// Returns `None` where nothing can be encrypted.
    fn new(backend: &RedisBackend) -> Option<Self> {
        let key = format!("{}:secret", namespace_prefix(&backend.namespace));
        let value = backend.cipher.seal(&key, CANARY)?;
        let (mut ask, mut renew) = (redis::pipe(), redis::pipe());
        ask.cmd("SET").arg(&key).arg(value).arg("NX").arg("EX").arg(CANARY_SECONDS).ignore();
        ask.cmd("GETRANGE").arg(&key).arg(0).arg(CANARY.len() + OVERHEAD);
        renew.cmd("EXPIRE").arg(&key).arg(CANARY_SECONDS).ignore();
        Some(Self { ask, renew, key })
    }

    /// Compares the canary in Redis, and logs a change. Without an answer the last result stays.
    async fn compare(&self, backend: &RedisBackend) {
        let Ok((sealed,)) = backend.client.call_in_background::<(Vec<u8>,)>(&self.ask).await else { return };
        let is_ours = backend.cipher.open(&self.key, sealed).is_some();
        if is_ours {
            // Renewed only where it can be decrypted, so that it expires with the last router that uses the other
            // secret.
            let _ = backend.client.call_in_background::<()>(&self.renew).await;
        }
        match (backend.other_secret.swap(!is_ours, Ordering::Relaxed), is_ours) {
            (false, false) => tracing::warn!(
                "another router of this namespace has another shared_cache.encryption_secret: what either writes to Redis the other cannot \
                 read; give all of them the same one"
            ),
            (true, true) => {
                tracing::info!("all routers of this namespace have the same shared_cache.encryption_secret")
            }
            _ => {}
        }
    }
}

/// Probes Redis forever, and resends what it has lost.
pub(super) async fn watch(inner: Arc<SharedCacheInner>) {
    let Some(shared) = &inner.redis else { return };
    let mark = FlushSentinel::new(&shared.namespace);
    let canary = SecretCanary::new(shared);
    let (mut marked, mut said) = (false, false);
    loop {
        let before = shared.client.health();
        let found = shared.client.probe::<(Option<u64>, u32)>(&mark.probe).await;
        let now = shared.client.health();
        if found.is_err() && !said && now == before {
            shared.client.report_health(now);
        }
        said = true;
        if let Ok((_, routers)) = found {
            inner.routers_seen.store(routers, Ordering::Relaxed);
            inner.metrics.routers.set(routers.into());
        }
        match found {
            Ok((None, _)) => {
                if std::mem::take(&mut marked) {
                    inner.metrics.flushes.inc();
                    tracing::warn!("Redis was flushed: this router writes its cached values to Redis again");
                }
                // The sentinel comes first: if Redis is flushed again during the resend, the next probe detects it.
                marked = shared.client.call_in_background::<()>(&mark.set).await.is_ok();
                shared.mark_unsynced();
            }
            Ok((Some(_), _)) => marked = true,
            Err(_) => {}
        }
        if now == SharedCacheHealth::Up && before != SharedCacheHealth::Up {
            shared.mark_unsynced();
        }
        if now == SharedCacheHealth::Up
            && let Some(canary) = &canary
        {
            canary.compare(shared).await;
        }
        if now == SharedCacheHealth::Up && shared.unsynced.swap(false, Ordering::Relaxed) {
            resend_local_values(&inner, shared).await;
        }
        let pause = if now == SharedCacheHealth::Up { HEALTHY_PROBE_INTERVAL } else { UNHEALTHY_PROBE_INTERVAL };
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = shared.client.breaker_opened.notified() => {}
        }
    }
}

/// Detects a flush of Redis: a key of this router whose absence means that everything is lost.
///
/// It is set only after its absence was observed: otherwise a lost answer could hide a flush.
struct FlushSentinel {
    probe: Pipeline,
    set: Pipeline,
}

impl FlushSentinel {
    fn new(namespace: &str) -> Self {
        let name = new_request_id().to_string();
        let key = format!("{}:mark:{name}", namespace_prefix(namespace));
        let mut probe = redis::pipe();
        probe.cmd("GET").arg(&key);
        probe.cmd("EXPIRE").arg(&key).arg(SENTINEL_TTL_SECONDS).ignore();
        count_routers(&mut probe, namespace, &name);
        let mut set = redis::pipe();
        set.cmd("SET").arg(&key).arg(1).arg("EX").arg(SENTINEL_TTL_SECONDS).ignore();
        Self { probe, set }
    }
}

/// Resends the values that other routers may ask for, newest first. Checkpoints are cheaper to recompute.
async fn resend_local_values(inner: &SharedCacheInner, backend: &RedisBackend) {
    let ours = inner.local.lock().local_values(Instant::now());
    let lasting = ours.into_iter().filter(|(key, _)| {
        matches!(key.kind, CacheEntryKind::ResponseWorker | CacheEntryKind::ResponseTenant | CacheEntryKind::Transcript)
    });
    let writes: Vec<RedisWrite> = lasting.map(|(key, held)| RedisWrite { key, value: held }).collect();
    for batch in writes.chunks(MAX_BATCH) {
        let outcome = backend.save(batch, WriteCondition::IfAbsent).await;
        batch.iter().for_each(|write| inner.metrics.count_write(write.key.kind, outcome));
        if outcome != "stored" {
            backend.mark_unsynced();
            return;
        }
    }
    if !writes.is_empty() {
        tracing::info!(values = writes.len(), "Redis was told again what this router remembers");
    }
}
