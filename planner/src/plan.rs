//! The plan type: which worker computes, which generates, what moves between them, and who owns the result.

use serde::{Deserialize, Serialize};
use vocabulary::{Blocks, Bytes, DpRank, Epoch, Micros, Owner, Tokens, WorkerId};

use crate::{Action, CostTerms, SelectionRule};

/// One worker's part of a plan, with the tokens expected to be cached and computed there.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Leg {
    /// Worker that runs the leg.
    pub worker: WorkerId,
    /// Data-parallel rank of the worker.
    pub rank: DpRank,
    /// Leading prompt tokens cached when the leg begins, after a replicate if there is one.
    pub tokens_cached: Tokens,
    /// Prompt tokens that the leg computes. Tokens neither cached nor computed are pulled from the prefill leg.
    pub tokens_computed: Tokens,
}

/// KV transfer between two workers to serve a step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Handoff {
    /// The prefill leg computes the whole prompt elsewhere, and the decode leg pulls what its worker lacks.
    RemotePrefill {
        /// Bytes that the decode leg is expected to pull.
        bytes: Bytes,
    },
    /// The first `blocks` of the prompt are copied to the target; then one ordinary leg runs there.
    Replicate {
        /// Worker that holds the blocks.
        from: WorkerId,
        /// Rank of that worker.
        rank: DpRank,
        /// Number of leading blocks of the hash chain; ends at a block boundary of both engines.
        blocks: Blocks,
        /// Bytes expected to move: the part that the target lacks.
        bytes: Bytes,
    },
}

impl Handoff {
    /// Returns the bytes expected to move.
    pub fn bytes(&self) -> Bytes {
        match self {
            Self::RemotePrefill { bytes } | Self::Replicate { bytes, .. } => *bytes,
        }
    }
}

/// What the commit after the step does to ownership. Nothing is claimed before the blocks are known to exist.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum OwnershipEffect {
    /// The target already owns the session: seal blocks and advance the head under the same owner.
    Keep,
    /// The session has no owner: the target claims it.
    Open,
    /// A worker other than the owner serves: the prefix keeps its owner, and the target becomes a read-only replica.
    Borrow,
    /// The target becomes the owner.
    Move {
        /// Owner at the time of the decision.
        from: Owner,
        /// Epoch at the time of the decision; the ledger refuses the move if it is stale.
        epoch: Epoch,
        /// Reason for the move.
        why: MoveReason,
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
    OwnerExcluded,
    /// The owner only runs prefill; the session decodes elsewhere.
    OwnerPrefillOnly,
    /// The owner's queue or memory exceeds the policy's overload thresholds.
    OwnerOverloaded,
    /// The owner's KV events show less than half of the sealed prefix.
    OwnerEvicted,
    /// The target holds more of the prompt than the owner.
    StateIsThere,
}

/// How one step is served. In a colocated plan both legs are equal.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Plan {
    /// Label of the plan; see [`Action`] for when each applies.
    pub action: Action,
    /// Leg that computes the prompt.
    pub prefill: Leg,
    /// Leg that generates the answer at the target. Equal to `prefill` unless the handoff is a remote prefill.
    pub decode: Leg,
    /// KV transfer before the decode leg, if any.
    pub handoff: Option<Handoff>,
    /// What the commit does to ownership.
    pub claim: OwnershipEffect,
    /// Why this plan was chosen.
    pub because: PlanRationale,
}

impl Plan {
    /// Returns the worker that generates the answer.
    pub fn target(&self) -> WorkerId {
        self.decode.worker
    }

    /// Returns the workers that compute for the plan: the prefill worker, if it is another one, then the target.
    pub fn workers(&self) -> impl Iterator<Item = WorkerId> + use<> {
        let (prefill, target) = (self.prefill.worker, self.target());
        (prefill != target).then_some(prefill).into_iter().chain([target])
    }
}

/// Why a plan was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanRationale {
    /// Selection rule that chose the plan.
    pub rule: SelectionRule,
    /// Cost of the plan by term.
    pub terms: CostTerms,
    /// Sum of the terms.
    pub total: Micros,
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
    pub total: Micros,
}
