//! One worker: its definition, the result of its last probes, and this router's requests at it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use vocabulary::{
    Bytes, Incarnation, KvIndexState, Micros, ModelId, Tokens, WorkerCapacity, WorkerHealth, WorkerId, WorkerView,
};

use super::estimate::SpeedConfidence;
use super::in_flight::{CounterSnapshot, InFlightTracker};
use super::kv_connector::{KvConnectorCapability, connector_of};
use super::link_estimate::{LinkEstimate, fabric};
use super::probe_round::{Adapter, PriorIdentification, ProbeFailure, ProbeReplies, ProbeVerdict};
use super::worker_definition::{ProbeSettings, WorkerDefinition, WorkerProfile};
use crate::events::{SnapshotExporters, WorkerEventStatus};
use crate::scrape::{EngineKind, Scrape};

/// Reports that a worker answered a probe, so this incarnation is alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LivenessReport {
    /// The worker.
    pub worker: WorkerId,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Its data-parallel ranks.
    pub ranks: u16,
}

/// The result of the last probes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProbedState {
    pub(super) health: WorkerHealth,
    pub(super) incarnation: Incarnation,
    pub(crate) models: Arc<[ModelId]>,
    /// Those models that it lists as adapters.
    pub(super) adapters: Arc<[Adapter]>,
    /// Maximum length of prompt and answer, from its model list.
    context: Tokens,
    /// The engine's version, and the incarnation that reported it.
    version: (Incarnation, Arc<str>),
    /// The set of workers with which it exchanges KV.
    fabric: Option<Arc<str>>,
    pub(super) connector: KvConnectorCapability,
    scrape: Arc<Scrape>,
    counters: CounterSnapshot,
}

/// Counters of failed probes and requests.
#[derive(Debug, Default)]
struct ReachabilityFailures {
    /// Consecutive probes without success.
    failures: u32,
    /// Consecutive probes without metrics.
    probes_without_metrics: u32,
    /// Number of requests that could not reach it.
    failure_reports: u64,
}

/// What the fleet wants from a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum WorkerDemand {
    Serves,
    /// It takes no new sessions.
    Drains,
    /// It is no longer listed and gets no requests.
    Left,
    /// It has left, and its blocks are forgotten.
    Cleared,
}

pub(crate) struct WorkerHandle {
    pub(crate) id: WorkerId,
    pub(crate) spec: WorkerDefinition,
    pub(super) in_flight: Arc<InFlightTracker>,
    pub(crate) events: WorkerEventStatus,
    /// The ranks that can be asked for a snapshot.
    pub(crate) exports: SnapshotExporters,
    state: ArcSwap<ProbedState>,
    /// Locked while `state` is changed.
    reachability: Mutex<ReachabilityFailures>,
    transfers: Mutex<LinkEstimate>,
    demand: watch::Sender<WorkerDemand>,
    usual_prompt: Tokens,
    /// Wakes the prober.
    pub(super) probe_now: Notify,
    /// The incarnation that answers probes, watched by followers. `None` while unreachable.
    incarnation: watch::Sender<Option<Incarnation>>,
}

impl WorkerHandle {
    pub(super) fn new(spec: WorkerDefinition, revision: Arc<AtomicU64>, usual_prompt: Tokens) -> Self {
        let seen = ProbedState { models: spec.models.clone().into(), ..ProbedState::default() };
        Self {
            id: WorkerId::of_endpoint(&spec.endpoint),
            in_flight: Arc::new(InFlightTracker::new(spec.profile.speeds(), revision)),
            events: WorkerEventStatus::default(),
            exports: SnapshotExporters::default(),
            state: ArcSwap::from_pointee(seen),
            reachability: Mutex::default(),
            transfers: Mutex::new(LinkEstimate::new(&spec.profile.link)),
            demand: watch::Sender::new(WorkerDemand::Serves),
            usual_prompt,
            probe_now: Notify::new(),
            incarnation: watch::Sender::new(None),
            spec,
        }
    }

