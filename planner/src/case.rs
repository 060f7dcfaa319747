//! A question to the planner that owns its parts: what a decision log keeps, and what a what-if asks again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Overlap, WorkerId, WorkerView};

use crate::{
    Account, Actions, Ask, AttentionSpec, BarredLink, Decision, Disabled, Inputs, NoPlan, ParallelShape, Policy,
    RankMemory, SessionView, StepFacts, Tenancy, classify, plan,
};

/// One step as the planner was asked about it. The kind of step is not in it: it follows from the facts and the policy.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct Case {
    /// What makes the kind of step.
    pub facts: StepFacts,
    /// What is asked.
    pub ask: Ask,
    /// Who owns what.
    pub session: SessionView,
    /// The fleet.
    pub workers: Arc<[WorkerView]>,
    /// Who holds how much of the prompt.
    pub overlaps: Vec<Overlap>,
    /// Workers that had failed already.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub excluded: Vec<WorkerId>,
    /// Whose KV would be pushed out, as the account had it. None in logs from before there was one: what that costs is not
    /// in a plan that is made of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Vec<RankMemory>>,
    /// Actions that were switched off at that time, beside those of the policy.
    #[serde(default, skip_serializing_if = "Actions::is_empty")]
    pub disabled: Actions,
    /// Links that were barred at that time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub barred: Vec<BarredLink>,
}

impl Case {
    /// The decision under `policy`. Configured and so not asked each time: what the layers of its model keep, where that was
    /// known, and workers' shapes, in the order of their ids.
    pub fn plan(
        &self,
        policy: &Policy,
        (attention, shapes): (Option<&AttentionSpec>, &[(WorkerId, ParallelShape)]),
    ) -> Result<Decision, NoPlan> {
        let tenancy = Tenancy::retold(self.memory.as_deref().unwrap_or_default());
        plan(&Inputs {
            step: classify(&self.facts, &policy.thresholds),
            ask: &self.ask,
            session: &self.session,
            workers: &self.workers,
            overlaps: &self.overlaps,
            excluded: &self.excluded,
            policy,
            disabled: Disabled { actions: self.disabled, links: &self.barred },
            attention,
            shapes,
            account: Account { tenancy: &tenancy, now: Micros::ZERO },
            turn: 0,
        })
    }
}
