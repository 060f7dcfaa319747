//! The one plan type: which worker computes, which generates, what moves between them, and who owns the result.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, Bytes, DpRank, Epoch, Micros, Owner, Tokens, WorkerId};

use crate::{Action, CostTerms, SelectionRule};

/// One worker's part of a plan, with what it is expected to find and to compute.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Leg {
    /// Where.
    pub worker: WorkerId,
    /// At which rank of it.
    pub rank: DpRank,
    /// Leading prompt tokens that it has when the leg begins, after a replicate if there is one.
    pub tokens_cached: Tokens,
    /// Prompt tokens that it computes. What is neither cached nor computed is pulled from the prefill leg.
    pub tokens_computed: Tokens,
}

/// KV that moves between two workers to serve a step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Handoff {
    /// The prefill leg computes the whole prompt elsewhere, the decode leg pulls what its worker lacks.
    RemotePrefill {
        /// Bytes that the decode leg is expected to pull.
        bytes: Bytes,
    },
    /// The first `blocks` of the prompt are made present at the target; then one ordinary leg serves there.
    Replicate {
        /// Who holds them.
        from: WorkerId,
        /// Which rank of it.
        rank: DpRank,
        /// How many chain blocks from the start; a multiple of both engines' blocks.
        blocks: Blocks,
        /// Bytes that are expected to move: what the target lacks of them.
        bytes: Bytes,
    },
}

impl Handoff {
    /// Bytes that are expected to move.
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::RemotePrefill { bytes } | Self::Replicate { bytes, .. } => *bytes,
        }
    }
}

/// What the commit after the step does about ownership. Nothing is claimed before the blocks are known to be there.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OwnershipClaim {
    /// The target owns the session already: seal and advance under the same owner.
    Keep,
    /// Nobody owns it: the target claims it.
    Open,
    /// Served at a non-owner: the prefix keeps its owner, the target becomes a read-only replica of it.
    Borrow,
    /// The target becomes the owner.
    Move {
        /// Who owned it when this was decided.
        from: Owner,
        /// The epoch that this was decided on; the ledger refuses the move when it is out of date.
        epoch: Epoch,
        /// Why it moves.
        why: MoveReason,
    },
}

/// Why ownership leaves an owner.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(rename_all = "snake_case")]
pub enum MoveReason {
    /// The owner is not in the fleet, cannot be reached, or is another life of that worker.
    OwnerGone,
    /// The owner takes no new work.
    OwnerDraining,
    /// The owner failed in this very step.
    OwnerExcluded,
    /// The owner only computes prompts; the session decodes elsewhere.
    OwnerPrefillOnly,
    /// The owner's queue or memory is above the policy's overload mark.
    OwnerOverloaded,
    /// The owner's events show less than half of what is sealed.
    OwnerEvicted,
    /// The target holds more of the prompt than the owner: the session already lives there.
    StateIsThere,
}

/// How one step is served. Colocated serving is a plan whose legs coincide.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Plan {
    /// The label; see `Action` for when which one applies.
    pub action: Action,
    /// Who computes the prompt.
    pub prefill: Leg,
    /// Who generates the answer: the target. Equal to `prefill` unless the handoff is a remote prefill.
    pub decode: Leg,
    /// What moves before the decode leg, if anything.
    pub handoff: Option<Handoff>,
    /// What the commit does about ownership.
    pub claim: OwnershipClaim,
    /// Why this one.
    pub because: PlanRationale,
}

impl Plan {
    /// The worker that generates the answer.
    pub fn target(&self) -> WorkerId {
        self.decode.worker
    }

    /// Each worker that computes for it: the target, and before it who computes the prompt for it.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> + use<> {
        let (prefill, target) = (self.prefill.worker, self.target());
        (prefill != target).then_some(prefill).into_iter().chain([target])
    }
}

/// Why a plan was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanRationale {
    /// The rule that chose.
    pub rule: SelectionRule,
    /// Its price, term by term.
    pub terms: CostTerms,
    /// Sum of the terms.
    pub total: Micros,
    /// The cheapest candidate that was allowed and not taken.
    pub runner_up: Option<RunnerUp>,
}

/// The best that was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RunnerUp {
    /// What it would have done.
    pub action: Action,
    /// Where it would have decoded.
    pub worker: WorkerId,
    /// Its price.
    pub total: Micros,
}
