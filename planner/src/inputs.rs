//! What the planner is told: the request, the session's ownership, the fleet, the overlaps, and what to avoid.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, DpRank, Epoch, Micros, ModelId, Overlap, Owner, SessionId, Tokens, WorkerId, WorkerView};

use crate::{
    Action, ActionSet, AttentionSpec, OccupancyModel, ParallelShape, Policy, StepKind, check_kv_compatibility,
};

/// Whether KV may move for a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "snake_case")]
pub enum TransferPermission {
    /// Every action may be offered.
    #[default]
    Allowed,
    /// Only plans with one leg and no handoff.
    Forbidden(TransferObstacle),
}

/// What in a request forbids transfers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum TransferObstacle {
    /// `n > 1`: several answers cannot share one handoff.
    SeveralChoices,
    /// `prompt_logprobs` or `echo`: the prompt must be computed where the answer is.
    PromptLogprobs,
    /// Images or audio, whose token ids cannot be replayed as text.
    MultimodalContent,
    /// The prompt's token ids are not known here, so that a prefix of it cannot be asked for.
    UnknownTokens,
    /// The endpoint has no transfer parameters.
    Endpoint,
}

/// The request as far as it matters to a plan.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanningRequest {
    /// The model that is asked for.
    pub model: ModelId,
    /// A LoRA adapter on top of it, which the worker must serve too.
    pub adapter: Option<ModelId>,
    /// Tokens of the whole prompt, of a batch all of them.
    pub prompt: Tokens,
    /// The longest prompt of a batch, which is what has to fit; none where there is one prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest: Option<Tokens>,
    /// Expected tokens of the answer.
    pub answer: Tokens,
    /// What its session is expected to add where it is new, beyond the step itself; the policy's `growth` at most.
    #[serde(default = "any_growth")]
    pub growth: Tokens,
    /// Tokens in a block of the model's chain: the unit of every `Blocks` here.
    pub block: Tokens,
    /// Whether KV may move for it.
    pub transfers: TransferPermission,
}

/// Before it was told the policy alone said it.
fn any_growth() -> Tokens {
    Tokens(u64::MAX)
}

/// Another router's word that it has sent a step of this session somewhere (the ledger's live intents).
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct LiveIntent {
    /// Where.
    pub worker: WorkerId,
    /// At which rank.
    pub rank: DpRank,
    /// How many leading blocks of *this* prompt that step shares.
    pub blocks: Blocks,
}

/// What the ledger says of the session and of the deepest sealed prefix of the prompt.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SessionView {
    /// The session.
    pub id: SessionId,
    /// The effective owner; none for a new session or one whose owner's lease ended.
    pub owner: Option<Owner>,
    /// The epoch of that ownership.
    pub epoch: Epoch,
    /// Blocks of the prompt that are sealed, from its start.
    pub sealed: Blocks,
    /// Who else has that sealed prefix by decision: its live read-only replicas, and its owner where that is another.
    pub replicas: Vec<Owner>,
    /// Live intents of other routers.
    pub promises: Vec<LiveIntent>,
}

impl SessionView {
    /// A session of which nothing is known.
    pub fn new(id: SessionId) -> Self {
        let (owner, epoch, sealed) = (None, Epoch::default(), Blocks::ZERO);
        Self { id, owner, epoch, sealed, replicas: Vec::new(), promises: Vec::new() }
    }
}

/// Everything a plan depends on. Blocks are the chain's, counted from the start of the prompt.
#[derive(Clone, Copy, Debug)]
pub struct PlanningInputs<'a> {
    /// What kind of step it is.
    pub step: StepKind,
    /// What is asked.
    pub request: &'a PlanningRequest,
    /// What its model's layers keep; without it every token takes what each worker's view says.
    pub attention: Option<&'a AttentionSpec>,
    /// Who owns what.
    pub session: &'a SessionView,
    /// The fleet, in any order, each worker once.
    pub workers: &'a [WorkerView],
    /// Parallel shapes of those whose shape is known, ordered by worker. Others are taken to fit.
    pub shapes: &'a [(WorkerId, ParallelShape)],
    /// Who holds how much of the prompt, in any order.
    pub overlaps: &'a [Overlap],
    /// Whose KV lies where.
    pub occupancy: OccupancyView<'a>,
    /// Workers that failed already in this attempt.
    pub excluded: &'a [WorkerId],
    /// Prices and switches.
    pub policy: &'a Policy,
    /// What is switched off at this time, beside what the policy switches off.
    pub disabled: DisabledFeatures<'a>,
    /// How many steps were planned before this one; only `Rule::RoundRobin` reads it.
    pub round_robin_index: u64,
}

/// What is switched off at run time.
#[derive(Clone, Copy, Debug, Default)]
pub struct DisabledFeatures<'a> {
    /// Actions, wherever they would be done.
    pub actions: ActionSet,
    /// Links over which nothing moves, in any order.
    pub links: &'a [BarredLink],
}

/// One direction between two workers in which KV was seen to arrive as something else. Only transfers are barred by it: both
/// workers serve.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
pub struct BarredLink {
    /// Who would send.
    pub from: WorkerId,
    /// Who would read.
    pub to: WorkerId,
}

/// Whose KV lies where, as far as is known.
#[derive(Clone, Copy, Debug)]
pub struct OccupancyView<'a> {
    /// The account.
    pub model: &'a OccupancyModel,
    /// The time, on its clock.
    pub now: Micros,
}

impl PlanningInputs<'_> {
    /// Whether `action` is switched on. Colocated prefill always is: every step must be servable.
    pub fn allows(&self, action: Action) -> bool {
        self.policy.allows(action) && (action == Action::ColocatedPrefill || !self.disabled.actions.contains(action))
    }

    /// Whether nothing may move from one worker to another.
    pub(crate) fn is_link_barred(&self, from: WorkerId, to: WorkerId) -> bool {
        self.disabled.links.contains(&BarredLink { from, to })
    }

    /// The parallel shape of a worker, where it is known.
    pub(crate) fn shape(&self, worker: WorkerId) -> Option<ParallelShape> {
        let at = self.shapes.binary_search_by_key(&worker, |(id, _)| *id).ok()?;
        Some(self.shapes[at].1)
    }

    /// Whether ranks of one shape can read KV from those of another.
    pub(crate) fn can_read(&self, source: Option<ParallelShape>, target: Option<ParallelShape>) -> bool {
        match (source, target) {
            (Some(source), Some(target)) => check_kv_compatibility(self.attention, source, target).is_ok(),
            _ => true,
        }
    }
}
