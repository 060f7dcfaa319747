//! One worker: what it is, what was last seen of it, what of ours is there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use vocabulary::{
    Bytes, Capacity, Health, Incarnation, Knowledge, Link, Micros, ModelId, Tokens, WorkerId, WorkerView,
};

use super::config::{WorkerProfile, WorkerSpec};
use super::flight::{Desk, Mark};
use crate::events::EventLog;
use crate::scrape::metrics::Scrape;

/// What the last probes showed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) health: Health,
    pub(crate) incarnation: Incarnation,
    pub(crate) models: Arc<[ModelId]>,
    /// Longest prompt and answer, from the list of models.
    pub(crate) context: Tokens,
    /// Engine version, part of the fabric.
    pub(crate) version: Arc<str>,
    pub(crate) scrape: Arc<Scrape>,
    pub(super) mark: Mark,
}

/// One worker.
pub(crate) struct Member {
    pub(crate) id: WorkerId,
    pub(crate) spec: WorkerSpec,
    pub(super) desk: Arc<Desk>,
    pub(crate) events: EventLog,
    seen: ArcSwap<Seen>,
    draining: AtomicBool,
    usual_prompt: Tokens,
    /// Asks the prober not to wait.
    pub(super) hurry: Notify,
    /// The life that probes reach; tells followers that another one began. `None` while unreachable.
    life: watch::Sender<Option<Incarnation>>,
}

impl Member {
    pub(super) fn new(spec: WorkerSpec, revision: Arc<AtomicU64>, usual_prompt: Tokens) -> Self {
        let seen = Seen { models: spec.models.clone().into(), ..Seen::default() };
        Self {
            id: WorkerId::of_endpoint(&spec.endpoint),
            desk: Arc::new(Desk { revision, ..Desk::default() }),
            events: EventLog::default(),
            seen: ArcSwap::from_pointee(seen),
            draining: AtomicBool::new(false),
            usual_prompt,
            hurry: Notify::new(),
            life: watch::Sender::new(None),
            spec,
        }
    }

    pub(crate) fn seen(&self) -> Arc<Seen> {
        self.seen.load_full()
    }

    /// Takes over what a probe showed.
    pub(super) fn see(&self, seen: Seen) {
        let before = self.seen.load();
        if before.health != seen.health {
            tracing::info!(worker = %self.spec.endpoint, health = seen.health.as_str(), "worker");
        }
        if before.health == Health::Ready && before.incarnation != seen.incarnation && seen.health == Health::Ready {
            tracing::warn!(worker = %self.spec.endpoint, "worker restarted");
        }
        let life = (seen.health == Health::Ready).then_some(seen.incarnation);
        self.desk.scraped_waiting.store(u64::from(seen.scrape.waiting), Ordering::Relaxed);
        self.seen.store(Arc::new(seen));
        self.desk.changed();
        self.life.send_if_modified(|known| std::mem::replace(known, life) != life);
    }

    pub(super) fn unreachable(&self) {
        self.see(Seen { health: Health::Unreachable, ..(*self.seen()).clone() });
        self.hurry.notify_one();
    }

    pub(super) fn drain(&self, wanted: Health) {
        self.draining.store(wanted == Health::Draining, Ordering::Relaxed);
        self.desk.changed();
    }

    /// The life that probes reach now, and a way to hear of the next one.
    pub(crate) fn life(&self) -> watch::Receiver<Option<Incarnation>> {
        self.life.subscribe()
    }

    /// What is known of its blocks changed, so views are old.
    pub(crate) fn changed(&self) {
        self.desk.changed();
    }

    /// As the planner sees it.
    pub(super) fn view(&self, knowledge: Knowledge) -> WorkerView {
        let seen = self.seen.load();
        let profile = &self.spec.profile;
        let health = match seen.health {
            Health::Ready if self.draining.load(Ordering::Relaxed) => Health::Draining,
            health => health,
        };
        WorkerView {
            id: self.id,
            endpoint: self.spec.endpoint.clone(),
            incarnation: seen.incarnation,
            role: self.spec.role,
            models: seen.models.clone(),
            ranks: seen.scrape.ranks.max(1),
            health,
            knowledge,
            load: self.desk.counters.load(&seen.scrape, seen.mark, self.usual_prompt),
            capacity: seen.capacity(),
            speeds: self.desk.estimate.lock().over(profile.speeds()),
            kv_bytes_per_token: seen.kv_bytes(profile),
            link: seen.link(profile),
        }
    }
}

impl Seen {
    fn capacity(&self) -> Capacity {
        let capacity = self.scrape.cache.capacity;
        if self.context > Tokens::ZERO { Capacity { context: self.context, ..capacity } } else { capacity }
    }

    fn kv_bytes(&self, profile: &WorkerProfile) -> Bytes {
        let configured = profile.kv_bytes_per_token.map(Bytes);
        configured.or(self.scrape.cache.bytes_per_token).unwrap_or(WorkerProfile::USUAL_KV_BYTES)
    }

    /// By configuration, or because the engine shows NIXL's figures. What must be equal is in the fabric's name.
    fn link(&self, profile: &WorkerProfile) -> Option<Link> {
        let cache = &self.scrape.cache;
        let fabric: Arc<str> = match &profile.link.fabric {
            Some(fabric) => fabric.as_str().into(),
            None if self.scrape.nixl => {
                let model = self.models.first().map_or("", |model| &*model.0);
                let dtype = cache.dtype.as_deref().unwrap_or("auto");
                format!("nixl {} {model} {dtype} {}", self.version, cache.capacity.block).into()
            }
            None => return None,
        };
        let fixed = Micros(profile.link.fixed_us);
        Some(Link { fabric, fixed, bytes_per_second: profile.link.bytes_per_second.max(1.0) })
    }
}
