//! One worker: what it is, what was last seen of it, what of ours is there.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use vocabulary::{Bytes, Capacity, Health, Incarnation, Knowledge, Micros, ModelId, Tokens, WorkerId, WorkerView};

use super::Alive;
use super::answers::{Acquaintance, Adapter, Answers, Silence, Verdict};
use super::config::{Pace, WorkerProfile, WorkerSpec};
use super::estimate::SpeedConfidence;
use super::flight::{Desk, Mark};
use super::link::{LinkEstimate, fabric};
use super::speech::{Speech, spoken};
use crate::events::{EventLog, Exports};
use crate::scrape::{Engine, Scrape};

/// What the last probes showed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(super) health: Health,
    pub(super) incarnation: Incarnation,
    pub(crate) models: Arc<[ModelId]>,
    /// Those of them that it lists as adapters.
    pub(super) adapters: Arc<[Adapter]>,
    /// Longest prompt and answer, from the list of models.
    context: Tokens,
    /// The engine's version and the life that told it.
    version: (Incarnation, Arc<str>),
    /// With whom it exchanges KV.
    fabric: Option<Arc<str>>,
    pub(super) speech: Speech,
    scrape: Arc<Scrape>,
    mark: Mark,
}

/// What probes came to.
#[derive(Debug, Default)]
struct Reach {
    /// Probes in a row that did not end well.
    failures: u32,
    /// Probes in a row whose metrics did not come.
    without_metrics: u32,
    /// How often a request could not reach it.
    blames: u64,
}

/// What a worker is wanted for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Duty {
    Serves,
    /// It takes no new sessions.
    Drains,
    /// It is not listed any more, and takes nothing.
    Left,
    /// Nor is anything known of its blocks.
    Forgotten,
}

