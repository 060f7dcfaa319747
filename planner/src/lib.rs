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
pub use actions::Actions;
pub use admission::{Admission, Asking, Queue, Start, Verdict, costs_others};
pub use ahead::{AheadBounds, AheadKind, AheadMove, Stays, ahead};
pub use attention::{
    AttentionSpec, BlockLayout, BlockPart, CheckpointCosts, Checkpoints, Compressed, Heads, Instances, KvGroups,
    Latent, LayerState, ParallelShape, Prefetch, Restore, RestorePlan, RestorePrices, ShapeError, SpecError, StateKind,
    Way, Windowed, exchange,
};
pub use case::Case;
pub use check::Illegal;
pub use choose::plan;
pub use decision::{Candidate, Decision, NoPlan, Refused, Terms};
pub use inputs::{Account, Ask, BarredLink, Disabled, Inputs, Promise, SessionView, TransferBar, Transfers};
pub use lcm::lcm;
pub use micros::ComputeRate;
pub use plan::{Because, Claim, Handoff, Leg, MoveReason, Plan, RunnerUp};
pub use policy::{Overload, Policy, Rule, Sources, Tiers, TransferRisk, Trust};
pub use step::{HeadRelation, StepFacts, StepKind, Thresholds, classify};
pub use tenancy::{Inflow, RankMemory, Stay, Tenancy, Victim};

#[cfg(test)]
mod tests;
