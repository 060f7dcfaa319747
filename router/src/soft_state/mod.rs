//! Soft state: what makes requests cheaper and nothing wrong when it is lost. Memory first, and Redis behind it where
//! several routers share it.
//!
//! Redis slow, gone, flushed or wrong is a miss, counted and said; a request waits for it at most its time-out. Nothing
//! is looked up across tenants: the tenant is part of every key.

mod breaker;
mod config;
mod key;
mod lease;
mod link;
mod memory;
mod purge;
mod seal;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use ownership::Supervision;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::task::JoinHandle;

use crate::telemetry::soft_state::SoftStateMetrics;
pub use breaker::Standing;
pub use config::{RedisUrl, SoftStateConfig};
pub use key::{Key, Kind};
pub(crate) use lease::Leased;
use link::Link;
use memory::{Held, Memory, Origin};
pub(crate) use purge::{NotForgotten, Purged};
use seal::Sealer;
use watch::{Write, Writes};

/// How a lookup ends that found a mark in place of a value.
const FORGOTTEN: &str = "forgotten";

/// What this router remembers, alone or with others.
#[derive(Debug)]
pub struct SoftState {
    inner: Arc<Inner>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Inner {
    memory: Mutex<Memory>,
    shared: Option<Shared>,
    ttl: Duration,
    timeout: Duration,
    transcript: usize,
    /// Routers that share, as far as it was last known.
    routers_seen: AtomicU32,
    metrics: SoftStateMetrics,
}

/// What lies in Redis.
#[derive(Debug)]
struct Shared {
    link: Link,
    sealer: Sealer,
    namespace: String,
    writes: Writes,
    /// Whether it may lack what this router remembers.
    owes: AtomicBool,
    /// Whether another router of the namespace seals with another secret.
    other_secret: AtomicBool,
}

/// The address of Redis cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("soft_state.redis: {place} cannot be used: {reason}")]
pub struct SoftStateError {
    place: String,
    reason: String,
}

impl SoftStateError {
    fn of(url: &RedisUrl, error: &redis::RedisError) -> Self {
        Self { place: url.place().to_owned(), reason: error.to_string() }
    }
}

impl SoftState {
    /// Whether the address of Redis can be used, before the ledger is opened. Nobody is called.
    pub fn check(config: &SoftStateConfig) -> Result<(), SoftStateError> {
        let Some(url) = &config.redis else { return Ok(()) };
        link::check(url).map_err(|error| SoftStateError::of(url, &error))
    }

    /// Remembers for itself at once; with Redis as soon as it answers. `cluster` names the keys where no namespace is
    /// configured.
    pub fn start(
        config: &SoftStateConfig,
        (cluster, supervision): (&str, &Arc<Supervision>),
        metrics: SoftStateMetrics,
    ) -> Result<Self, SoftStateError> {
        metrics.standing(None);
        let (writes, waiting) = Writes::new();
        let shared = match &config.redis {
            None => None,
            Some(url) => {
                let link = Link::new(url, config, metrics.clone()).map_err(|error| SoftStateError::of(url, &error))?;
                let namespace = config.namespace.clone().unwrap_or_else(|| cluster.to_owned());
                if url.is_exposed() {
                    let redis = url.place();
                    tracing::warn!(
                        redis,
                        "Redis is reached over the network without TLS: whoever is on the way can read its password and change what lies there. Use rediss://"
                    );
                }
                if config.plaintext {
                    tracing::warn!(
                        redis = url.place(),
                        "soft_state.plaintext: people's words lie in Redis as they are, readable for whoever reaches it. Set soft_state.secret"
                    );
                }
                let sealer = Sealer::new(config.secret.as_ref());
                Some(Shared {
                    link,
                    sealer,
                    namespace,
                    writes,
                    owes: AtomicBool::new(false),
                    other_secret: AtomicBool::new(false),
                })
            }
        };
        let inner = Arc::new(Inner {
            memory: Mutex::new(Memory::new(config.memory.0)),
            shared,
            ttl: config.ttl.0,
            timeout: config.timeout.0,
            transcript: config.transcript.0,
            routers_seen: AtomicU32::new(1),
            metrics,
        });
        let tasks = match inner.shared {
            Some(_) => {
                let (watched, written) = (inner.clone(), (inner.clone(), Arc::new(AsyncMutex::new(waiting))));
                vec![
                    supervision.keep("redis_watch", move || watch::watch(watched.clone())),
                    supervision.keep("redis_writes", move || {
                        let (inner, waiting) = written.clone();
                        async move { watch::write_all(inner, &mut *waiting.lock().await).await }
                    }),
                ]
            }
            None => Vec::new(),
        };
        Ok(Self { inner, tasks })
    }

    /// How Redis stands; none where there is none.
    pub fn standing(&self) -> Option<Standing> {
        self.inner.shared.as_ref().map(|shared| shared.link.standing())
    }

    /// How it stands when that is not as it should be: for receipts and probes.
    pub fn trouble(&self) -> Option<Standing> {
        self.standing().filter(|standing| *standing != Standing::Up)
    }

    /// Whether what other routers write cannot be read here, because their secret is another one.
    pub(crate) fn has_other_secret(&self) -> bool {
        self.inner.shared.as_ref().is_some_and(|shared| shared.other_secret.load(Ordering::Relaxed))
    }

    /// Longest time until what another router has just put is found here; none where nothing is shared.
    pub fn lag(&self) -> Option<Duration> {
        self.inner.shared.as_ref().map(|_| self.inner.timeout)
    }

    /// Longest time for what asks Redis several times.
    pub fn patience(&self) -> Duration {
        self.inner.timeout * 10
    }

    /// Of what this router remembers itself, about.
    pub fn bytes(&self) -> usize {
        self.inner.memory.lock().bytes()
    }

