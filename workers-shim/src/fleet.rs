//! The fleet: every worker as it looks now. Probes and scrapes tell what the engines do, our own requests in flight
//! tell what we just sent there, events tell what they hold.
//!
//! It observes and counts. It picks no worker and changes nothing at one.
//!
//! **Identity.** A worker's incarnation is its process start time. Where `/metrics` does not tell it (a plain
//! OpenAI-compatible server, SGLang) the incarnation is 0 in all its lives, and a restart that falls between two
//! probes is not seen. **Load** without `/metrics` is this router's own requests in flight.

mod config;
mod estimate;
mod in_flight;
mod kv_connector;
mod link;
pub(crate) mod peer_in_flight;
pub(crate) mod probe;
mod probe_round;
mod router_peers;
mod speeds;
pub(crate) mod worker_handle;
mod worker_registry;

pub use config::{EventSourceSetting, KvExchangeMode, LinkProfile, ProbeSettings, WorkerDefinition, WorkerProfile};
pub use estimate::{Confidence, SpeedConfidence};
pub use in_flight::InFlightRequest;
pub use peer_in_flight::{InFlightEntry, InFlightTable, MergeOutcome, SILENCE_TIMEOUT};
pub use probe_round::Adapter;
pub use worker_registry::FleetDiff;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::{RoutedBlockLimits, SourceRules};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use vocabulary::{
    Bytes, DpRank, Incarnation, KvIndexState, Micros, ModelId, Tokens, WorkerHealth, WorkerId, WorkerView,
};

use crate::engine_api::KvTransfer;
use crate::events::{
    EventCounts, EventSourceCount, FollowerEnvironment, InexactReason, ServedPrompts, SharedIndex, SnapshotProvider,
    follow,
};
use crate::scrape::EngineKind;
use peer_in_flight::PeerInFlightTables;
use probe::Prober;
use worker_handle::WorkerHandle;
use worker_registry::{JoinedWorker, WorkerRegistry};

/// Probes between two looks for the events of a worker that had none.
const DISCOVERY_EVERY: u32 = 60;

/// A fleet that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// No HTTP client could be made.
    #[error("no HTTP client for probes: {0}")]
    Client(#[from] reqwest::Error),
    /// The same endpoint twice.
    #[error("the worker {0} is listed twice")]
    DuplicateWorker(Arc<str>),
}

/// A worker answered a probe: some router reached this life of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LivenessReport {
    /// Which.
    pub worker: WorkerId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Its data-parallel ranks.
    pub ranks: u16,
}

/// How the events of a worker that serves this model become chain blocks; none for models that are known by bytes
/// only, whose chains no engine event can match.
pub type SourceRulesResolver = Arc<dyn Fn(&ModelId) -> Option<SourceRules> + Send + Sync>;

/// What a fleet is made of.
pub struct FleetOptions {
    /// Everybody at the start; see [`Fleet::set_workers`].
    pub workers: Vec<WorkerDefinition>,
    /// How often they are asked.
    pub pace: ProbeSettings,
    /// Where events go.
    pub index: SharedIndex,
    /// How events are read.
    pub rules: SourceRulesResolver,
    /// Where successful probes are told; full means that a report is dropped, the next one comes in a second.
    pub liveness: Option<mpsc::Sender<LivenessReport>>,
    /// How much is remembered of what was routed to workers without events.
    pub routed_limits: RoutedBlockLimits,
    /// The other routers, where there are any: who starts late learns from them what engines no longer tell.
    pub snapshots: Option<Arc<dyn SnapshotProvider>>,
}

/// Begins a task, once more after it ended in a panic.
pub type Begin = Box<dyn FnMut() -> BoxFuture<'static, ()> + Send>;

