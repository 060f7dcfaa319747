//! Routing policies. Every policy sees the same exact, current state of the fleet; none keeps state outside of itself.

mod ablation;
mod kind;
mod owner_serve;
mod plain;
mod scored;
mod thunder_agent;

use std::cmp::Ordering;
use std::ops::Range;
use std::sync::Arc;

use engine_model::runs::{PromptTierDepths, RunEngine, RunId, RunTree, Seconds};
use ledger::Ledger;
pub(crate) use planner::Action;
use planner::AttentionSpec;
use vocabulary::Tokens;

use crate::hardware_profile::HardwareProfile;
use crate::trace::TraceStep;

pub use ablation::Ablation;
pub(crate) use kind::all_policies;
pub use kind::{PolicyKind, UnknownPolicy};

/// Reference to a step of a trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct StepRef {
    /// Index of the session.
    pub session: usize,
    /// Index of the step in the session.
    pub step: usize,
}

/// A step to be placed.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// Reference to the step.
    pub at: StepRef,
    /// The step itself.
    pub step: &'a TraceStep,
    /// Whether the request is independent: its session carries no information.
    pub is_independent: bool,
    /// Cached tokens of the prompt at each worker, by tier.
    pub memory_by_worker: &'a [PromptTierDepths],
}

impl PlacementRequest<'_> {
    /// Returns the prompt tokens that a worker would compute.
    pub(crate) fn uncached_tokens(&self, worker: usize) -> Tokens {
        self.step.prompt - self.memory_by_worker[worker].with_disk
    }
}

/// State of the fleet as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct FleetView<'a> {
    /// Current time.
    pub now: Seconds,
    /// The engines of the workers.
    pub workers: &'a [&'a RunEngine],
    /// Hardware profile of every worker.
    pub spec: &'a HardwareProfile,
    /// Runs that prompts consist of.
    pub runs: &'a RunTree,
    /// Tokens per block of the runs.
    pub block: Tokens,
    /// Attention spec of the model, if known.
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
    /// Worker that computes the prompt.
    pub prefill: usize,
    /// Worker that generates the answer.
    pub decode: usize,
    /// Prefix to send to the prefill worker first, if any.
    pub fetch: Option<FetchOrder>,
    /// What is sent to the decode worker, if that is another one.
    pub ship: HandoffPayload,
    /// Action label and prediction of the policy, if it makes any.
    pub prediction: Option<PlacementPrediction>,
}

/// Prediction for a step that was placed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PlacementPrediction {
    /// Action label of the dispatch.
    pub action: Action,
    /// Predicted seconds from placement to the first token.
    pub ttft: Seconds,
}

impl Dispatch {
    /// Returns a dispatch with one leg at one worker.
    pub fn at(worker: usize) -> Self {
        Self { prefill: worker, decode: worker, fetch: None, ship: HandoffPayload::Missing, prediction: None }
    }
}

/// Order to fetch leading tokens before the prompt begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FetchOrder {
    /// Worker that sends.
    pub from: usize,
    /// Leading tokens of the prompt to have there; tokens already present are not sent.
    pub until: Tokens,
}

/// What a prefill worker sends to a decode worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HandoffPayload {
    /// Only what the decode worker lacks.
    Missing,
    /// The whole prompt, every time.
    Whole,
}

/// Transfer of a prefix before a step asks for it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReplicationOrder {
    /// Last step of the session's agent.
    pub after: StepRef,
    /// Whole blocks that the next step begins with.
    pub path: Arc<[RunId]>,
    /// Worker that sends.
    pub from: usize,
    /// Worker that receives.
    pub to: usize,
    /// Leading tokens to have there; tokens already present are not sent.
    pub until: Tokens,
}

/// Whether a step is admitted: placed now, or held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepAdmission {
    /// Place it now.
    Now,
    /// Place it when the policy says so through `due_steps`; the policy remembers the step.
    Later,
}

/// Is notified when a policy starts and stops placing a step. This crate does not know which clock it reads.
pub trait Stopwatch {
    /// The policy starts to place a step.
    fn start(&self);
    /// The policy has placed the step.
    fn stop(&self);
}

/// Routing policy: decides where every step goes. Deterministic: randomness comes from the seed it was made with.
pub trait RoutingPolicy {
    /// Decides whether a step may start now.
    fn admit(&mut self, _request: &PlacementRequest<'_>, _fleet: &FleetView<'_>) -> StepAdmission {
        StepAdmission::Now
    }

