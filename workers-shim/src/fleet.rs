//! The fleet: current state of all workers. Combines probes and metrics scrapes, this router's own requests in flight,
//! and KV events. Exchanges requests in flight and snapshots of residency with other routers.
//!
//! It only observes and counts: it selects no worker and changes nothing on a worker.
//!
//! **Identity.** A worker's incarnation is its process start time. Where `/metrics` does not contain it (a plain
//! OpenAI-compatible server, SGLang), the incarnation is always 0, and a restart between two probes goes unnoticed.
//! **Load** without `/metrics` is this router's own requests in flight.

mod endpoint_discovery;
mod error;
mod estimate;
mod in_flight;
mod kv_connector;
mod link_estimate;
pub(crate) mod peer_in_flight;
pub(crate) mod probe;
mod probe_round;
mod speeds;
mod worker_definition;
pub(crate) mod worker_handle;
mod worker_registry;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::RoutedBlockLimits;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use vocabulary::{
    Bytes, DpRank, Incarnation, KvIndexState, Micros, NodeId, Tokens, WorkerHealth, WorkerId, WorkerView,
};

use crate::engine_api::KvTransfer;
pub use crate::events::BlockMappingResolver;
use crate::events::{
    EncodedSnapshot, EventCounts, EventSourceCount, FollowerEnvironment, InexactReason, SharedIndex, SnapshotProvider,
    StepPromptChains, follow,
};
use crate::scrape::EngineKind;
pub use error::FleetError;
pub use estimate::{Confidence, SpeedConfidence};
pub use in_flight::InFlightGuard;
use peer_in_flight::PeerInFlightTables;
pub use peer_in_flight::{InFlightReport, MergeOutcome, RankInFlightCounts, SILENCE_TIMEOUT};
use probe::Prober;
pub use probe_round::Adapter;
pub use worker_definition::{
    EventSourceSetting, KvExchangeSetting, LinkProfile, ProbeSettings, WorkerDefinition, WorkerProfile,
};
pub use worker_handle::LivenessReport;
use worker_handle::WorkerHandle;
pub use worker_registry::FleetChangeCounts;
use worker_registry::{WorkerRegistry, WorkerSuccession};

/// Number of probe intervals between attempts to discover event sources of a worker that had none.
const DISCOVERY_EVERY: u32 = 60;

/// Options of a fleet.
pub struct FleetOptions {
    /// The initial workers; see [`Fleet::set_workers`].
    pub workers: Vec<WorkerDefinition>,
    /// Probe intervals and timeouts.
    pub pace: ProbeSettings,
    /// The index that events are applied to.
    pub index: SharedIndex,
    /// How events are mapped to chain blocks.
    pub rules: BlockMappingResolver,
    /// Receives a report for each successful probe. Reports are dropped while the channel is full; the next one follows
    /// in a second.
    pub liveness: Option<mpsc::Sender<LivenessReport>>,
    /// Limits of what is recorded for workers without events.
    pub routed_limits: RoutedBlockLimits,
    /// The other routers, if there are any: a router that starts late gets the events from them that engines no longer
    /// replay.
    pub snapshots: Option<Arc<dyn SnapshotProvider>>,
    /// Maximum number of connected event publishers beyond the first rank of each worker.
    pub extra_ranks: usize,
}

/// Creates the future of a task; called again after a panic.
pub type TaskFactory = Box<dyn FnMut() -> BoxFuture<'static, ()> + Send>;