    /// Takes over the probed state of the same process under its previous definition. If it cannot be reached under the
    /// new one, the next probe shows it. Blocks and estimated speeds are not taken over.
    pub(super) fn carry_over(&self, before: &Self) {
        let seen = before.probed_state();
        let models = match (self.spec.models.is_empty(), before.spec.models.is_empty()) {
            (false, _) => self.spec.models.clone().into(),
            (true, true) => seen.models.clone(),
            // The worker has to be asked for its models first.
            (true, false) => return,
        };
        let mut anew = ProbedState { models, ..(*seen).clone() };
        if self.spec.profile.link != before.spec.profile.link {
            (anew.fabric, anew.connector) = (None, KvConnectorCapability::default());
        }
        self.demand.send_replace(*before.demand.borrow());
        let _reach = self.reachability.lock();
        self.publish(&seen, anew);
    }

    pub(crate) fn probed_state(&self) -> Arc<ProbedState> {
        self.state.load_full()
    }

    /// Returns which engine the last scraped metrics belong to.
    pub(super) fn engine(&self) -> EngineKind {
        self.state.load().scrape.engine
    }

    /// Returns the state at the start of a probe: this router's counters, and the number of reports that the worker is
    /// unreachable.
    pub(super) fn probe_start(&self) -> (CounterSnapshot, u64) {
        (self.in_flight.counters.snapshot(), self.reachability.lock().failure_reports)
    }

    /// Returns the number of consecutive unsuccessful probes.
    pub(super) fn failures(&self) -> u32 {
        self.reachability.lock().failures
    }

    /// Returns whether the engine that wrote this page has to be asked for its version.
    pub(super) fn needs_version(&self, scrape: &Scrape) -> bool {
        let seen = self.state.load();
        let known = !seen.version.1.is_empty() && seen.version.0 == scrape.process.unwrap_or_default();
        scrape.engine == EngineKind::Vllm && !known
    }

    /// Returns whether the incarnation that wrote this page has to be asked for its transfer endpoint.
    pub(super) fn needs_endpoint(&self, scrape: &Scrape) -> bool {
        let seen = self.state.load();
        let same = seen.health == WorkerHealth::Ready && seen.incarnation == scrape.process.unwrap_or_default();
        let known = seen.connector.endpoint.is_some()
            && seen.connector.protocol == connector_of(&self.spec.profile.link, scrape);
        !(same && known)
    }

    /// Applies the result of a probe. Returns the liveness report if the worker is alive.
    pub(super) fn apply_probe(&self, answers: &ProbeReplies, settings: ProbeSettings) -> Option<LivenessReport> {
        let mut reach = self.reachability.lock();
        let before = self.state.load_full();
        let mut verdict = answers.verdict(self.prior_identification(&before, &reach, settings));
        if verdict == ProbeVerdict::Alive && answers.failure_reports != reach.failure_reports {
            // A request failed to reach it after this probe began; another probe was already requested.
            return None;
        }
        reach.probes_without_metrics = match answers.metrics {
            Ok(_) | Err(ProbeFailure::Absent) => 0,
            Err(_) => reach.probes_without_metrics.saturating_add(1),
        };
        reach.failures = if verdict == ProbeVerdict::Alive { 0 } else { reach.failures.saturating_add(1) };
        if verdict == ProbeVerdict::Unsure && reach.failures >= settings.timeouts {
            verdict = ProbeVerdict::Dead;
        }
        match verdict {
            ProbeVerdict::Unsure => None,
            ProbeVerdict::Dead => {
                if reach.failures == 1 && before.health == WorkerHealth::Unreachable {
                    tracing::warn!(worker = %self.spec.endpoint, "the worker is unreachable; probing continues. Check its URL and that the engine runs");
                }
                self.publish(&before, ProbedState { health: WorkerHealth::Unreachable, ..(*before).clone() });
                None
            }
            ProbeVerdict::Alive => {
                let old = reach.probes_without_metrics >= settings.timeouts;
                let seen = self.apply_alive(
                    &before,
                    answers,
                    if old { MetricsFreshness::Stale } else { MetricsFreshness::Fresh },
                );
                let (worker, incarnation) = (self.id, seen.incarnation);
                let alive = LivenessReport { worker, incarnation, ranks: seen.scrape.ranks.max(1) };
                self.publish(&before, seen);
                Some(alive)
            }
        }
    }

