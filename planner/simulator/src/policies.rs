//! Who serves a step. Every policy sees the same fleet, exactly and at once; none of them has state in the world.

mod ablation;
mod disaggregated;
mod dynamo;
mod kind;
mod least_work;
mod owner_serve;
mod plain;
mod scored;
mod thunder_agent;

use std::cmp::Ordering;
use std::sync::Arc;

use engine_model::runs::{RunEngine, RunId, RunTree, Seconds, TierDepths};
use ledger::Ledger;
pub(crate) use planner::Action;
use planner::AttentionSpec;
use vocabulary::Tokens;

use crate::hardware_profile::HardwareProfile;
use crate::trace::TraceStep;

pub use ablation::Ablation;
pub(crate) use kind::all_policies;
pub use kind::{PolicyKind, UnknownPolicy};

/// A step of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StepRef {
    /// Which session.
    pub session: usize,
    /// Which step of it.
    pub step: usize,
}

/// A step that wants to be served.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// Which.
    pub at: StepRef,
    /// What it is.
    pub step: &'a TraceStep,
    /// Whether it is on its own: its session says nothing of it.
    pub is_independent: bool,
    /// What of its prompt lies at each worker.
    pub memory_by_worker: &'a [TierDepths],
}

impl PlacementRequest<'_> {
    /// Prompt tokens that a worker would compute.
    pub(crate) fn uncached_tokens(&self, worker: usize) -> Tokens {
        self.step.prompt - self.memory_by_worker[worker].with_disk
    }
}

/// The fleet as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct FleetView<'a> {
    /// When.
    pub now: Seconds,
    /// The workers.
    pub workers: &'a [&'a RunEngine],
    /// What each of them is.
    pub spec: &'a HardwareProfile,
    /// What prompts are made of.
    pub runs: &'a RunTree,
    /// Tokens in a block of them.
    pub block: Tokens,
    /// What their model's layers keep, where that is known.
    pub attention: Option<&'a AttentionSpec>,
}

impl FleetView<'_> {
    pub(crate) fn all(&self) -> std::ops::Range<usize> {
        0..self.workers.len()
    }

    pub(crate) fn requests(&self, worker: usize) -> u64 {
        self.workers[worker].load().requests
    }
}

/// How a step is served.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dispatch {
    /// Who computes the prompt.
    pub prefill: usize,
    /// Who generates the answer.
    pub decode: usize,
    /// What is sent to the prefill worker first.
    pub fetch: Option<PrefixFetch>,
    /// What is sent to the decode worker where it is another.
    pub ship: TransferScope,
    /// What the policy calls it and expects of it, where it has words for that.
    pub prediction: Option<StepPrediction>,
}

/// What a policy expects of a step that it placed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepPrediction {
    /// What it calls the way of serving.
    pub action: Action,
    /// From being placed to the first token.
    pub first_token: Seconds,
}

impl Dispatch {
    /// One leg at one worker.
    pub fn at(worker: usize) -> Self {
        Self { prefill: worker, decode: worker, fetch: None, ship: TransferScope::Missing, prediction: None }
    }
}

/// Leading tokens that are sent before the prompt begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrefixFetch {
    /// By whom.
    pub from: usize,
    /// How many of the prompt; what is there already does not move.
    pub until: Tokens,
}

/// What a prefill worker sends to a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransferScope {
    /// What lacks there.
    Missing,
    /// The whole prompt, every time.
    Whole,
}

/// What is sent before a step asks for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicationOrder {
    /// The last step of the session's agent.
    pub after: StepRef,
    /// Whole blocks that the next one begins with.
    pub path: Arc<[RunId]>,
    /// By whom.
    pub from: usize,
    /// To whom.
    pub to: usize,
    /// How many leading tokens; what is there already does not move.
    pub until: Tokens,
}

/// Whether a step is placed now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlacementTiming {
    /// Now.
    Now,
    /// When the policy's clock says so; it remembers the step.
    Later,
}

/// Is told when a policy begins to place a step and when it has. Which clock it looks at is not known here.
pub trait Stopwatch {
    /// A step is being placed from now on.
    fn start(&self);
    /// It is.
    fn stop(&self);
}

/// Where every step goes. Deterministic: chance comes from the seed it was made with.
pub trait RoutingPolicy {
    /// Whether a step may go on now.
    fn admit(&mut self, _ask: &PlacementRequest<'_>, _fleet: &FleetView<'_>) -> PlacementTiming {
        PlacementTiming::Now
    }

    /// Who serves it.
    fn place(&mut self, ask: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch;

    /// A step is over.
    fn step_finished(&mut self, _at: StepRef, _step: &TraceStep, _now: Seconds) {}

    /// A session is over.
    fn session_finished(&mut self, _session: usize) {}

    /// Steps that it had no plan of its own for.
    fn unplanned_steps(&self) -> usize {
        0
    }

    /// The ledger that it keeps, where it keeps one.
    fn ledger(&self) -> Option<&Ledger> {
        None
    }

    /// How often `due` is asked.
    fn poll_interval(&self) -> Option<Seconds> {
        None
    }

    /// In how long `due` is to be asked once more, after a step was told to wait; none when that was said before.
    fn poll_after(&mut self) -> Option<Seconds> {
        None
    }

    /// How often `ahead` is asked.
    fn replication_interval(&self) -> Option<Seconds> {
        None
    }

    /// What is to be sent now, at most so much at once.
    fn replications(&mut self, _most: usize, _fleet: &FleetView<'_>) -> Vec<ReplicationOrder> {
        Vec::new()
    }

    /// Steps that were to wait and may now go on.
    fn due_steps(&mut self, _fleet: &FleetView<'_>) -> Vec<StepRef> {
        Vec::new()
    }
}

/// The first of the smallest.
pub(crate) fn argmin<K: PartialOrd>(workers: impl IntoIterator<Item = usize>, key: impl Fn(usize) -> K) -> usize {
    let keyed = workers.into_iter().map(|worker| (worker, key(worker)));
    let least = keyed.min_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    least.map_or(0, |(worker, _)| worker)
}
