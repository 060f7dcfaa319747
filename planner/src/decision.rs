//! What the planner answers: the plan, every way that was considered, and what each would cost.

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, ModelId, Tokens};

use crate::{Action, Handoff, Leg, OwnershipClaim, Plan, StepKind};

/// The price of one candidate. All in microseconds, so that terms can be added and compared.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct CostTerms {
    /// `T_queue`: until the legs' workers get to it.
    pub queue: Micros,
    /// `T_compute`: the prompt tokens that are not found anywhere they are needed.
    pub compute: Micros,
    /// `T_network`: KV that moves between workers.
    pub network: Micros,
    /// `T_restore`: KV that comes up from slower tiers, and the first decode step.
    pub restore: Micros,
    /// `lambda * M_hbm`: device memory taken from others.
    pub memory: Micros,
    /// `mu * I_decode`: what other answers lose.
    pub interference: Micros,
    /// `T_eviction`: what others will spend on computing again what this step pushes out of device memory.
    #[serde(default)]
    pub eviction: Micros,
}

impl CostTerms {
    /// Until the first token: the terms that are this step's own time.
    pub fn time_to_first_token(&self) -> Micros {
        self.queue + self.compute + self.network + self.restore
    }

    /// The price: the sum of the terms, saturating.
    pub fn total(&self) -> Micros {
        self.queue + self.compute + self.network + self.restore + self.memory + self.interference + self.eviction
    }
}

/// One way to serve the step.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PlanCandidate {
    /// What it does.
    pub action: Action,
    /// Who would compute the prompt.
    pub prefill: Leg,
    /// Who would generate the answer.
    pub decode: Leg,
    /// What would move.
    pub handoff: Option<Handoff>,
    /// What would become of ownership.
    pub claim: OwnershipClaim,
    /// Its price, term by term; zero where it was refused before it was priced.
    pub terms: CostTerms,
    /// Sum of the terms.
    pub total: Micros,
    /// Why it may not be chosen.
    pub refused: Option<CandidateRefusal>,
}

/// Why a candidate may not be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, strum::IntoStaticStr)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum CandidateRefusal {
    /// The worker does not serve the model or adapter.
    WrongModel,
    /// The worker only computes prompts.
    PrefillOnly,
    /// The worker is not reached.
    NotReady,
    /// The worker is to be emptied and others can serve.
    Draining,
    /// The worker failed already in this attempt.
    Excluded,
    /// Prompt and answer exceed the worker's context.
    TooLong,
    /// Prompt and answer exceed the worker's memory.
    DoesNotFit,
    /// The target has no usable link.
    NoLink,
    /// Nobody on the target's fabric can send.
    OtherFabric,
    /// Whoever holds the prefix has ranks that the target's cannot read from.
    OtherShape,
    /// Nothing may move over the link from whoever holds the prefix: KV came as something else over it.
    BarredLink,
    /// The worker answers only what a prefill worker hands to it.
    NeedsPrefiller,
    /// The action is switched off.
    Disabled,
}

impl CandidateRefusal {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A step's plan and everything that was weighed for it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Decision {
    /// What kind of step it is.
    pub step: StepKind,
    /// What to do.
    pub plan: Plan,
    /// Every candidate, the chosen one included, in the order of the workers.
    pub candidates: Vec<PlanCandidate>,
}

impl Decision {
    /// What every worker has of the prompt before anything is sent: one leg each.
    pub(crate) fn local_legs(&self) -> impl Iterator<Item = &Leg> {
        self.candidates.iter().filter(|candidate| candidate.handoff.is_none()).map(|candidate| &candidate.decode)
    }
}

/// Why a step cannot be planned at all.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, Debug)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum PlanningError {
    /// The client's fault: no worker of the fleet serves it.
    #[error("no worker serves the model {model}")]
    UnknownModel {
        /// The model or adapter that nobody serves.
        model: ModelId,
    },
    /// Ours, worth a retry later: workers serve it, none that may generate answers is ready.
    #[error("no worker that serves the model is ready")]
    NoneReady,
    /// Ours, worth a retry later: every ready worker failed already in this attempt.
    #[error("every ready worker failed already in this attempt")]
    AllExcluded,
    /// The client's fault: the step is longer than what any ready worker takes.
    #[error("prompt and answer exceed {longest} tokens, the most that a ready worker takes")]
    TooLong {
        /// The most that one of them takes.
        longest: Tokens,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn total_cost_saturates() {
        let terms = CostTerms { queue: Micros(u64::MAX), compute: Micros(1), ..CostTerms::default() };
        assert_eq!(terms.total(), Micros(u64::MAX));
    }
}