pub(crate) struct Member {
    pub(crate) id: WorkerId,
    pub(crate) spec: WorkerSpec,
    pub(super) desk: Arc<Desk>,
    pub(crate) events: EventLog,
    /// The ranks that can be asked what they hold.
    pub(crate) exports: Exports,
    seen: ArcSwap<Seen>,
    /// Held while `seen` is changed.
    reach: Mutex<Reach>,
    transfers: Mutex<LinkEstimate>,
    duty: watch::Sender<Duty>,
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
            desk: Arc::new(Desk::new(spec.profile.speeds(), revision)),
            events: EventLog::default(),
            exports: Exports::default(),
            seen: ArcSwap::from_pointee(seen),
            reach: Mutex::default(),
            transfers: Mutex::new(LinkEstimate::new(&spec.profile.link)),
            duty: watch::Sender::new(Duty::Serves),
            usual_prompt,
            hurry: Notify::new(),
            life: watch::Sender::new(None),
            spec,
        }
    }

    /// The same process, described otherwise: what was seen of it is still so, and whoever may not reach it any more hears of
    /// that at the next probe. What it holds and how fast it is begins anew.
    pub(super) fn describes_anew(&self, before: &Self) {
        let seen = before.seen();
        let models = match (self.spec.models.is_empty(), before.spec.models.is_empty()) {
            (false, _) => self.spec.models.clone().into(),
            (true, true) => seen.models.clone(),
            // What it serves is still to be asked.
            (true, false) => return,
        };
        let mut anew = Seen { models, ..(*seen).clone() };
        if self.spec.profile.link != before.spec.profile.link {
            (anew.fabric, anew.speech) = (None, Speech::default());
        }
        self.duty.send_replace(*before.duty.borrow());
        let _reach = self.reach.lock();
        self.see(&seen, anew);
    }

    pub(crate) fn seen(&self) -> Arc<Seen> {
        self.seen.load_full()
    }

    /// Whose metrics it showed last.
    pub(super) fn engine(&self) -> Engine {
        self.seen.load().scrape.engine
    }

    /// Where our requests stand, and how often the worker was blamed: for a probe that begins now.
    pub(super) fn mark(&self) -> (Mark, u64) {
        (self.desk.counters.mark(), self.reach.lock().blames)
    }

    /// Probes in a row that did not end well.
    pub(super) fn failures(&self) -> u32 {
        self.reach.lock().failures
    }

    /// Whether the version of the engine that wrote this page is still to be asked.
    pub(super) fn asks_version(&self, scrape: &Scrape) -> bool {
        let seen = self.seen.load();
        let known = !seen.version.1.is_empty() && seen.version.0 == scrape.process.unwrap_or_default();
        scrape.engine == Engine::Vllm && !known
    }

    /// Whether the life that wrote this page is still to be asked where it is met.
    pub(super) fn asks_place(&self, scrape: &Scrape) -> bool {
        let seen = self.seen.load();
        let same = seen.health == Health::Ready && seen.incarnation == scrape.process.unwrap_or_default();
        let known = seen.speech.place.is_some() && seen.speech.spoken == spoken(&self.spec.profile.link, scrape);
        !(same && known)
    }

    /// Takes over what a probe showed. What is to be reported of it, when it is alive.
    pub(super) fn met(&self, answers: &Answers, pace: Pace) -> Option<Alive> {
        let mut reach = self.reach.lock();
        let before = self.seen.load_full();
        let mut verdict = answers.verdict(self.acquaintance(&before, &reach, pace));
        if verdict == Verdict::Alive && answers.blames != reach.blames {
            // Somebody failed to reach it after this probe began; the next one has been asked for.
            return None;
        }
        reach.without_metrics = match answers.metrics {
            Ok(_) | Err(Silence::Absent) => 0,
            Err(_) => reach.without_metrics.saturating_add(1),
        };
        reach.failures = if verdict == Verdict::Alive { 0 } else { reach.failures.saturating_add(1) };
        if verdict == Verdict::Unsure && reach.failures >= pace.timeouts {
            verdict = Verdict::Dead;
        }
        match verdict {
            Verdict::Unsure => None,
            Verdict::Dead => {
                if reach.failures == 1 && before.health == Health::Unreachable {
                    tracing::warn!(worker = %self.spec.endpoint, "worker is not reached; it is tried again and again");
                }
                self.see(&before, Seen { health: Health::Unreachable, ..(*before).clone() });
                None
            }
            Verdict::Alive => {
                let old = reach.without_metrics >= pace.timeouts;
                let seen = self.alive(&before, answers, if old { Figures::Old } else { Figures::Fresh });
                let (worker, incarnation) = (self.id, seen.incarnation);
                let alive = Alive { worker, incarnation, ranks: seen.scrape.ranks.max(1) };
                self.see(&before, seen);
                Some(alive)
            }
        }
    }

    fn acquaintance(&self, before: &Seen, reach: &Reach, pace: Pace) -> Acquaintance {
        if before.models.is_empty() {
            Acquaintance::Stranger
        } else if before.health != Health::Unreachable || reach.without_metrics >= pace.timeouts {
            Acquaintance::Settled
        } else {
            Acquaintance::Named
        }
    }

    /// `before`, with what the answers tell.
    fn alive(&self, before: &Seen, answers: &Answers, figures: Figures) -> Seen {
        let mut seen = Seen { health: Health::Ready, ..before.clone() };
        if let Ok(models) = &answers.models {
            (seen.context, seen.adapters) = (models.context, models.adapters.clone());
            if self.spec.models.is_empty() {
                seen.models = models.names.clone();
            }
        }
        match (&answers.metrics, figures) {
            (Ok(scrape), _) => {
                seen.incarnation = scrape.process.unwrap_or_default();
                (seen.scrape, seen.mark) = (scrape.clone(), answers.at);
            }
            (Err(Silence::Absent), _) => {
                seen.incarnation = Incarnation::default();
                (seen.scrape, seen.mark) = (Arc::default(), answers.at);
            }
            // What the worker is stays true; what it does is no longer known.
            (Err(_), Figures::Old) => {
                let Scrape { running, waiting, kv_usage, .. } = Scrape::default();
                seen.scrape = Arc::new(Scrape { running, waiting, kv_usage, ..(*seen.scrape).clone() });
                seen.mark = answers.at;
            }
            (Err(_), Figures::Fresh) => {}
        }
        if let Some(version) = &answers.version {
            seen.version = (seen.incarnation, version.clone());
        }
        let version = if seen.version.0 == seen.incarnation { &*seen.version.1 } else { "" };
        if let Some(speech) = &answers.speech {
            seen.speech = speech.clone();
        }
        seen.fabric = fabric(&self.spec.profile.link, &seen.scrape, &seen.models, version)
            .and_then(|fabric| seen.speech.reachable(fabric, &self.spec.endpoint));
        seen
    }

    /// Publishes it. The caller holds `reach`.
    fn see(&self, before: &Seen, seen: Seen) {
        if before.health != seen.health {
            tracing::info!(worker = %self.spec.endpoint, health = seen.health.as_str(), "worker");
        }
        if let Some(missing) = seen.speech.missing.as_ref().filter(|_| before.speech.missing != seen.speech.missing) {
            tracing::warn!(worker = %self.spec.endpoint, "worker exchanges no KV as long as this is so: {missing}");
        }
        let known = before.incarnation != Incarnation::default();
        if known && before.incarnation != seen.incarnation && seen.health == Health::Ready {
            tracing::warn!(worker = %self.spec.endpoint, "worker restarted");
        }
        let life = (seen.health == Health::Ready).then_some(seen.incarnation);
        self.desk.scraped_waiting.store(u64::from(seen.scrape.waiting), Ordering::Relaxed);
        self.seen.store(Arc::new(seen));
        self.desk.changed();
        self.life.send_if_modified(|known| std::mem::replace(known, life) != life);
    }

    /// A request could not reach it.
    pub(super) fn unreachable(&self) {
        let mut reach = self.reach.lock();
        reach.blames += 1;
        let before = self.seen.load_full();
        self.see(&before, Seen { health: Health::Unreachable, ..(*before).clone() });
        drop(reach);
        self.hurry.notify_one();
    }

    pub(super) fn drain(&self, wanted: Health) {
        let wanted = if wanted == Health::Draining { Duty::Drains } else { Duty::Serves };
        let is_new = |duty: &mut Duty| !duty.has_left() && std::mem::replace(duty, wanted) != wanted;
        if self.duty.send_if_modified(is_new) {
            self.desk.changed();
        }
    }

    /// It is not listed any more.
    pub(super) fn leave(&self) {
        tracing::info!(worker = %self.spec.endpoint, "worker left; what it began goes on");
        self.duty.send_replace(Duty::Left);
        self.hurry.notify_one();
    }

    pub(crate) fn has_left(&self) -> bool {
        self.duty.borrow().has_left()
    }

    /// Returns once it is not listed any more.
    pub(crate) async fn left(&self) {
        // The sender is here.
        let _ = self.duty.subscribe().wait_for(|duty| duty.has_left()).await;
    }

    /// Nothing of its blocks is known any more, and nothing will be. Only of one that left.
    pub(crate) fn forget(&self) {
        self.duty.send_replace(Duty::Forgotten);
    }

    /// Returns once it has left and nothing of its blocks is known.
    pub(super) async fn forgotten(&self) {
        let _ = self.duty.subscribe().wait_for(|duty| *duty == Duty::Forgotten).await;
    }

    /// It has left, and nothing of ours is there any more.
    pub(super) fn is_done(&self) -> bool {
        self.has_left() && self.desk.flows().iter().all(|flow| flow.dispatched == flow.finished)
    }

    /// KV came to it.
    pub(super) fn transferred(&self, bytes: Bytes, took: Micros) {
        self.transfers.lock().observe(bytes, took);
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

    /// Blocks of its own that fit into the device memory of its largest rank; none where it does not tell.
    pub(crate) fn most_blocks(&self) -> Option<u64> {
        Some(self.seen.load().scrape.cache.most_blocks).filter(|most| *most > 0)
    }

    pub(super) fn confidence(&self) -> SpeedConfidence {
        let (prefill, decode_step) = self.desk.confidence();
        let (link_fixed, link_rate) = self.transfers.lock().confidence();
        SpeedConfidence { prefill, decode_step, link_fixed, link_rate }
    }

    /// As the planner sees it.
    pub(super) fn view(&self, knowledge: Knowledge) -> WorkerView {
        let seen = self.seen.load();
        let profile = &self.spec.profile;
        let health = match seen.health {
            Health::Ready if *self.duty.borrow() == Duty::Drains => Health::Draining,
            health => health,
        };
        WorkerView {
            id: self.id,
            endpoint: self.spec.endpoint.clone(),
            incarnation: seen.incarnation,
            role: self.spec.role,
            models: seen.models.clone(),
            ranks: seen.ranks(),
            health,
            knowledge,
            load: self.desk.counters.load(&seen.scrape, seen.mark, self.usual_prompt),
            capacity: seen.capacity(),
            speeds: self.desk.speeds(),
            kv_bytes_per_token: seen.kv_bytes(profile),
            link: seen.fabric.clone().map(|fabric| self.transfers.lock().link(fabric, seen.speech.carries())),
        }
    }
}

impl Duty {
    fn has_left(self) -> bool {
        matches!(self, Duty::Left | Duty::Forgotten)
    }
}

/// Whether the last metrics still say what the worker does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Figures {
    Fresh,
    Old,
}

impl Seen {
    pub(super) fn capacity(&self) -> Capacity {
        let capacity = self.scrape.cache.capacity;
        if self.context > Tokens::ZERO { Capacity { context: self.context, ..capacity } } else { capacity }
    }

    /// Data-parallel ranks.
    pub(super) fn ranks(&self) -> u16 {
        self.scrape.ranks.max(1)
    }

    fn kv_bytes(&self, profile: &WorkerProfile) -> Bytes {
        let configured = profile.kv_bytes_per_token.map(Bytes);
        configured.or(self.scrape.cache.bytes_per_token).unwrap_or(WorkerProfile::USUAL_KV_BYTES)
    }
}
