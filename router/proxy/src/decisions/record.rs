//! What the files of the decision log hold: a header, and one record for each step.

use std::collections::BTreeMap;
use std::sync::Arc;

use planner::{Action, AttentionSpec, ParallelShape, Policy, RecordedPlanningInputs};
use serde::{Deserialize, Serialize};
use vocabulary::{ModelId, SessionId, WorkerId};

use crate::receipt::{AttemptLeg, Receipt};

/// Format version that this release writes. It reads version 1 as well.
pub(crate) const FORMAT_VERSION: u32 = 2;

/// Header of every log file: what its records were decided by.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct DecisionLogHeader {
    /// Format version of the records in the file.
    pub(crate) version: u32,
    pub(crate) release: String,
    /// Policy by which the decisions of the file were made.
    #[serde(rename = "planner")]
    pub policy: Policy,
    /// Planner inputs from the configuration.
    #[serde(flatten)]
    pub configured: StaticPlanningInputs,
}

impl DecisionLogHeader {
    /// Returns the header of files that this release writes.
    pub(super) fn new(policy: Policy, configured: StaticPlanningInputs) -> Self {
        Self { version: FORMAT_VERSION, release: env!("CARGO_PKG_VERSION").into(), policy, configured }
    }
}

/// Planner inputs that come from the configuration and do not change.
#[derive(Clone, PartialEq, Default, Serialize, Deserialize, Debug)]
pub struct StaticPlanningInputs {
    /// Attention layers of each model, where known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attention: BTreeMap<ModelId, AttentionSpec>,
    /// Parallel shapes of workers, where known, ordered by worker id.
    #[serde(rename = "parallelism", default, skip_serializing_if = "Vec::is_empty")]
    pub shapes: Vec<(WorkerId, ParallelShape)>,
}

/// A finished step on its way into the log.
#[derive(Debug)]
pub(super) struct DecisionRecord {
    pub(super) receipt: Arc<Receipt>,
    pub(super) case: Option<RecordedPlanningInputs>,
}

impl DecisionRecord {
    /// Size of the record in entries: candidates, planned workers and sessions that would be evicted there.
    pub(super) fn entry_count(&self) -> usize {
        let candidates = self.receipt.decision.as_ref().map_or(0, |decision| decision.candidates.len());
        let victims = |case: &RecordedPlanningInputs| {
            case.kv_occupancy.iter().flatten().map(|told| 1 + told.eviction_candidates.len()).sum::<usize>()
        };
        1 + candidates + self.case.as_ref().map_or(0, |case| case.workers.len() + case.overlaps.len() + victims(case))
    }
}

#[derive(Deserialize, Debug)]
pub struct ReplayLookup {
    pub session_id: SessionId,
}

/// An attempt of a recorded step, as far as a replay needs it.
#[derive(Clone, Deserialize, Debug)]
pub struct ReplayAttempt {
    /// Action of its plan.
    pub action: Action,
    /// Legs of its plan.
    pub legs: Vec<AttemptLeg>,
}
