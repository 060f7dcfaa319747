//! The plan type: the legs and handoffs that serve a step, in order, and who owns the result.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, Bytes, DpRank, Epoch, Micros, Owner, Tokens, WorkerId};

use crate::{Action, CostTerms, SelectionRule};

/// What a leg does for the step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum LegRole {
    /// Computes the prompt and generates the answer.
    Serve,
    /// Computes the prompt for another worker.
    Prefill,
    /// Generates the answer from KV that a prefill leg computed.
    Decode,
}

impl LegRole {
    /// Returns the role's name for logs and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// One engine request of a plan, with the tokens expected to be cached and computed there.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Leg {
    /// What the leg does.
    pub role: LegRole,
    /// Worker that runs the leg.
    pub worker: WorkerId,
    /// Data-parallel rank of the worker.
    pub rank: DpRank,
    /// Leading prompt tokens cached when the leg begins, after a replicate if there is one.
    pub cached_tokens: Tokens,
    /// Prompt tokens that the leg computes. Tokens neither cached nor computed are pulled from the prefill leg.
    pub computed_tokens: Tokens,
}

impl Leg {
    /// Returns a leg of which no prompt token is known to be cached or computed.
    pub fn new(role: LegRole, WorkerRank { worker, rank }: WorkerRank) -> Self {
        Self { role, worker, rank, cached_tokens: Tokens::ZERO, computed_tokens: Tokens::ZERO }
    }

    /// Returns where the leg runs.
    pub fn at(&self) -> WorkerRank {
        WorkerRank { worker: self.worker, rank: self.rank }
    }
}

/// One data-parallel rank of a worker: each has a KV cache of its own.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
pub struct WorkerRank {
    /// The worker.
    pub worker: WorkerId,
    /// The rank.
    pub rank: DpRank,
}

/// How KV is handed over.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum HandoffKind {
    /// The prefill leg computes the whole prompt at the source, and the decode leg pulls what its worker lacks.
    RemotePrefill,
    /// Leading blocks of the prompt are copied to the target before the leg that runs there.
    Replicate,
}

/// KV transfer between two workers to serve a step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Handoff {
    /// How the KV is handed over.
    pub kind: HandoffKind,
    /// Where the KV is.
    pub source: WorkerRank,
    /// Where the KV is needed.
    pub target: WorkerRank,
    /// Number of leading blocks of the hash chain that are present at the target afterwards; ends at a block boundary
    /// of both engines. `None` when it is the whole prompt.
    pub blocks: Option<Blocks>,
    /// Bytes expected to move: the part that the target lacks.
    pub bytes: Bytes,
}

/// One element of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum LegOrHandoff {
    /// An engine request.
    Leg(Leg),
    /// A KV transfer.
    Handoff(Handoff),
}

/// Legs and handoffs of a plan in the order of their execution. The last part is the leg that generates the answer.
///
/// Three shapes are legal (see [`Plan::check`]): a leg that serves; a replicate and a leg that serves; a prefill leg, a
/// remote prefill and a decode leg. Held without an allocation, because the planner builds one for each candidate.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(try_from = "Vec<LegOrHandoff>", into = "Vec<LegOrHandoff>")]
pub struct LegSequence {
    pub(crate) before_answer: [Option<LegOrHandoff>; MAX_PARTS - 1],
    pub(crate) answer: Leg,
}

/// Most legs and handoffs of a sequence.
const MAX_PARTS: usize = 3;

/// A list of legs and handoffs that is no plan.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error, Debug)]
pub enum LegSequenceError {
    /// The last part is not a leg, or there is no part.
    #[error("a plan ends with the leg that answers")]
    NoAnswerLeg,
    /// There are more parts than a plan may have.
    #[error("{0} parts are more than the {MAX_PARTS} that a plan may have")]
    TooManyParts(usize),
}

impl LegSequence {
    /// One leg, no transfer.
    pub fn serve(leg: Leg) -> Self {
        Self { before_answer: [None; MAX_PARTS - 1], answer: leg }
    }

    /// A replicate to the worker of the leg, then the leg.
    pub fn replicate(handoff: Handoff, leg: Leg) -> Self {
        Self { before_answer: [Some(LegOrHandoff::Handoff(handoff)), None], answer: leg }
    }

    /// A prefill leg, the transfer of its KV, and the decode leg.
    pub fn remote_prefill(prefill: Leg, handoff: Handoff, decode: Leg) -> Self {
        Self { before_answer: [Some(LegOrHandoff::Leg(prefill)), Some(LegOrHandoff::Handoff(handoff))], answer: decode }
    }

    /// Returns the parts before the leg that answers.
    pub fn before_answer(&self) -> impl Iterator<Item = &LegOrHandoff> {
        self.before_answer.iter().flatten()
    }

    /// Returns all parts, the leg that answers last.
    pub fn parts(&self) -> impl Iterator<Item = LegOrHandoff> {
        self.before_answer().copied().chain([LegOrHandoff::Leg(self.answer)])
    }

    /// Returns the leg that generates the answer.
    pub fn answer_leg(&self) -> &Leg {
        &self.answer
    }

    /// Returns the worker that generates the answer.
    pub fn target(&self) -> WorkerId {
        self.answer.worker
    }

    /// Returns the leg that computes the prompt: the first one.
    pub fn prompt_leg(&self) -> &Leg {
        self.legs().next().unwrap_or(&self.answer)
    }

