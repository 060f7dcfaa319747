//! A question to the planner that owns its parts: what a decision log keeps, and what a what-if asks again.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Overlap, WorkerId, WorkerView};

use crate::{
    ActionSet, AttentionSpec, BarredLink, Decision, DisabledFeatures, OccupancyModel, OccupancyView, ParallelShape,
    PlanningError, PlanningInputs, PlanningRequest, Policy, RankMemory, SessionView, StepFacts, classify, plan,
};

/// One step as the planner was asked about it. The kind of step is not in it: it follows from the facts and the policy.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct PlanningCase {
    /// What makes the kind of step.
    pub facts: StepFacts,
    /// What is asked.
    pub ask: PlanningRequest,
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
    #[serde(default, skip_serializing_if = "ActionSet::is_empty")]
    pub disabled: ActionSet,
    /// Links that were barred at that time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub barred: Vec<BarredLink>,
}

impl PlanningCase {
    /// The decision under `policy`. Configured and so not asked each time: what the layers of its model keep, where that was
    /// known, and workers' shapes, in the order of their ids.
    pub fn plan(
        &self,
        policy: &Policy,
        (attention, shapes): (Option<&AttentionSpec>, &[(WorkerId, ParallelShape)]),
    ) -> Result<Decision, PlanningError> {
        let tenancy = OccupancyModel::from_recorded(self.memory.as_deref().unwrap_or_default());
        plan(&PlanningInputs {
            step: classify(&self.facts, &policy.thresholds),
            request: &self.ask,
            session: &self.session,
            workers: &self.workers,
            overlaps: &self.overlaps,
            excluded: &self.excluded,
            policy,
            disabled: DisabledFeatures { actions: self.disabled, links: &self.barred },
            attention,
            shapes,
            occupancy: OccupancyView { model: &tenancy, now: Micros::ZERO },
            round_robin_index: 0,
        })
    }
}
