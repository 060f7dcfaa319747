//! The planner: takes prefix, ownership, residency, occupancy, fleet and policy; returns a plan and its reasons.
//!
//! Pure: no IO, no clock, no randomness. Equal inputs give equal decisions on every router, whatever the order of the
//! workers. A missing fact never blocks a step: unknown values are priced with a documented default.

mod action;
mod action_set;
mod admission;
mod attention;
mod cached_prefix;
mod candidate_table;
mod candidates;
mod cost;
mod cost_terms;
mod decision;
mod inputs;
mod kv_occupancy;
mod lcm;
mod micros;
mod plan;
mod plan_check;
mod policy;
mod prefix_replication;
mod recorded_planning_inputs;
mod recovery_cost;
mod rendezvous;
mod return_model;
mod selection;
mod step;
mod worker_candidate;

pub use action::Action;
pub use action_set::ActionSet;
pub use admission::{AdmissionDecision, AdmissionRequest, StepQueue, StepStartReason, displaced_compute};
pub use attention::{
    AttentionSpec, BlockLayout, DenseKv, EngineInstances, KvTransferGroups, LatentKv, LayerBlockSlice, LayerState,
    ParallelShape, ParallelShapeError, RestorablePrefix, RestoreSplit, SequenceCompressedKv, SpecError, StateKind,
    WindowCheckpointCosts, WindowCheckpointInterval, WindowKv, check_kv_compatibility,
};
pub use cost_terms::CostTerms;
pub use decision::{CandidateRefusal, Decision, PlanCandidate, PlanningError};
pub use inputs::{
    DirectedLink, DisabledFeatures, LiveIntent, OccupancyView, PlanningInputs, RequestProfile, RequestTransferBlocker,
    SessionView, TransferPermission,
};
pub use kv_occupancy::{EvictionVictim, OccupancyModel, RankMemorySnapshot, RecentPrefillLoad, StepFootprint};
pub use lcm::lcm;
pub use micros::{PrefillTimeModel, micros, valid_or_zero};
pub use plan::{
    Handoff, HandoffKind, Leg, LegOrHandoff, LegRole, LegSequence, LegSequenceError, MoveReason, OwnershipEffect, Plan,
    PlanRationale, RunnerUp, WorkerRank,
};
pub use plan_check::PlanViolation;
pub use policy::{
    AdmissionLimits, LowerTiers, OverloadThresholds, Policy, ReplicateSendTiming, ResidencyConfidence, SelectionRule,
    TransferTimeMargin,
};
pub use prefix_replication::{
    ChosenReplication, PrefixMoveKind, ReplicationLimits, ReplicationSkipReason, plan_prefix_replication,
};
pub use recorded_planning_inputs::RecordedPlanningInputs;
pub use selection::plan;
pub use step::{ClassificationInputs, ClassificationThresholds, HeadRelation, StepKind, classify};

#[cfg(test)]
mod tests;