/// Runs a task of this name until its work is done, and begins it anew where a panic ends it. Several tasks have one name.
pub type Keep = Arc<dyn Fn(&'static str, Begin) -> BoxFuture<'static, ()> + Send + Sync>;

/// Every worker as it looks now. Dropping it stops its probes and its event streams.
pub struct Fleet {
    registry: Arc<WorkerRegistry>,
    prober_environment: ProberEnvironment,
    index: SharedIndex,
    revision: Arc<AtomicU64>,
    cached: ArcSwap<CachedViews>,
    peers: Mutex<PeerInFlightTables>,
    /// How many other routers are heard.
    peer_count: AtomicUsize,
    /// A request was sent since somebody waited for one.
    dispatched: Notify,
    tasks: Mutex<JoinSet<()>>,
}

struct CachedViews {
    revision: u64,
    views: Arc<[WorkerView]>,
}

/// What a worker that joins is watched with.
struct ProberEnvironment {
    client: reqwest::Client,
    pace: ProbeSettings,
    liveness: Option<mpsc::Sender<LivenessReport>>,
    follower_environment: FollowerEnvironment,
    keep: Keep,
}

impl Fleet {
    /// Starts to watch, with tasks that a panic ends for good. Must be called inside a tokio runtime.
    pub fn start(options: FleetOptions) -> Result<Self, FleetError> {
        Self::start_kept(options, Arc::new(|_, mut begin| begin()))
    }

    /// Starts to watch, with tasks that are kept. Must be called inside a tokio runtime.
    pub fn start_kept(options: FleetOptions, keep: Keep) -> Result<Self, FleetError> {
        let client = probe::client(options.pace)?;
        let following = FollowerEnvironment {
            client: client.clone(),
            index: options.index.clone(),
            rules: options.rules,
            routed_limits: options.routed_limits,
            snapshots: options.snapshots,
            rediscover_after: options.pace.every.saturating_mul(DISCOVERY_EVERY),
        };
        let fleet = Self {
            registry: Arc::default(),
            prober_environment: ProberEnvironment {
                client,
                pace: options.pace,
                liveness: options.liveness,
                follower_environment: following,
                keep,
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

    /// Makes these the workers, in this order. Those that are described as before go on as they are. The others leave: they
    /// get nothing new, what they began goes on, and what they hold is forgotten. Must be called inside a tokio runtime.
    pub fn set_workers(&self, workers: Vec<WorkerDefinition>) -> Result<FleetDiff, FleetError> {
        let usual_prompt = self.prober_environment.pace.usual_prompt;
        let member = |spec| WorkerHandle::new(spec, self.revision.clone(), usual_prompt);
        let (turnover, newcomers) = self.registry.set_workers(workers, member)?;
        self.revision.fetch_add(1, Ordering::Release);
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        newcomers.into_iter().for_each(|newcomer| self.spawn_worker_tasks(newcomer, &mut tasks));
        Ok(turnover)
    }

    /// Whether the worker gets work: it is listed, and has not left.
    pub fn is_listed(&self, worker: WorkerId) -> bool {
        self.member(worker).is_some_and(|member| !member.has_left())
    }

    /// Workers that left and have not brought everything to its end.
    pub fn leaving(&self) -> Vec<WorkerId> {
        self.registry.load().leaving.iter().map(|member| member.id).collect()
    }

    fn spawn_worker_tasks(&self, JoinedWorker { member, predecessor: before }: JoinedWorker, tasks: &mut JoinSet<()>) {
        let ProberEnvironment { client, pace, liveness: alive, follower_environment: following, keep } =
            &self.prober_environment;
        let (client, pace, alive) = (client.clone(), *pace, alive.clone());
        let prober = Prober { member: member.clone(), client, pace, liveness: alive };
        let (roll, gone) = (self.registry.clone(), member.clone());
        let probing = move || {
            let (prober, roll, gone) = (prober.clone(), roll.clone(), gone.clone());
            async move {
                prober.run().await;
                gone.wait_forgotten().await;
                roll.remove(&gone);
            }
            .boxed()
        };
        tasks.spawn(keep("probes", Box::new(probing)));
        let following = following.clone();
        let followed = move || {
            let (before, member, following) = (before.clone(), member.clone(), following.clone());
            async move {
                if let Some(before) = before {
                    before.wait_forgotten().await;
                }
                follow(member, following).await;
            }
            .boxed()
        };
        tasks.spawn(keep("events", Box::new(followed)));
    }

    /// All workers that are listed, in their order. Made anew only when something changed.
    pub fn snapshot(&self) -> Arc<[WorkerView]> {
        let revision = self.revision.load(Ordering::Acquire);
        let cached = self.cached.load();
        if cached.revision == revision {
            return cached.views.clone();
        }
        let index = self.index.read();
        let knowledge = |id: WorkerId| index.knowledge(id);
        let views: Arc<[WorkerView]> = {
            let table = self.registry.load();
            table.members.iter().map(|member| member.view(knowledge(member.id))).collect()
        };
        drop(index);
        self.cached.store(Arc::new(CachedViews { revision, views: views.clone() }));
        views
    }

    /// Counts a request with `tokens` to compute as being at this rank, until the guard is dropped.
    pub fn dispatch(&self, worker: WorkerId, rank: DpRank, tokens: Tokens) -> InFlightRequest {
        let in_flight = InFlightRequest::new(self.member(worker).map(|member| member.in_flight.clone()), rank, tokens);
        self.dispatched.notify_one();
        in_flight
    }

    /// Returns once a request was sent since this last returned. For one waiter.
    pub async fn wait_dispatched(&self) {
        self.dispatched.notified().await;
    }

    /// A connection to the worker was refused or broke: it takes no work until a probe succeeds, which is tried at once.
    pub fn mark_unreachable(&self, worker: WorkerId) {
        if let Some(member) = self.member(worker) {
            member.mark_unreachable();
        }
    }

    /// The life of the worker that probes reach; none while they reach none.
    pub fn incarnation(&self, worker: WorkerId) -> Option<Incarnation> {
        *self.member(worker)?.watch_incarnation().borrow()
    }

    /// Ends when this life of the worker is over for us: it cannot be reached any more, or another process answers there.
    /// At once for one that is not reached now or does not belong to the fleet.
    pub fn wait_lost(&self, worker: WorkerId) -> impl Future<Output = ()> + Send + 'static {
        let life = self.member(worker).map(|member| member.watch_incarnation());
        async move {
            let Some(mut life) = life else { return };
            let Some(begun) = *life.borrow() else { return };
            // An error means that the fleet itself is gone.
            let _ = life.wait_for(|now| *now != Some(begun)).await;
        }
    }

    /// Sets whether the worker takes new sessions: [`WorkerHealth::DrainFlag`] to stop it, anything else to let it.
    pub fn set_draining(&self, worker: WorkerId, wanted: WorkerHealth) {
        if let Some(member) = self.member(worker) {
            member.set_draining(wanted);
        }
    }

    /// KV came to the worker from another one: its link's costs are learnt from that.
    pub fn record_transfer(&self, worker: WorkerId, bytes: Bytes, took: Micros) {
        if let Some(member) = self.member(worker) {
            member.record_transfer(bytes, took);
        }
    }

    /// The transfer with this number from a rank of one worker to another; none where they do not speak the same dialect,
    /// or it is not known where they meet.
    pub fn transfer(&self, (source, rank): (WorkerId, DpRank), target: WorkerId, room: u64) -> Option<KvTransfer> {
        let (source, target) = (self.member(source)?.probed_state(), self.member(target)?.probed_state());
        source.connector.transfer(&target.connector, (rank, source.ranks()), room)
    }

    /// A step was served there. Remembered is what the worker's events do not tell.
    pub fn note_routed(&self, worker: WorkerId, rank: DpRank, step: ServedPrompts<'_>) {
        let room =
            self.member(worker).map(|member| member.probed_state().capacity().kv).filter(|room| *room > Tokens::ZERO);
        if self.index.note_routed((worker, rank), step, room) == KvIndexState::Fallback {
            self.revision.fetch_add(1, Ordering::Release);
        }
    }

    /// Whose metrics the worker showed last; [`EngineKind::Other`] where it showed none.
    pub fn engine(&self, worker: WorkerId) -> EngineKind {
        self.member(worker).map_or_else(EngineKind::default, |member| member.engine())
    }

    /// The LoRA adapters that the worker lists.
    pub fn adapters(&self, worker: WorkerId) -> Arc<[Adapter]> {
        self.member(worker).map(|member| member.probed_state().adapters.clone()).unwrap_or_default()
    }

    /// What came of the worker's events so far.
    pub fn events(&self, worker: WorkerId) -> Option<EventCounts> {
        self.member(worker).map(|member| member.events.counts())
    }

    /// How many event sources the worker has, and how many are heard.
    pub fn event_sources(&self, worker: WorkerId) -> Option<EventSourceCount> {
        self.member(worker).map(|member| member.events.sources.count())
    }

    /// Why the worker's blocks are not known exactly; none where they are.
    pub fn inexact_reason(&self, worker: WorkerId) -> Option<InexactReason> {
        self.member(worker)?.events.sources.inexact_reason()
    }

    /// How sure what is believed of the worker's speeds is.
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

#[cfg(test)]
mod tests;