    /// Returns the legs.
    pub fn legs(&self) -> impl Iterator<Item = &Leg> {
        let legs =
            self.before_answer().filter_map(|part| if let LegOrHandoff::Leg(leg) = part { Some(leg) } else { None });
        legs.chain([&self.answer])
    }

    /// Returns the handoffs.
    pub fn handoffs(&self) -> impl Iterator<Item = &Handoff> {
        self.before_answer()
            .filter_map(|part| if let LegOrHandoff::Handoff(handoff) = part { Some(handoff) } else { None })
    }

    /// Returns the first handoff of this kind.
    pub fn handoff(&self, kind: HandoffKind) -> Option<&Handoff> {
        self.handoffs().find(|handoff| handoff.kind == kind)
    }

    /// Returns whether KV moves between workers.
    pub fn has_handoff(&self) -> bool {
        self.handoffs().next().is_some()
    }

    /// Returns the bytes expected to move.
    pub fn moved_bytes(&self) -> Bytes {
        self.handoffs().map(|handoff| handoff.bytes).sum()
    }

    /// Returns the workers that compute for the plan: other ones first, then the target.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        let target = self.target();
        self.legs().map(|leg| leg.worker).filter(move |worker| *worker != target).chain([target])
    }
}

impl TryFrom<Vec<LegOrHandoff>> for LegSequence {
    type Error = LegSequenceError;

    fn try_from(mut parts: Vec<LegOrHandoff>) -> Result<Self, LegSequenceError> {
        let Some(LegOrHandoff::Leg(answer)) = parts.pop() else { return Err(LegSequenceError::NoAnswerLeg) };
        let mut before_answer = [None; MAX_PARTS - 1];
        if parts.len() > before_answer.len() {
            return Err(LegSequenceError::TooManyParts(parts.len() + 1));
        }
        before_answer.iter_mut().zip(parts).for_each(|(place, part)| *place = Some(part));
        Ok(Self { before_answer, answer })
    }
}

impl From<LegSequence> for Vec<LegOrHandoff> {
    fn from(sequence: LegSequence) -> Self {
        sequence.parts().collect()
    }
}

/// What the commit after the step does to ownership. Nothing is claimed before the blocks are known to exist.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OwnershipEffect {
    /// The target already owns the session: seal blocks and advance the head under the same owner.
    Keep,
    /// The session has no owner: the target claims it.
    Claim,
    /// A worker other than the owner serves: the prefix keeps its owner, and the target becomes a read-only replica.
    ReadReplica,
    /// The target becomes the owner.
    Move {
        /// Owner at the time of the decision.
        previous_owner: Owner,
        /// Epoch at the time of the decision; the ledger refuses the move if it is stale.
        epoch: Epoch,
        /// Reason for the move.
        reason: MoveReason,
    },
}

/// Why a session leaves its owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum MoveReason {
    /// The owner has left the fleet, is unreachable, or has restarted (another incarnation).
    OwnerGone,
    /// The owner is draining.
    OwnerDraining,
    /// The owner failed in this step.
    OwnerFailedAttempt,
    /// The owner only runs prefill; the session decodes elsewhere.
    OwnerPrefillOnly,
    /// The owner's queue or memory exceeds the policy's overload thresholds.
    OwnerOverloaded,
    /// The owner's KV events show less than half of the sealed prefix.
    OwnerEvicted,
    /// The target holds more of the prompt than the owner.
    TargetHoldsMore,
}

/// How one step is served.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Plan {
    /// Label of the plan; see [`Action`] for when each applies.
    pub action: Action,
    /// What is sent to the workers, in order.
    pub sequence: LegSequence,
    /// What the commit does to ownership.
    pub ownership: OwnershipEffect,
    /// Why this plan was chosen.
    pub rationale: PlanRationale,
}

impl Plan {
    /// Returns the leg that generates the answer.
    pub fn answer_leg(&self) -> &Leg {
        self.sequence.answer_leg()
    }

    /// Returns the worker that generates the answer.
    pub fn target(&self) -> WorkerId {
        self.sequence.target()
    }

    /// Returns the leg that computes the prompt.
    pub fn prompt_leg(&self) -> &Leg {
        self.sequence.prompt_leg()
    }

    /// Returns the legs.
    pub fn legs(&self) -> impl Iterator<Item = &Leg> {
        self.sequence.legs()
    }

    /// Returns the handoffs.
    pub fn handoffs(&self) -> impl Iterator<Item = &Handoff> {
        self.sequence.handoffs()
    }

    /// Returns the bytes expected to move.
    pub fn moved_bytes(&self) -> Bytes {
        self.sequence.moved_bytes()
    }

    /// Returns the workers that compute for the plan: other ones first, then the target.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> {
        self.sequence.workers()
    }
}

/// Why a plan was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanRationale {
    /// Selection rule that chose the plan.
    pub policy: SelectionRule,
    /// Cost of the plan by term.
    pub cost_terms: CostTerms,
    /// Sum of the terms.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub total_cost: Micros,
    /// Cheapest allowed candidate that was not chosen.
    pub runner_up: Option<RunnerUp>,
}

/// The best candidate that was not chosen.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RunnerUp {
    /// Action of that candidate.
    pub action: Action,
    /// Worker that would have generated the answer.
    pub worker: WorkerId,
    /// Total cost of that candidate.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub total_cost: Micros,
}