    /// Largest transcript that is kept.
    pub fn transcript_limit(&self) -> usize {
        self.inner.transcript
    }

    /// The value of `key`, from memory only.
    pub fn near(&self, key: &Key) -> Option<Bytes> {
        let value = self.inner.memory.lock().get(key, Instant::now())?;
        self.inner.metrics.looked_up(key.kind, "near");
        Some(value)
    }

    /// The value of `key`, from memory, else from Redis within the time-out.
    pub async fn get(&self, key: &Key) -> Option<Bytes> {
        if let Some(value) = self.near(key) {
            return Some(value);
        }
        let (outcome, value) = match &self.inner.shared {
            None => ("miss", None),
            Some(_) if !key.is_bounded() => ("miss", None),
            Some(shared) => self.inner.fetch(shared, key).await,
        };
        self.inner.metrics.looked_up(key.kind, outcome);
        value
    }

    /// The value of `key` as all routers know it, for what one of them may have been told to forget: from Redis, and from
    /// memory where Redis does not know.
    pub async fn get_settled(&self, key: &Key) -> Option<Bytes> {
        let Some(shared) = self.inner.shared.as_ref().filter(|_| key.is_bounded()) else { return self.near(key) };
        let (outcome, value) = self.inner.fetch(shared, key).await;
        self.inner.metrics.looked_up(key.kind, outcome);
        match value {
            None if outcome == FORGOTTEN => None,
            None => self.near(key),
            found => found,
        }
    }

    /// Remembers `value`. Never waits: memory has it at once, Redis soon.
    pub fn put(&self, key: Key, value: Bytes) {
        if !key.is_bounded() || value.len() > self.inner.most_bytes(key.kind) {
            self.inner.metrics.written(key.kind, "too_large");
            return;
        }
        let held = Held { value, ttl: self.inner.ttl, origin: Origin::Ours };
        self.inner.memory.lock().put(key.clone(), held.clone(), Instant::now());
        self.inner.write(Write { key, held });
    }

    /// Remembers `value` unless another one stands there, here or in Redis; whether it stands here now. Never waits: only
    /// [`Self::get_settled`] tells which one holds for all routers.
    pub fn put_first(&self, key: Key, value: Bytes) -> bool {
        if !key.is_bounded() || value.len() > self.inner.most_bytes(key.kind) {
            self.inner.metrics.written(key.kind, "too_large");
            return false;
        }
        let held = Held { value, ttl: self.inner.ttl, origin: Origin::Ours };
        {
            let (mut memory, now) = (self.inner.memory.lock(), Instant::now());
            if let Some(first) = memory.get(&key, now) {
                return first == held.value;
            }
            memory.put(key.clone(), held.clone(), now);
        }
        self.inner.write(Write { key, held });
        true
    }

    /// Remembers `value` here, without telling Redis.
    pub fn put_near(&self, key: Key, value: Bytes) {
        let held = Held { value, ttl: self.inner.ttl, origin: Origin::Ours };
        self.inner.memory.lock().put(key, held, Instant::now());
    }

    /// Forgets `key`, here and in Redis, which remembers that it was forgotten: other routers may still hold it.
    pub fn forget(&self, key: &Key) {
        self.inner.memory.lock().remove(key);
        let held = Held { value: Bytes::new(), ttl: self.inner.ttl, origin: Origin::Shared };
        self.inner.write(Write { key: key.clone(), held });
    }
}

impl Drop for SoftState {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Inner {
    fn write(&self, write: Write) {
        let Some(shared) = &self.shared else { return };
        let kind = write.key.kind;
        if !shared.writes.push(write) {
            self.metrics.written(kind, "no_room");
        }
    }

    /// Largest value of a kind. More is neither written nor read.
    fn most_bytes(&self, kind: Kind) -> usize {
        match kind {
            Kind::Maker | Kind::Holder | Kind::Quota | Kind::Charge => 64,
            Kind::Transcript => self.transcript,
            Kind::Checkpoint => 4 << 20,
        }
    }

    /// What lies under `name` as a value of this kind; none for what is too large or was not written by one of us.
    fn read(&self, shared: &Shared, kind: Kind, name: &str, sealed: Vec<u8>) -> Option<Bytes> {
        let most = self.most_bytes(kind);
        let opened = (sealed.len() <= most + seal::OVERHEAD).then(|| shared.sealer.open(name, sealed)).flatten();
        opened.filter(|value| value.len() <= most)
    }

    async fn fetch(&self, shared: &Shared, key: &Key) -> (&'static str, Option<Bytes>) {
        let text = key.text(&shared.namespace);
        let most = self.most_bytes(key.kind) + seal::OVERHEAD;
        let mut pipeline = redis::pipe();
        // One byte more than there may be tells what is too large, whatever lies there.
        pipeline.cmd("GETRANGE").arg(&text).arg(0).arg(most);
        let asked = Instant::now();
        let answer = shared.link.ask::<(Vec<u8>,)>(&pipeline).await;
        self.metrics.lookup_seconds.observe(asked.elapsed().as_secs_f64());
        let sealed = match answer {
            Err(no_answer) => return (no_answer.as_str(), None),
            Ok((sealed,)) if sealed.is_empty() => return ("miss", None),
            Ok((sealed,)) => sealed,
        };
        match self.read(shared, key.kind, &text, sealed) {
            None => ("corrupt", None),
            Some(value) if value.is_empty() => (FORGOTTEN, None),
            Some(value) => {
                let held = Held { value: value.clone(), ttl: self.ttl, origin: Origin::Shared };
                self.memory.lock().put(key.clone(), held, Instant::now());
                ("shared", Some(value))
            }
        }
    }
}
