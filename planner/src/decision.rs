//! Answer of the planner: the plan, every candidate that was considered, and what each would cost.

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, ModelId, Tokens};

use crate::{Action, CostTerms, Leg, LegSequence, OwnershipEffect, Plan, StepKind};

/// One way to serve the step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanCandidate {
    /// Label of what the candidate does.
    pub action: Action,
    /// What would be sent to the workers, in order.
    pub sequence: LegSequence,
    /// Change of ownership after the step.
    pub ownership: OwnershipEffect,
    /// Cost by term; zero if the candidate was refused before it was priced.
    pub cost_terms: CostTerms,
    /// Sum of the terms.
    #[serde(with = "vocabulary::micros_with_unit")]
    pub total_cost: Micros,
    /// Why the candidate may not be chosen; none if it may.
    #[serde(rename = "rejection")]
    pub refusal: Option<CandidateRefusal>,
}

/// Why a candidate may not be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum CandidateRefusal {
    /// The worker does not serve the model or adapter.
    ModelNotServed,
    /// The worker only runs prefill.
    PrefillOnly,
    /// The worker is unreachable.
    NotReady,
    /// The worker is draining, and others can serve.
    Draining,
    /// The worker already failed in this attempt.
    FailedEarlierAttempt,
    /// Prompt and answer exceed the worker's context length.
    ExceedsContext,
    /// Prompt and answer exceed the worker's KV memory.
    ExceedsKvCapacity,
    /// The target has no usable link.
    NoLink,
    /// No worker on the target's fabric can send.
    FabricMismatch,
    /// The target's ranks cannot read from those of the worker that holds the prefix.
    ParallelismMismatch,
    /// The link from the worker that holds the prefix is disabled: it delivered wrong KV.
    LinkDisabled,
    /// The worker only answers prompts that a prefill worker hands to it.
    RequiresPrefillWorker,
    /// The action is disabled.
    ActionDisabled,
}

impl CandidateRefusal {
    /// Returns the reason's name for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A step's plan and every candidate that was considered for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Decision {
    /// What kind of step it is.
    pub step_kind: StepKind,
    /// The chosen plan.
    pub plan: Plan,
    /// Every candidate, including the chosen one, in the order of the workers.
    pub candidates: Vec<PlanCandidate>,
}

impl Decision {
    /// Returns one leg per worker, with what the worker has cached before any transfer.
    pub(crate) fn local_legs(&self) -> impl Iterator<Item = &Leg> {
        let local = self.candidates.iter().map(|candidate| &candidate.sequence).filter(|one| !one.has_handoff());
        local.map(LegSequence::answer_leg)
    }
}

/// Why a step cannot be planned at all.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PlanningError {
    /// Client error: no worker of the fleet serves the model.
    #[error("no worker serves the model {model}")]
    UnknownModel {
        /// Model or adapter that no worker serves.
        model: ModelId,
    },
    /// Server error, can be retried later: workers serve the model, but none that may generate answers is ready.
    #[error("no worker that serves the model is ready")]
    NoneReady,
    /// Server error, can be retried later: every ready worker already failed in this attempt.
    #[error("every ready worker failed already in this attempt")]
    AllExcluded,
    /// Client error: the step is longer than any ready worker accepts.
    #[error("prompt and answer exceed {longest} tokens, the most that a ready worker takes")]
    TooLong {
        /// Most tokens that a ready worker accepts.
        longest: Tokens,
    },
}