    /// Decides which workers serve the step.
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch;

    /// Is notified that a step is over.
    fn step_finished(&mut self, _at: StepRef, _step: &TraceStep, _now: Seconds) {}

    /// Is notified that a session is over.
    fn session_finished(&mut self, _session: usize) {}

    /// Returns the number of steps for which the policy had no plan.
    fn fallback_steps(&self) -> usize {
        0
    }

    /// Returns the policy's ledger, if it has one.
    fn ledger(&self) -> Option<&Ledger> {
        None
    }

    /// Returns how often `due_steps` is called.
    fn poll_interval(&self) -> Option<Seconds> {
        None
    }

    /// Returns after how long `due_steps` is called once more, after a step was held; none if a call is already
    /// scheduled.
    fn poll_after(&mut self) -> Option<Seconds> {
        None
    }

    /// Returns how often `replications` is called.
    fn replication_interval(&self) -> Option<Seconds> {
        None
    }

    /// Returns the prefixes to send now, at most `_most` of them.
    fn replications(&mut self, _most: usize, _fleet: &FleetView<'_>) -> Vec<ReplicationOrder> {
        Vec::new()
    }

    /// Returns held steps that may now start.
    fn due_steps(&mut self, _fleet: &FleetView<'_>) -> Vec<StepRef> {
        Vec::new()
    }
}

/// Returns the first worker with the smallest key.
pub(crate) fn argmin<K: PartialOrd>(workers: impl IntoIterator<Item = usize>, key: impl Fn(usize) -> K) -> usize {
    let keyed = workers.into_iter().map(|worker| (worker, key(worker)));
    let least = keyed.min_by(|(_, a), (_, b)| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    least.map_or(0, |(worker, _)| worker)
}

fn halves(fleet: &FleetView<'_>) -> (Range<usize>, Range<usize>) {
    let all = fleet.workers.len();
    (0..all / 2, all / 2..all)
}

/// Returns the worker with the fewest prompt tokens to compute.
fn prefiller(request: &PlacementRequest<'_>, fleet: &FleetView<'_>, among: Range<usize>) -> usize {
    argmin(among, |worker| fleet.workers[worker].load().prompt + request.uncached_tokens(worker))
}

/// Every prompt is computed in one half and sent completely to the other.
struct StaticPd;

impl RoutingPolicy for StaticPd {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = argmin(decode, |worker| (fleet.workers[worker].load().context, fleet.requests(worker)));
        Dispatch {
            prefill: prefiller(request, fleet, prefill),
            decode,
            ship: HandoffPayload::Whole,
            ..Dispatch::at(decode)
        }
    }
}

/// The decode worker itself computes prompts that are short or mostly cached there.
struct ConditionalPd;

impl ConditionalPd {
    const MAX_LOCAL_PROMPT: Tokens = Tokens(2_048);
    const MAX_LOCAL_NEW_SHARE: f64 = 0.7;
}

impl RoutingPolicy for ConditionalPd {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let (prefill, decode) = halves(fleet);
        let decode = argmin(decode, |worker| dynamo(request, fleet, worker));
        let missing = request.uncached_tokens(decode);
        let local = missing <= Self::MAX_LOCAL_PROMPT
            && missing.0 as f64 <= Self::MAX_LOCAL_NEW_SHARE * request.step.prompt.0 as f64;
        let prefill = if local { decode } else { prefiller(request, fleet, prefill) };
        Dispatch { prefill, decode, ..Dispatch::at(decode) }
    }
}

/// Returns the prompt tokens to compute, including this request's, plus the contexts being decoded; overlap weight 1.
fn dynamo(request: &PlacementRequest<'_>, fleet: &FleetView<'_>, worker: usize) -> Tokens {
    let load = fleet.workers[worker].load();
    load.prompt + request.uncached_tokens(worker) + load.context + request.step.prompt
}

struct Dynamo;

impl RoutingPolicy for Dynamo {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        Dispatch::at(argmin(fleet.all(), |worker| dynamo(request, fleet, worker)))
    }
}

/// Worker with the least work, then the fewest running answers.
struct LeastWork;

impl RoutingPolicy for LeastWork {
    fn place(&mut self, _request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let key = |worker: usize| (fleet.workers[worker].load().work, fleet.workers[worker].batch().0);
        Dispatch::at(argmin(fleet.all(), key))
    }
}
