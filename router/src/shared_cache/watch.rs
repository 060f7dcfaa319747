//! Keeping an eye on Redis: probes, what to tell it anew after it was gone or flushed, and the writes that wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use redis::Pipeline;
use tokio::sync::mpsc;

use super::breaker::SharedCacheHealth;
use super::counter_lease::count_routers;
use super::key::{CacheEntryKind, CacheKey, namespace_prefix};
use super::local_cache::CachedValue;
use super::redis_client::RedisCallError;
use super::value_cipher::OVERHEAD;
use super::{RedisBackend, SharedCacheState};
use crate::client_request::new_request_id;

/// Between two probes while all is well, and while it is not.
const HEALTHY_PROBE_INTERVAL: Duration = Duration::from_secs(1);
const UNHEALTHY_PROBE_INTERVAL: Duration = Duration::from_millis(200);
/// How long a mark stands that nobody renews.
const SENTINEL_TTL_SECONDS: u64 = 600;
/// What is sealed so that secrets can be compared, and how long it stands that nobody renews.
const CANARY: &[u8] = b"ownerserve";
const CANARY_SECONDS: u64 = 60;
/// Most writes in one pipeline.
const MAX_BATCH: usize = 64;
/// Most writes that wait, and their bytes.
pub(super) const MAX_QUEUED_WRITES: usize = 1024;
const MAX_QUEUED_BYTES: usize = 32 << 20;

/// Something for Redis to remember; an empty value marks what is to be forgotten.
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

/// What a write may do to what is there.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteCondition {
    Always,
    /// Nothing: others may have forgotten it meanwhile.
    IfAbsent,
}

/// The way to the writer, which never waits.
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

    /// Whether there was room for it.
    pub(super) fn push(&self, write: RedisWrite) -> bool {
        let bytes = write.bytes();
        if self.bytes.load(Ordering::Relaxed) + bytes > MAX_QUEUED_BYTES {
            return false;
        }
        let taken = self.queue.try_send(write).is_ok();
        if taken {
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn release_bytes(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Writes what was pushed, in order, in batches.
pub(super) async fn write_all(inner: Arc<SharedCacheState>, waiting: &mut mpsc::Receiver<RedisWrite>) {
    let Some(shared) = &inner.redis else { return };
    let mut batch = Vec::with_capacity(MAX_BATCH);
    while waiting.recv_many(&mut batch, MAX_BATCH).await > 0 {
        let outcome = shared.save(&batch, WriteCondition::Always).await;
        if outcome != "saved" {
            shared.mark_unsynced();
        }
        for write in batch.drain(..) {
            shared.writes.release_bytes(write.bytes());
            inner.metrics.count_write(write.key.kind, outcome);
        }
    }
}

impl RedisBackend {
    /// Something may be missing in Redis: the next probe that is answered is followed by all that this router remembers.
    fn mark_unsynced(&self) {
        self.unsynced.store(true, Ordering::Relaxed);
    }

    /// The word for how it went. What was not saved stays in memory, and is told anew.
    pub(super) async fn save(&self, batch: &[RedisWrite], over: WriteCondition) -> &'static str {
        let mut pipeline = redis::pipe();
        batch.iter().for_each(|write| self.push_command(write, over, &mut pipeline));
        match self.client.call_in_background::<()>(&pipeline).await {
            Ok(()) => "saved",
            Err(RedisCallError::Skipped) => "not_asked",
            Err(RedisCallError::Failed(_) | RedisCallError::Foreign) => "failed",
        }
    }

    fn push_command(&self, write: &RedisWrite, over: WriteCondition, pipeline: &mut Pipeline) {
        let key = write.key.redis_key(&self.namespace);
        let millis = u64::try_from(write.value.ttl.as_millis()).unwrap_or(u64::MAX).max(1);
        let Some(value) = self.cipher.seal(&key, &write.value.value) else { return };
        pipeline.cmd("SET").arg(&key).arg(value).arg("PX").arg(millis);
        if over == WriteCondition::IfAbsent || write.key.kind == CacheEntryKind::Holder {
            pipeline.arg("NX");
        }
        pipeline.ignore();
    }
}

/// A sealed value that all routers of a namespace share: who cannot open it has another secret than the others.
struct Canary {
    ask: Pipeline,
    renew: Pipeline,
    key: String,
}

impl Canary {
    /// None where nothing can be sealed.
    fn new(shared: &RedisBackend) -> Option<Self> {
        let key = format!("{}:secret", namespace_prefix(&shared.namespace));
        let value = shared.cipher.seal(&key, CANARY)?;
        let (mut ask, mut renew) = (redis::pipe(), redis::pipe());
        ask.cmd("SET").arg(&key).arg(value).arg("NX").arg("EX").arg(CANARY_SECONDS).ignore();
        ask.cmd("GETRANGE").arg(&key).arg(0).arg(CANARY.len() + OVERHEAD);
        renew.cmd("EXPIRE").arg(&key).arg(CANARY_SECONDS).ignore();
        Some(Self { ask, renew, key })
    }

    /// Looks at what lies there, and says so when that changes. Without an answer nothing is known anew.
    async fn compare(&self, shared: &RedisBackend) {
        let Ok((sealed,)) = shared.client.call_in_background::<(Vec<u8>,)>(&self.ask).await else { return };
        let is_ours = shared.cipher.open(&self.key, sealed).is_some();
        if is_ours {
            // Only where it opens: it goes with the last router that has the other secret.
            let _ = shared.client.call_in_background::<()>(&self.renew).await;
        }
        match (shared.other_secret.swap(!is_ours, Ordering::Relaxed), is_ours) {
            (false, false) => tracing::warn!(
                "another router of this namespace has another soft_state.secret: what either writes to Redis the other cannot \
                 read; give all of them the same one"
            ),
            (true, true) => tracing::info!("all routers of this namespace have the same soft_state.secret"),
            _ => {}
        }
    }
}

/// Probes Redis for as long as it is asked to, and tells it again what it has forgotten.
pub(super) async fn watch(inner: Arc<SharedCacheState>) {
    let Some(shared) = &inner.redis else { return };
    let mark = FlushSentinel::new(&shared.namespace);
    let canary = Canary::new(shared);
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
                    tracing::warn!("Redis has forgotten everything: it is told again what this router remembers");
                }
                // The mark first: should Redis forget once more while it is told, the next probe finds that out.
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

/// A key of this router's own. When it is gone, so is everything else.
///
/// It is set only when its absence was heard: an answer that is lost must not take the news of a flush with it.
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

/// What other routers may ask for, newest first. Checkpoints are cheaper to make anew.
async fn resend_local_values(inner: &SharedCacheState, shared: &RedisBackend) {
    let ours = inner.local.lock().local_values(Instant::now());
    let lasting = ours.into_iter().filter(|(key, _)| {
        matches!(key.kind, CacheEntryKind::Maker | CacheEntryKind::Holder | CacheEntryKind::Transcript)
    });
    let writes: Vec<RedisWrite> = lasting.map(|(key, held)| RedisWrite { key, value: held }).collect();
    for batch in writes.chunks(MAX_BATCH) {
        let outcome = shared.save(batch, WriteCondition::IfAbsent).await;
        batch.iter().for_each(|write| inner.metrics.count_write(write.key.kind, outcome));
        if outcome != "saved" {
            shared.mark_unsynced();
            return;
        }
    }
    if !writes.is_empty() {
        tracing::info!(values = writes.len(), "Redis was told again what this router remembers");
    }
}
