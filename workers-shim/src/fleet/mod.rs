//! The fleet: every worker as it looks now. Probes and scrapes tell what the engines do, our own requests in flight
//! tell what we just sent there, events tell what they hold.
//!
//! It observes and counts. It picks no worker and changes nothing at one.
//!
//! **Identity.** A worker's incarnation is its process start time. Where `/metrics` does not tell it (a plain
//! OpenAI-compatible server, SGLang) the incarnation is 0 in all its lives, and a restart that falls between two
//! probes is not seen. **Load** without `/metrics` is this router's own requests in flight.

mod answers;
mod config;
mod estimate;
mod flight;
mod link;
pub(crate) mod member;
pub(crate) mod overlay;
pub(crate) mod probe;
mod roll;
mod sharing;
mod speech;
mod speeds;

pub use answers::Adapter;
pub use config::{EventsAt, LinkProfile, Pace, Transfers, WorkerProfile, WorkerSpec};
pub use estimate::{Confidence, SpeedConfidence};
pub use flight::InFlight;
pub use overlay::{Flow, Heard, InFlightTable, SILENCE};
pub use roll::Turnover;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use residency::{RoutedLimits, SourceRules};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use vocabulary::{Bytes, DpRank, Health, Incarnation, Knowledge, Micros, ModelId, Tokens, WorkerId, WorkerView};

use crate::dialect::Transfer;
use crate::events::{Doubt, EventCounts, Following, Imprints, Served, SharedIndex, SourceCount, follow};
use crate::scrape::Engine;
use member::Member;
use overlay::Overlay;
use probe::Prober;
use roll::{Newcomer, Roll};

/// Probes between two looks for the events of a worker that had none.
const LOOK_EVERY: u32 = 60;

/// A fleet that cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// No HTTP client could be made.
    #[error("no HTTP client for probes: {0}")]
    Client(#[from] reqwest::Error),
    /// The same endpoint twice.
    #[error("the worker {0} is listed twice")]
    Twice(Arc<str>),
}

/// A worker answered a probe: some router reached this life of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Alive {
    /// Which.
    pub worker: WorkerId,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Its data-parallel ranks.
    pub ranks: u16,
}

/// How the events of a worker that serves this model become chain blocks; none for models that are known by bytes
/// only, whose chains no engine event can match.
pub type RulesOf = Arc<dyn Fn(&ModelId) -> Option<SourceRules> + Send + Sync>;

/// What a fleet is made of.
pub struct FleetOptions {
    /// Everybody at the start; see [`Fleet::set`].
    pub workers: Vec<WorkerSpec>,
    /// How often they are asked.
    pub pace: Pace,
    /// Where events go.
    pub index: SharedIndex,
    /// How events are read.
    pub rules: RulesOf,
    /// Where successful probes are told; full means that a report is dropped, the next one comes in a second.
    pub alive: Option<mpsc::Sender<Alive>>,
    /// How much is remembered of what was routed to workers without events.
    pub routed: RoutedLimits,
    /// The other routers, where there are any: who starts late learns from them what engines no longer tell.
    pub imprints: Option<Arc<dyn Imprints>>,
}

/// Begins a task, once more after it ended in a panic.
pub type Begin = Box<dyn FnMut() -> BoxFuture<'static, ()> + Send>;