/// Runs a task until it completes, and restarts it after a panic. Several tasks may share a name.
pub type TaskSupervisor = Arc<dyn Fn(&'static str, TaskFactory) -> BoxFuture<'static, ()> + Send + Sync>;

/// The current state of all workers. Dropping it stops its probes and event streams.
pub struct Fleet {
    registry: Arc<WorkerRegistry>,
    prober_environment: WorkerTaskEnvironment,
    index: SharedIndex,
    revision: Arc<AtomicU64>,
    cached: ArcSwap<CachedViews>,
    peers: Mutex<PeerInFlightTables>,
    /// Number of other routers that report.
    peer_count: AtomicUsize,
    /// Notified when a request is dispatched.
    dispatched: Notify,
    tasks: Mutex<JoinSet<()>>,
}

struct CachedViews {
    revision: u64,
    views: Arc<[WorkerView]>,
}

/// What the tasks of a new worker need.
struct WorkerTaskEnvironment {
    client: reqwest::Client,
    pace: ProbeSettings,
    liveness: Option<mpsc::Sender<LivenessReport>>,
    follower_environment: FollowerEnvironment,
    supervise: TaskSupervisor,
}

impl Fleet {
    /// Starts the fleet without supervision: a panic ends a task for good. Must be called inside a tokio runtime.
    pub fn start(options: FleetOptions) -> Result<Self, FleetError> {
        Self::start_supervised(options, Arc::new(|_, mut begin| begin()))
    }

    /// Starts the fleet with tasks supervised by `supervise`. Must be called inside a tokio runtime.
    pub fn start_supervised(options: FleetOptions, supervise: TaskSupervisor) -> Result<Self, FleetError> {
        let client = probe::client(options.pace)?;
        let follower_environment = FollowerEnvironment {
            client: client.clone(),
            index: options.index.clone(),
            rules: options.rules,
            routed_limits: options.routed_limits,
            snapshots: options.snapshots,
            rediscover_after: options.pace.every.saturating_mul(DISCOVERY_EVERY),
            extra_ranks: Arc::new(Semaphore::new(options.extra_ranks)),
        };
        let fleet = Self {
            registry: Arc::default(),
            prober_environment: WorkerTaskEnvironment {
                client,
                pace: options.pace,
                liveness: options.liveness,
                follower_environment,
                supervise,
            },
            index: options.index,
            revision: Arc::new(AtomicU64::new(1)),
            cached: ArcSwap::from_pointee(CachedViews { revision: 0, views: Arc::new([]) }),
            peers: Mutex::default(),
            peer_count: AtomicUsize::new(0),
            dispatched: Notify::new(),
            tasks: Mutex::default(),
        };
        fleet.set_workers(options.workers)?;
        Ok(fleet)
    }

    /// Replaces the list of workers, in this order. Workers with an unchanged definition continue undisturbed. All
    /// others leave: they get no new requests, running ones finish, and their blocks are forgotten. Must be called
    /// inside a tokio runtime.
    pub fn set_workers(&self, workers: Vec<WorkerDefinition>) -> Result<FleetChangeCounts, FleetError> {
        let usual_prompt = self.prober_environment.pace.usual_prompt;
        let member = |spec| WorkerHandle::new(spec, self.revision.clone(), usual_prompt);
        let (diff, joined) = self.registry.set_workers(workers, member)?;
        self.revision.fetch_add(1, Ordering::Release);
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        joined.into_iter().for_each(|worker| self.spawn_worker_tasks(worker, &mut tasks));
        Ok(diff)
    }

    /// Returns whether the worker is listed and has not left.
    pub fn is_listed(&self, worker: WorkerId) -> bool {
        self.member(worker).is_some_and(|member| !member.has_left())
    }

    /// Returns the workers that have left but still run requests.
    pub fn leaving(&self) -> Vec<WorkerId> {
        self.registry.load().leaving.iter().map(|member| member.id).collect()
    }

    fn spawn_worker_tasks(&self, WorkerSuccession { member, predecessor }: WorkerSuccession, tasks: &mut JoinSet<()>) {
        let WorkerTaskEnvironment { client, pace, liveness, follower_environment, supervise } =
            &self.prober_environment;
        let (client, pace, liveness) = (client.clone(), *pace, liveness.clone());
        let prober = Prober { member: member.clone(), client, pace, liveness };
        let (registry, probed_worker) = (self.registry.clone(), member.clone());
        let probe_worker = move || {
            let (prober, registry, worker) = (prober.clone(), registry.clone(), probed_worker.clone());
            async move {
                prober.run().await;
                worker.wait_forgotten().await;
                registry.remove(&worker);
            }
            .boxed()
        };
        tasks.spawn(supervise("probes", Box::new(probe_worker)));
        let environment = follower_environment.clone();
        let follow_events = move || {
            let (predecessor, member, environment) = (predecessor.clone(), member.clone(), environment.clone());
            async move {
                if let Some(predecessor) = predecessor {
                    predecessor.wait_forgotten().await;
                }
                follow(member, environment).await;
            }
            .boxed()
        };
        tasks.spawn(supervise("events", Box::new(follow_events)));
    }

    /// Returns all listed workers in order. Cached until something changes.
    pub fn snapshot(&self) -> Arc<[WorkerView]> {
        let revision = self.revision.load(Ordering::Acquire);
        let cached = self.cached.load();
        if cached.revision == revision {
            return cached.views.clone();
        }
        let index = self.index.read();
        let kv_index_state = |id: WorkerId| index.kv_index_state(id);
        let views: Arc<[WorkerView]> = {
            let table = self.registry.load();
            table.members.iter().map(|member| member.view(kv_index_state(member.id))).collect()
        };
        drop(index);
        self.cached.store(Arc::new(CachedViews { revision, views: views.clone() }));
        views
    }

    /// Counts a request with `tokens` prompt tokens to compute at this rank, until the returned guard is dropped.
    pub fn dispatch(&self, worker: WorkerId, rank: DpRank, tokens: Tokens) -> InFlightGuard {
        let in_flight = InFlightGuard::new(self.member(worker).map(|member| member.in_flight.clone()), rank, tokens);
        self.dispatched.notify_one();
        in_flight
    }

    /// Waits until a request was dispatched since the last call returned. For a single waiter.
    pub async fn wait_dispatched(&self) {
        self.dispatched.notified().await;
    }

    /// Marks the worker as unreachable after a refused or broken connection. It gets no requests until a probe
    /// succeeds; one is sent at once.
    pub fn mark_unreachable(&self, worker: WorkerId) {
        if let Some(member) = self.member(worker) {
            member.mark_unreachable();
        }
    }

    /// Returns the incarnation that answers probes; None while none does.
    pub fn incarnation(&self, worker: WorkerId) -> Option<Incarnation> {
        *self.member(worker)?.watch_incarnation().borrow()
    }

    /// Returns a future that completes once the current incarnation is unreachable or replaced by another process. It
    /// completes at once if the worker is not reachable now or not in the fleet.
    pub fn wait_lost(&self, worker: WorkerId) -> impl Future<Output = ()> + Send + 'static {
        let incarnation = self.member(worker).map(|member| member.watch_incarnation());
        async move {
            let Some(mut incarnation) = incarnation else { return };
            let Some(current) = *incarnation.borrow() else { return };
            // An error means that the fleet itself was dropped.
            let _ = incarnation.wait_for(|now| *now != Some(current)).await;
        }
    }

    /// Sets whether the worker is draining, which means that it takes no new sessions. [`WorkerHealth::Draining`]
    /// starts it, any other value ends it.
    pub fn set_draining(&self, worker: WorkerId, health: WorkerHealth) {
        if let Some(member) = self.member(worker) {
            member.set_draining(health);
        }
    }

    /// Records a KV transfer to the worker, which updates the estimated costs of its link.
    pub fn record_transfer(&self, worker: WorkerId, bytes: Bytes, duration: Micros) {
        if let Some(member) = self.member(worker) {
            member.record_transfer(bytes, duration);
        }
    }

    /// Returns a transfer with the id `room` from a rank of one worker to another. None where their connectors differ
    /// or the source's transfer endpoint is not known.
    pub fn transfer(&self, (source, rank): (WorkerId, DpRank), target: WorkerId, room: u64) -> Option<KvTransfer> {
        let (source, target) = (self.member(source)?.probed_state(), self.member(target)?.probed_state());
        source.connector.transfer(&target.connector, (rank, source.ranks()), room)
    }

    /// Records that a step was served at this rank, for what the worker's events do not report.
    pub fn note_routed(&self, worker: WorkerId, rank: DpRank, step: StepPromptChains<'_>) {
        let kv_capacity =
            self.member(worker).map(|member| member.probed_state().capacity().kv).filter(|kv| *kv > Tokens::ZERO);
        if self.index.note_routed((worker, rank), step, kv_capacity) == KvIndexState::Approximate {
            self.revision.fetch_add(1, Ordering::Release);
        }
    }

    /// Returns which engine the last scraped metrics belong to; [`EngineKind::Other`] if there were none.
    pub fn engine(&self, worker: WorkerId) -> EngineKind {
        self.member(worker).map_or_else(EngineKind::default, |member| member.engine())
    }

    /// Returns the number of the worker's data-parallel ranks; one if it is not known.
    pub fn ranks(&self, worker: WorkerId) -> u16 {
        self.member(worker).map_or(1, |member| member.probed_state().ranks())
    }

    /// Returns the LoRA adapters that the worker lists.
    pub fn adapters(&self, worker: WorkerId) -> Arc<[Adapter]> {
        self.member(worker).map(|member| member.probed_state().adapters.clone()).unwrap_or_default()
    }

    /// Returns the counters of the worker's events.
    pub fn events(&self, worker: WorkerId) -> Option<EventCounts> {
        self.member(worker).map(|member| member.events.counts())
    }

    /// Returns how many event sources the worker has, and how many are connected.
    pub fn event_sources(&self, worker: WorkerId) -> Option<EventSourceCount> {
        self.member(worker).map(|member| member.events.sources.count())
    }

    /// Returns why the worker's blocks are not known exactly; None if they are.
    pub fn inexact_reason(&self, worker: WorkerId) -> Option<InexactReason> {
        self.member(worker)?.events.sources.inexact_reason()
    }

    /// Returns the confidence in the worker's estimated speeds.
    pub fn confidence(&self, worker: WorkerId) -> Option<SpeedConfidence> {
        self.member(worker).map(|member| member.confidence())
    }

    fn member(&self, worker: WorkerId) -> Option<Arc<WorkerHandle>> {
        self.registry.load().member(worker).cloned()
    }
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("workers", &self.registry.load().members.len()).finish_non_exhaustive()
    }
}

