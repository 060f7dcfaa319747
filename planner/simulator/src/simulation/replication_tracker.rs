//! Replications in flight, and those whose session's next step is awaited.

use std::collections::HashMap;

use engine_model::runs::RunId;

use crate::policies::StepRef;
use crate::report::ReplicationStats;
use crate::trace::TraceStep;

#[derive(Default)]
pub(super) struct ReplicationTracker {
    pub(super) in_flight: HashMap<usize, ReplicationTransfer>,
    /// Replications awaiting a session's next step, with their target.
    pub(super) expected: HashMap<(usize, u32), AwaitedReplication>,
    pub(super) figures: ReplicationStats,
}

pub(super) struct ReplicationTransfer {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) agent: (usize, u32),
    pub(super) runs: Vec<RunId>,
    /// Runs that the source keeps until they are sent.
    pub(super) pinned_runs: Vec<RunId>,
}

pub(super) struct AwaitedReplication {
    pub(super) number: usize,
    pub(super) to: usize,
    pub(super) state: ReplicationState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReplicationState {
    InFlight,
    Arrived,
    /// The target had no memory for it.
    Dropped,
}

impl ReplicationTracker {
    /// Records that the next step is placed at a worker.
    pub(super) fn step_dispatched(&mut self, (at, step): (StepRef, &TraceStep), to: usize) {
        let Some(awaited) = self.expected.remove(&(at.session, step.agent)) else { return };
        if awaited.state == ReplicationState::InFlight {
            self.figures.late += 1;
        } else if awaited.state == ReplicationState::Arrived && awaited.to == to {
            self.figures.used += 1;
        }
    }
}
