//! The planner: takes prefix, ownership, residency, occupancy, fleet and policy; returns a plan and its reasons.
//!
//! Pure: no IO, no clock, no randomness. Equal inputs give equal decisions on every router, whatever the order of the
//! workers. A missing fact never blocks a step: unknown values are priced with a documented default.

mod action;
mod action_set;
mod admission;
mod attention;
mod cached_prefix;
mod candidates;
mod cost;
mod cost_terms;
mod decision;
mod eviction_cost;
mod fleet_layout;
mod inputs;
mod kv_occupancy;
mod lcm;
mod micros;
mod plan;
mod plan_check;
mod planning_case;
mod policy;
mod prefix_replication;
mod recovery_cost;
mod rendezvous;
mod return_model;
mod selection;
mod step;
mod worker_candidate;

pub use action::Action;
pub use action_set::ActionSet;
pub use admission::{AdmissionDecision, AdmissionReason, AdmissionRequest, StepQueue, displaced_compute};
pub use attention::{
    AttentionSpec, BlockLayout, BlockPart, CheckpointCosts, CheckpointInterval, CompressedKv, DenseKv, EngineInstances,
    KvGroups, LatentKv, LayerState, ParallelShape, PrefixRestore, RestoreSplit, ShapeError, SpecError, StateKind,
    WindowKv, check_kv_compatibility,
};
pub use cost_terms::CostTerms;
pub use decision::{CandidateRefusal, Decision, PlanCandidate, PlanningError};
pub use inputs::{
    DisabledFeatures, DisabledLink, LiveIntent, OccupancyView, PlanningInputs, RequestProfile, SessionView,
    TransferObstacle, TransferPermission,
};
pub use kv_occupancy::{EvictionVictim, KvFootprint, OccupancyModel, PrefillLoad, RankKvMemory};
pub use lcm::lcm;
pub use micros::{ComputeRate, micros, valid_or_zero};
pub use plan::{
    Handoff, HandoffKind, Leg, LegRole, MoveReason, OwnershipEffect, Plan, PlanPart, PlanRationale, PlanSequence,
    PlanSequenceError, RunnerUp, WorkerRank,
};
pub use plan_check::PlanViolation;
pub use planning_case::PlanningCase;
pub use policy::{
    AdmissionLimits, LowerTiers, OverloadThresholds, Policy, ReplicateSendTiming, ResidencyConfidence, SelectionRule,
    TransferTimeMargin,
};
pub use prefix_replication::{
    PrefixReplication, ReplicationLimits, ReplicationPurpose, ReplicationSkipReason, plan_prefix_replication,
};
pub use selection::plan;
pub use step::{ClassificationInputs, HeadRelation, StepKind, StepThresholds, classify};

#[cfg(test)]
mod tests;