    fn prior_identification(
        &self,
        previous: &ProbedState,
        reach: &ReachabilityFailures,
        settings: ProbeSettings,
    ) -> PriorIdentification {
        if previous.models.is_empty() {
            PriorIdentification::Unknown
        } else if previous.health != WorkerHealth::Unreachable || reach.probes_without_metrics >= settings.timeouts {
            PriorIdentification::Identified
        } else {
            PriorIdentification::ModelsKnown
        }
    }

    /// Returns `previous`, updated with the responses.
    fn apply_alive(&self, previous: &ProbedState, answers: &ProbeReplies, figures: MetricsFreshness) -> ProbedState {
        let mut seen = ProbedState { health: WorkerHealth::Ready, ..previous.clone() };
        if let Ok(models) = &answers.models {
            (seen.context, seen.adapters) = (models.context, models.adapters.clone());
            if self.spec.models.is_empty() {
                seen.models = models.names.clone();
            }
        }
        match (&answers.metrics, figures) {
            (Ok(scrape), _) => {
                seen.incarnation = scrape.process.unwrap_or_default();
                (seen.scrape, seen.counters) = (scrape.clone(), answers.counters);
            }
            (Err(ProbeFailure::Absent), _) => {
                seen.incarnation = Incarnation::default();
                (seen.scrape, seen.counters) = (Arc::default(), answers.counters);
            }
            // The worker's properties stay, its current load is unknown.
            (Err(_), MetricsFreshness::Stale) => {
                let Scrape { running, waiting, kv_usage, .. } = Scrape::default();
                seen.scrape = Arc::new(Scrape { running, waiting, kv_usage, ..(*seen.scrape).clone() });
                seen.counters = answers.counters;
            }
            (Err(_), MetricsFreshness::Fresh) => {}
        }
        if let Some(version) = &answers.version {
            seen.version = (seen.incarnation, version.clone());
        }
        let version = if seen.version.0 == seen.incarnation { &*seen.version.1 } else { "" };
        if let Some(capability) = &answers.connector {
            seen.connector = capability.clone();
        }
        seen.fabric = fabric(&self.spec.profile.link, &seen.scrape, &seen.models, version)
            .and_then(|fabric| seen.connector.reachable_fabric(fabric, &self.spec.endpoint));
        seen
    }

    /// Publishes a new state. The caller holds `reachability`.
    fn publish(&self, previous: &ProbedState, seen: ProbedState) {
        if previous.health != seen.health {
            tracing::info!(worker = %self.spec.endpoint, health = seen.health.as_str(), "worker");
        }
        if let Some(missing) = seen
            .connector
            .missing_requirement
            .as_ref()
            .filter(|_| previous.connector.missing_requirement != seen.connector.missing_requirement)
        {
            tracing::warn!(worker = %self.spec.endpoint, "worker exchanges no KV as long as this is so: {missing}");
        }
        let known = previous.incarnation != Incarnation::default();
        if known && previous.incarnation != seen.incarnation && seen.health == WorkerHealth::Ready {
            tracing::warn!(worker = %self.spec.endpoint, "worker restarted");
        }
        let life = (seen.health == WorkerHealth::Ready).then_some(seen.incarnation);
        self.in_flight.scraped_waiting.store(u64::from(seen.scrape.waiting), Ordering::Relaxed);
        self.state.store(Arc::new(seen));
        self.in_flight.invalidate_views();
        self.incarnation.send_if_modified(|known| std::mem::replace(known, life) != life);
    }

    /// Records that a request could not reach it.
    pub(super) fn mark_unreachable(&self) {
        let mut reach = self.reachability.lock();
        reach.failure_reports += 1;
        let before = self.state.load_full();
        self.publish(&before, ProbedState { health: WorkerHealth::Unreachable, ..(*before).clone() });
        drop(reach);
        self.probe_now.notify_one();
    }

    pub(super) fn set_draining(&self, health: WorkerHealth) {
        let health = if health == WorkerHealth::Draining { WorkerDemand::Drains } else { WorkerDemand::Serves };
        let is_new = |duty: &mut WorkerDemand| !duty.has_left() && std::mem::replace(duty, health) != health;
        if self.demand.send_if_modified(is_new) {
            self.in_flight.invalidate_views();
        }
    }