/// Runs a task of this name until its work is done, and begins it anew where a panic ends it. Several tasks have one name.
pub type Keep = Arc<dyn Fn(&'static str, Begin) -> BoxFuture<'static, ()> + Send + Sync>;

/// Every worker as it looks now. Dropping it stops its probes and its event streams.
pub struct Fleet {
    roll: Arc<Roll>,
    recruiting: Recruiting,
    index: SharedIndex,
    revision: Arc<AtomicU64>,
    cached: ArcSwap<Cached>,
    overlay: Mutex<Overlay>,
    /// How many other routers are heard.
    routers: AtomicUsize,
    /// A request was sent since somebody waited for one.
    dispatched: Notify,
    tasks: Mutex<JoinSet<()>>,
}

struct Cached {
    revision: u64,
    views: Arc<[WorkerView]>,
}

/// What a worker that joins is watched with.
struct Recruiting {
    client: reqwest::Client,
    pace: Pace,
    alive: Option<mpsc::Sender<Alive>>,
    following: Following,
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
        let following = Following {
            client: client.clone(),
            index: options.index.clone(),
            rules: options.rules,
            routed: options.routed,
            imprints: options.imprints,
            look_again: options.pace.every.saturating_mul(LOOK_EVERY),
        };
        let fleet = Self {
            roll: Arc::default(),
            recruiting: Recruiting { client, pace: options.pace, alive: options.alive, following, keep },
            index: options.index,
            revision: Arc::new(AtomicU64::new(1)),
            cached: ArcSwap::from_pointee(Cached { revision: 0, views: Arc::new([]) }),
            overlay: Mutex::default(),
            routers: AtomicUsize::new(0),
            dispatched: Notify::new(),
            tasks: Mutex::default(),
        };
        fleet.set(options.workers)?;
        Ok(fleet)
    }

    /// Makes these the workers, in this order. Those that are described as before go on as they are. The others leave: they
    /// get nothing new, what they began goes on, and what they hold is forgotten. Must be called inside a tokio runtime.
    pub fn set(&self, workers: Vec<WorkerSpec>) -> Result<Turnover, FleetError> {
        let usual_prompt = self.recruiting.pace.usual_prompt;
        let member = |spec| Member::new(spec, self.revision.clone(), usual_prompt);
        let (turnover, newcomers) = self.roll.set(workers, member)?;
        self.revision.fetch_add(1, Ordering::Release);
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        newcomers.into_iter().for_each(|newcomer| self.watch(newcomer, &mut tasks));
        Ok(turnover)
    }

    /// Whether the worker gets work: it is listed, and has not left.
    pub fn lists(&self, worker: WorkerId) -> bool {
        self.member(worker).is_some_and(|member| !member.has_left())
    }

    /// Workers that left and have not brought everything to its end.
    pub fn leaving(&self) -> Vec<WorkerId> {
        self.roll.load().leaving.iter().map(|member| member.id).collect()
    }

    fn watch(&self, Newcomer { member, before }: Newcomer, tasks: &mut JoinSet<()>) {
        let Recruiting { client, pace, alive, following, keep } = &self.recruiting;
        let (client, pace, alive) = (client.clone(), *pace, alive.clone());
        let prober = Prober { member: member.clone(), client, pace, alive };
        let (roll, gone) = (self.roll.clone(), member.clone());
        let probing = move || {
            let (prober, roll, gone) = (prober.clone(), roll.clone(), gone.clone());
            async move {
                prober.run().await;
                gone.forgotten().await;
                roll.strike(&gone);
            }
            .boxed()
        };
        tasks.spawn(keep("probes", Box::new(probing)));
        let following = following.clone();
        let followed = move || {
            let (before, member, following) = (before.clone(), member.clone(), following.clone());
            async move {
                if let Some(before) = before {
                    before.forgotten().await;
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
            let table = self.roll.load();
            table.members.iter().map(|member| member.view(knowledge(member.id))).collect()
        };
        drop(index);
        self.cached.store(Arc::new(Cached { revision, views: views.clone() }));
        views
    }

    /// Counts a request with `tokens` to compute as being at this rank, until the guard is dropped.
    pub fn dispatch(&self, worker: WorkerId, rank: DpRank, tokens: Tokens) -> InFlight {
        let in_flight = InFlight::new(self.member(worker).map(|member| member.desk.clone()), rank, tokens);
        self.dispatched.notify_one();
        in_flight
    }

    /// Returns once a request was sent since this last returned. For one waiter.
    pub async fn dispatched(&self) {
        self.dispatched.notified().await;
    }

    /// A connection to the worker was refused or broke: it takes no work until a probe succeeds, which is tried at once.
    pub fn unreachable(&self, worker: WorkerId) {
        if let Some(member) = self.member(worker) {
            member.unreachable();
        }
    }

    /// The life of the worker that probes reach; none while they reach none.
    pub fn life(&self, worker: WorkerId) -> Option<Incarnation> {
        *self.member(worker)?.life().borrow()
    }

    /// Ends when this life of the worker is over for us: it cannot be reached any more, or another process answers there.
    /// At once for one that is not reached now or does not belong to the fleet.
    pub fn lost(&self, worker: WorkerId) -> impl Future<Output = ()> + Send + 'static {
        let life = self.member(worker).map(|member| member.life());
        async move {
            let Some(mut life) = life else { return };
            let Some(begun) = *life.borrow() else { return };
            // An error means that the fleet itself is gone.
            let _ = life.wait_for(|now| *now != Some(begun)).await;
        }
    }

    /// Sets whether the worker takes new sessions: [`Health::Draining`] to stop it, anything else to let it.
    pub fn set_draining(&self, worker: WorkerId, wanted: Health) {
        if let Some(member) = self.member(worker) {
            member.drain(wanted);
        }
    }

    /// KV came to the worker from another one: its link's costs are learnt from that.
    pub fn transferred(&self, worker: WorkerId, bytes: Bytes, took: Micros) {
        if let Some(member) = self.member(worker) {
            member.transferred(bytes, took);
        }
    }

    /// The transfer with this number from a rank of one worker to another; none where they do not speak the same dialect,
    /// or it is not known where they meet.
    pub fn transfer(&self, (source, rank): (WorkerId, DpRank), target: WorkerId, room: u64) -> Option<Transfer> {
        let (source, target) = (self.member(source)?.seen(), self.member(target)?.seen());
        source.speech.transfer(&target.speech, (rank, source.ranks()), room)
    }

    /// A step was served there. Remembered is what the worker's events do not tell.
    pub fn note_routed(&self, worker: WorkerId, rank: DpRank, step: Served<'_>) {
        let room = self.member(worker).map(|member| member.seen().capacity().kv).filter(|room| *room > Tokens::ZERO);
        if self.index.note_routed((worker, rank), step, room) == Knowledge::Fallback {
            self.revision.fetch_add(1, Ordering::Release);
        }
    }

    /// Whose metrics the worker showed last; [`Engine::Other`] where it showed none.
    pub fn engine(&self, worker: WorkerId) -> Engine {
        self.member(worker).map_or_else(Engine::default, |member| member.engine())
    }

    /// The LoRA adapters that the worker lists.
    pub fn adapters(&self, worker: WorkerId) -> Arc<[Adapter]> {
        self.member(worker).map(|member| member.seen().adapters.clone()).unwrap_or_default()
    }

    /// What came of the worker's events so far.
    pub fn events(&self, worker: WorkerId) -> Option<EventCounts> {
        self.member(worker).map(|member| member.events.counts())
    }

    /// How many event sources the worker has, and how many are heard.
    pub fn event_sources(&self, worker: WorkerId) -> Option<SourceCount> {
        self.member(worker).map(|member| member.events.sources.count())
    }

    /// Why the worker's blocks are not known exactly; none where they are.
    pub fn doubt(&self, worker: WorkerId) -> Option<Doubt> {
        self.member(worker)?.events.sources.doubt()
    }

    /// How sure what is believed of the worker's speeds is.
    pub fn confidence(&self, worker: WorkerId) -> Option<SpeedConfidence> {
        self.member(worker).map(|member| member.confidence())
    }

    fn member(&self, worker: WorkerId) -> Option<Arc<Member>> {
        self.roll.load().member(worker).cloned()
    }
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").field("workers", &self.roll.load().members.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
