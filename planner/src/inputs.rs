//! Inputs of the planner: the request, the session's ownership, the fleet, the overlaps, and what to avoid.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, DpRank, Epoch, Micros, ModelId, Overlap, Owner, SessionId, Tokens, WorkerId, WorkerView};

use crate::{
    Action, ActionSet, AttentionSpec, OccupancyModel, ParallelShape, Policy, StepKind, check_kv_compatibility,
};

/// Whether KV may be transferred for a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum TransferPermission {
    /// Every action may be offered.
    #[default]
    Allowed,
    /// Only plans with one leg and no handoff are offered.
    Forbidden(RequestTransferBlocker),
}

/// Property of a request that forbids transfers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum RequestTransferBlocker {
    /// `n > 1`: several answers cannot share one handoff.
    SeveralChoices,
    /// `prompt_logprobs` or `echo`: the prompt must be computed where the answer is.
    PromptLogprobs,
    /// Images or audio: their token ids cannot be replayed as text.
    MultimodalContent,
    /// The prompt's token ids are unknown to the router, so it cannot request a prefix of it.
    TokenIdsUnavailable,
    /// The endpoint has no transfer parameters.
    Endpoint,
}

/// The parts of the request that matter to a plan.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RequestProfile {
    /// Requested model.
    pub model: ModelId,
    /// LoRA adapter on top of the model; the worker must serve it too.
    pub adapter: Option<ModelId>,
    /// Tokens of the whole prompt; for a batch, of all its prompts.
    pub prompt_tokens: Tokens,
    /// Tokens of the longest prompt of a batch, which is what has to fit; none when there is a single prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_prompt_tokens: Option<Tokens>,
    /// Expected tokens of the answer.
    pub expected_output_tokens: Tokens,
    /// Expected growth of the session at a worker where it is new, beyond the step itself; capped by the policy's
    /// `max_session_growth_tokens`.
    #[serde(default = "any_growth")]
    pub expected_growth_tokens: Tokens,
    /// Tokens per block of the model's hash chain: the unit of every `Blocks` here.
    pub block_size: Tokens,
    /// Whether KV may be transferred for this request.
    pub transfers: TransferPermission,
}

/// Default for decision logs without the field: only the policy limits the growth.
fn any_growth() -> Tokens {
    Tokens(u64::MAX)
}

/// Live intent in the ledger: another router has sent a step of this session to a worker.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LiveIntent {
    /// Worker that runs the step.
    pub worker: WorkerId,
    /// Rank of that worker.
    pub rank: DpRank,
    /// Leading blocks of *this* prompt that the other step shares.
    pub blocks: Blocks,
}

/// What the ledger knows of the session and of the longest sealed prefix of the prompt.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SessionView {
    /// Id of the session.
    pub id: SessionId,
    /// Effective owner; none for a new session, or when the owner's lease has ended.
    pub owner: Option<Owner>,
    /// Epoch of that ownership.
    pub epoch: Epoch,
    /// Leading blocks of the prompt that are sealed.
    pub sealed: Blocks,
    /// Other recorded holders of the sealed prefix: its live read-only replicas, and its owner if that is not the
    /// session's.
    pub replicas: Vec<Owner>,
    /// Live intents of other routers.
    pub peer_intents: Vec<LiveIntent>,
}

impl SessionView {
    /// Creates the view of an unknown session.
    pub fn new(id: SessionId) -> Self {
        let (owner, epoch, sealed) = (None, Epoch::default(), Blocks::ZERO);
        Self { id, owner, epoch, sealed, replicas: Vec::new(), peer_intents: Vec::new() }
    }
}

/// Everything that a plan depends on. Blocks are those of the hash chain, counted from the start of the prompt.
#[derive(Clone, Copy, Debug)]
pub struct PlanningInputs<'a> {
    /// Kind of the step.
    pub step: StepKind,
    /// The request.
    pub request: &'a RequestProfile,
    /// State that the model's layers keep; if unknown, every token takes each worker's `kv_bytes_per_token`.
    pub attention: Option<&'a AttentionSpec>,
    /// Ownership of the session.
    pub session: &'a SessionView,
    /// The fleet, in any order, each worker once.
    pub workers: &'a [WorkerView],
    /// Known parallel shapes, sorted by worker id. Unknown shapes count as compatible.
    pub shapes: &'a [(WorkerId, ParallelShape)],
    /// Cached prefixes of the prompt, by worker and rank, in any order.
    pub overlaps: &'a [Overlap],
    /// Estimated KV occupancy of the workers.
    pub occupancy: OccupancyView<'a>,
    /// Workers that already failed in this attempt.
    pub excluded: &'a [WorkerId],
    /// Weights, limits and switches.
    pub policy: &'a Policy,
    /// Features disabled at run time, besides those that the policy disables.
    pub disabled: DisabledFeatures<'a>,
    /// Number of steps planned before this one; read by `SelectionRule::RoundRobin` only.
    pub round_robin_index: u64,
}

/// Features disabled at run time.
#[derive(Clone, Copy, Debug, Default)]
pub struct DisabledFeatures<'a> {
    /// Disabled actions.
    pub actions: ActionSet,
    /// Links that must not carry KV, in any order.
    pub links: &'a [DirectedLink],
}

/// One direction between two workers. Where wrong KV was seen to arrive, only its transfers are disabled; both workers
/// still serve.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
pub struct DirectedLink {
    /// Worker that would send.
    pub from: WorkerId,
    /// Worker that would receive.
    pub to: WorkerId,
}

/// Estimated KV occupancy at one time.
#[derive(Clone, Copy, Debug)]
pub struct OccupancyView<'a> {
    /// The occupancy model.
    pub model: &'a OccupancyModel,
    /// Current time, on the model's clock.
    pub now: Micros,
}

impl PlanningInputs<'_> {
    /// Returns whether `action` is enabled. Colocated prefill always is, so that every step can be served.
    pub fn allows(&self, action: Action) -> bool {
        self.policy.allows(action) && (action == Action::ColocatedPrefill || !self.disabled.actions.contains(action))
    }

    /// Returns whether transfers from one worker to another are disabled.
    pub(crate) fn is_link_disabled(&self, from: WorkerId, to: WorkerId) -> bool {
        self.disabled.links.contains(&DirectedLink { from, to })
    }

    /// Returns the parallel shape of a worker, if known.
    pub(crate) fn shape(&self, worker: WorkerId) -> Option<ParallelShape> {
        let at = self.shapes.binary_search_by_key(&worker, |(id, _)| *id).ok()?;
        Some(self.shapes[at].1)
    }

    /// Returns whether ranks of the target shape can read KV from ranks of the source shape.
    pub(crate) fn can_read(&self, source: Option<ParallelShape>, target: Option<ParallelShape>) -> bool {
        match (source, target) {
            (Some(source), Some(target)) => check_kv_compatibility(self.attention, source, target).is_ok(),
            _ => true,
        }
    }
}
