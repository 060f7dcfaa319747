//! Self-contained planning inputs of one step, as a decision log stores them and a what-if replays them.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Overlap, Owner, Tokens, WorkerId, WorkerView};

use crate::kv_occupancy::RankHeadroom;
use crate::{
    ActionSet, AttentionSpec, ClassificationInputs, Decision, DirectedLink, DisabledFeatures, EvictionVictim, Leg,
    OccupancyModel, OccupancyView, ParallelShape, PlanningError, PlanningInputs, Policy, RankMemorySnapshot,
    RequestProfile, SessionView, classify, plan,
};

/// Planning inputs of one step. The kind of step is not stored: it follows from the facts and the policy.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct RecordedPlanningInputs {
    /// Facts that determine the kind of step.
    pub step: ClassificationInputs,
    /// The request.
    pub request: RequestProfile,
    /// Ownership of the session.
    pub session: SessionView,
    /// The fleet.
    pub workers: Arc<[WorkerView]>,
    /// Cached prefixes of the prompt, by worker and rank.
    pub overlaps: Vec<Overlap>,
    /// Workers that had already failed in this attempt.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_workers: Vec<WorkerId>,
    /// Recorded KV occupancy. None in logs written before it was recorded: a plan made from such a log has no eviction
    /// cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_occupancy: Option<Vec<RankMemorySnapshot>>,
    /// Actions disabled at that time, besides those of the policy.
    #[serde(default, skip_serializing_if = "ActionSet::is_empty")]
    pub disabled_actions: ActionSet,
    /// Links that were disabled at that time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disabled_links: Vec<DirectedLink>,
}

impl RecordedPlanningInputs {
    /// Returns the decision under `policy`. The attention spec of the model, if known, and the parallel shapes, sorted
    /// by worker id, come from the configuration, so they are not recorded.
    pub fn plan(
        &self,
        policy: &Policy,
        (attention, shapes): (Option<&AttentionSpec>, &[(WorkerId, ParallelShape)]),
    ) -> Result<Decision, PlanningError> {
        let occupancy = OccupancyModel::from_recorded(self.kv_occupancy.as_deref().unwrap_or_default());
        plan(&PlanningInputs {
            step: classify(&self.step, &policy.thresholds),
            request: &self.request,
            session: &self.session,
            workers: &self.workers,
            overlaps: &self.overlaps,
            excluded: &self.failed_workers,
            policy,
            disabled: DisabledFeatures { actions: self.disabled_actions, links: &self.disabled_links },
            attention,
            shapes,
            occupancy: OccupancyView { model: &occupancy, now: Micros::ZERO },
            round_robin_index: 0,
        })
    }
}

impl OccupancyModel {
    /// Returns what the planner read of the model for a step, rank by rank; unknown ranks are left out.
    pub fn recorded_memory(&self, inputs: &PlanningInputs<'_>, decision: &Decision) -> Vec<RankMemorySnapshot> {
        let session_lookup = self.session_lookup(inputs.session.id, inputs.occupancy.now);
        let views: BTreeMap<WorkerId, &WorkerView> = inputs.workers.iter().map(|view| (view.id, view)).collect();
        let mut all: Vec<RankMemorySnapshot> = Vec::with_capacity(views.len());
        for &Leg { worker, rank, cached_tokens: found, .. } in decision.local_legs() {
            let Some(view) = views.get(&worker) else { continue };
            let at = Owner { worker, incarnation: view.incarnation, rank };
            if !self.knows(at) {
                continue;
            }
            let capacity = view.capacity.kv;
            let headroom = session_lookup.headroom(at, capacity, found);
            // Upper bound of the tokens that a plan can need there, including the session's expected growth.
            let need = inputs.request.prompt_tokens + inputs.request.expected_output_tokens + Tokens(capacity.0 / 8);
            let mut remaining = need - headroom.free;
            let is_reachable = |victim: &EvictionVictim| {
                let reached = remaining > Tokens::ZERO;
                remaining -= victim.tokens;
                reached
            };
            let victims = session_lookup.victims(&headroom).take_while(is_reachable).collect();
            let (RankHeadroom { free, session_tokens: own, active, inflow, .. }, idle) =
                (headroom, headroom.evictable());
            all.push(RankMemorySnapshot {
                worker,
                rank,
                free_tokens: free,
                session_tokens: own,
                idle_tokens: idle,
                active_sessions: active,
                prefill_load: inflow,
                eviction_candidates: victims,
            });
        }
        all
    }
}