    /// Records that it is no longer listed.
    pub(super) fn mark_left(&self) {
        tracing::info!(worker = %self.spec.endpoint, "worker left; what it began goes on");
        self.demand.send_replace(WorkerDemand::Left);
        self.probe_now.notify_one();
    }

    pub(crate) fn has_left(&self) -> bool {
        self.demand.borrow().has_left()
    }

    /// Waits until it is no longer listed.
    pub(crate) async fn wait_left(&self) {
        // This handle owns the sender.
        let _ = self.demand.subscribe().wait_for(|duty| duty.has_left()).await;
    }

    /// Records that its blocks are forgotten for good. Only for a worker that left.
    pub(crate) fn mark_forgotten(&self) {
        self.demand.send_replace(WorkerDemand::Cleared);
    }

    /// Waits until it has left and its blocks are forgotten.
    pub(super) async fn wait_forgotten(&self) {
        let _ = self.demand.subscribe().wait_for(|duty| *duty == WorkerDemand::Cleared).await;
    }

    /// Returns whether it has left and none of this router's requests remain.
    pub(super) fn is_finished(&self) -> bool {
        self.has_left() && self.in_flight.entries().iter().all(|flow| flow.dispatched == flow.finished)
    }

    /// Records a KV transfer to it.
    pub(super) fn record_transfer(&self, bytes: Bytes, took: Micros) {
        self.transfers.lock().observe(bytes, took);
        self.in_flight.invalidate_views();
    }

    /// Returns a receiver of the incarnation that answers probes.
    pub(crate) fn watch_incarnation(&self) -> watch::Receiver<Option<Incarnation>> {
        self.incarnation.subscribe()
    }

    /// Invalidates cached views after a change of what is known of its blocks.
    pub(crate) fn invalidate_views(&self) {
        self.in_flight.invalidate_views();
    }

    /// Returns how many blocks fit into the device memory of its largest rank; None if it does not report that.
    pub(crate) fn max_blocks(&self) -> Option<u64> {
        Some(self.state.load().scrape.cache.max_blocks).filter(|most| *most > 0)
    }

    pub(super) fn confidence(&self) -> SpeedConfidence {
        let (prefill, decode_step) = self.in_flight.confidence();
        let (link_latency, link_bandwidth) = self.transfers.lock().confidence();
        SpeedConfidence { prefill, decode_step, link_latency, link_bandwidth }
    }

    /// Returns the planner's view of it.
    pub(super) fn view(&self, index_state: KvIndexState) -> WorkerView {
        let seen = self.state.load();
        let profile = &self.spec.profile;
        let health = match seen.health {
            WorkerHealth::Ready if *self.demand.borrow() == WorkerDemand::Drains => WorkerHealth::Draining,
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
            kv_index_state: index_state,
            load: self.in_flight.counters.load(&seen.scrape, seen.counters, self.usual_prompt),
            capacity: seen.capacity(),
            speeds: self.in_flight.speeds(),
            kv_bytes_per_token: seen.kv_bytes(profile),
            link: seen.fabric.clone().map(|fabric| self.transfers.lock().link(fabric, seen.connector.transfer_scope())),
        }
    }
}

impl WorkerDemand {
    fn has_left(self) -> bool {
        matches!(self, WorkerDemand::Left | WorkerDemand::Cleared)
    }
}

/// Whether the last metrics still describe the current load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MetricsFreshness {
    Fresh,
    Stale,
}

impl ProbedState {
    pub(super) fn capacity(&self) -> WorkerCapacity {
        let capacity = self.scrape.cache.capacity;
        if self.context > Tokens::ZERO { WorkerCapacity { context: self.context, ..capacity } } else { capacity }
    }

    /// Returns the number of data-parallel ranks.
    pub(super) fn ranks(&self) -> u16 {
        self.scrape.ranks.max(1)
    }

    fn kv_bytes(&self, profile: &WorkerProfile) -> Bytes {
        let configured = profile.kv_size_per_token.map(|size| Bytes(size.0 as u64));
        configured.or(self.scrape.cache.bytes_per_token).unwrap_or(WorkerProfile::DEFAULT_KV_BYTES)
    }
}