impl Fleet {
    /// Returns this router's counters, one entry for each rank to which anything was ever sent.
    pub fn in_flight(&self) -> Vec<RankInFlightCounts> {
        let flows = |member: &Arc<WorkerHandle>| {
            let worker = member.id;
            member.in_flight.entries().into_iter().map(move |flow| RankInFlightCounts { worker, ..flow })
        };
        let table = self.registry.load();
        table.members.iter().chain(&table.leaving).flat_map(flows).collect()
    }

    /// Stores another router's report of its requests in flight. It counts as load of the workers until that router is
    /// silent for [`SILENCE_TIMEOUT`].
    pub fn merge_peer_table(&self, node: NodeId, table: InFlightReport, now: Instant) -> MergeOutcome {
        let mut overlay = self.peers.lock();
        let merged = overlay.merge(node, table, now);
        if merged == MergeOutcome::Changed {
            self.update_peer_in_flight(&overlay);
        }
        merged
    }

    /// Removes silent routers. Must be called periodically.
    pub fn expire_peers(&self, now: Instant) {
        let mut overlay = self.peers.lock();
        if overlay.expire(now) {
            self.update_peer_in_flight(&overlay);
        }
    }

    /// Returns the number of reporting routers.
    pub fn peer_count(&self) -> usize {
        self.peer_count.load(Ordering::Relaxed)
    }

    /// Returns the reporting routers and the ages of their reports.
    pub fn peer_ages(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.peers.lock().ages(now)
    }

    /// Returns a snapshot of a rank's blocks for another router; None unless they are known exactly.
    pub fn residency_snapshot(
        &self,
        worker: WorkerId,
        rank: DpRank,
    ) -> impl Future<Output = Option<EncodedSnapshot>> + Send + 'static {
        let requests = self.member(worker).map(|member| member.exports.request(rank));
        async move { requests?.await }
    }

    fn update_peer_in_flight(&self, overlay: &PeerInFlightTables) {
        self.peer_count.store(overlay.live_routers(), Ordering::Relaxed);
        let sums = overlay.sums();
        let table = self.registry.load();
        for member in table.members.iter().chain(&table.leaving) {
            let others = sums.get(&member.id).copied().unwrap_or(overlay.empty_sum());
            if member.in_flight.counters.set_peer_in_flight(others) {
                member.invalidate_views();
            }
        }
    }
}

#[cfg(test)]
mod tests;
