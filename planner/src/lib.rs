//! The planner: prefix, ownership, residency, tenancy, fleet and policy in; a plan and its reasons out.
//!
//! Pure: no IO, no clock, no randomness. Equal inputs give equal decisions on every router, whatever the order of the
//! workers. It never blocks a step over a missing fact: what is unknown is priced with a documented default.

mod action;
mod actions;
mod admission;
mod again;
mod ahead;
mod attention;
mod candidates;
mod case;
mod check;
mod choose;
mod cost;
mod decision;
mod holding;
mod inputs;
mod lcm;
mod micros;
mod plan;
mod policy;
mod pressure;
mod rendezvous;
mod returns;
mod standing;
mod step;
mod table;
mod tenancy;

pub use action::Action;
pub use actions::ActionSet;
pub use admission::{
    AdmissionDecision, AdmissionLimits, AdmissionReason, AdmissionRequest, StepQueue, displaced_compute,
};
pub use ahead::{
    PrefixReplication, ReplicationLimits, ReplicationPurpose, ReplicationSkipReason, plan_prefix_replication,
};
pub use attention::{
    AttentionSpec, BlockLayout, BlockPart, CheckpointCosts, CheckpointInterval, CompressedKv, DenseKv, Instances,
    KvGroups, LatentKv, LayerState, ParallelShape, PrefetchMode, PrefixRestore, RestorePlan, RestorePrices,
    RestoreSplit, ShapeError, SpecError, StateKind, WindowKv, check_kv_compatibility,
};
pub use case::PlanningCase;
pub use check::PlanViolation;
pub use choose::plan;
pub use decision::{CandidateRefusal, CostTerms, Decision, PlanCandidate, PlanningError};
pub use inputs::{
    BarredLink, DisabledFeatures, LiveIntent, OccupancyView, PlanningInputs, PlanningRequest, SessionView,
    TransferObstacle, TransferPermission,
};
pub use lcm::lcm;
pub use micros::ComputeRate;
pub use plan::{Handoff, Leg, MoveReason, OwnershipClaim, Plan, PlanRationale, RunnerUp};
pub use policy::{
    LowerTiers, OverloadThresholds, Policy, ResidencyConfidence, SelectionRule, SendTiming, TransferRisk,
};
pub use step::{HeadRelation, StepFacts, StepKind, Thresholds, classify};
pub use tenancy::{Footprint, OccupancyModel, PrefillLoad, RankMemory, Victim};

#[cfg(test)]
mod tests;
