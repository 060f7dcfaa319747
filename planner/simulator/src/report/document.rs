//! Everything that is told of one command's runs.

use std::collections::HashSet;

use serde::Serialize;

use super::{
    AblationResult, BaselineVerdict, MetricDefinition, PolicySummary, RunFigures, TimeDistribution, ablations,
    definitions, notes, summarize_policies, verdicts,
};
use crate::HardwareProfile;
use crate::trace::{ArrivalProcess, Trace};

/// All runs, what they come to, and what the words mean.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct SimulationReport {
    /// What was replayed on what.
    #[serde(flatten)]
    pub subject: ReportSubject,
    /// Every run.
    pub runs: Vec<RunFigures>,
    /// Every policy at every load, over its seeds.
    pub cells: Vec<PolicySummary>,
    /// The same under every cache management, where several were asked for: everything else is under the first one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<PolicySummary>,
    /// OwnerServe beside the best baseline.
    pub verdicts: Vec<BaselineVerdict>,
    /// OwnerServe without parts of it beside the whole, where that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<AblationResult>,
    /// What must be known before the figures are believed.
    pub notes: Vec<String>,
    /// What the words mean.
    pub definitions: Vec<MetricDefinition>,
    /// How long decisions took on the machine that ran this, where somebody looked: all else is the same everywhere.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planning: Vec<DecisionLatency>,
}

/// How long a policy took to place a step, by a real clock.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct DecisionLatency {
    /// Who decided.
    pub policy: &'static str,
    /// Microseconds of a decision.
    pub micros: TimeDistribution,
}

/// What was replayed on what.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct ReportSubject {
    /// The trace as it was named.
    pub trace: String,
    /// Its sessions within the limits; recordings where requests come at recorded times.
    pub sessions: usize,
    /// Their steps.
    pub steps: usize,
    /// What a load is a number of.
    pub load_is: &'static str,
    /// The kind of worker.
    pub profile: &'static str,
    /// Workers.
    pub workers: usize,
    /// GPUs of all of them.
    pub gpus: usize,
    /// Tokens of KV in a worker's device memory.
    pub device_tokens: u64,
    /// Tokens of KV in a worker's host tier.
    pub host_tokens: u64,
    /// Tokens of KV on a worker's disk.
    pub disk_tokens: u64,
}

impl ReportSubject {
    /// Of a trace as it is replayed.
    pub fn new(name: String, trace: &Trace, (workers, spec): (usize, &HardwareProfile)) -> Self {
        let load_is = match trace.arrivals {
            ArrivalProcess::AfterDependencies => "sessions at once",
            ArrivalProcess::Recorded => "times the recorded rate",
        };
        Self {
            trace: name,
            sessions: trace.sessions.len(),
            steps: trace.steps().count(),
            load_is,
            profile: spec.name,
            workers,
            gpus: workers * spec.gpus as usize,
            device_tokens: spec.sizes.device.0,
            host_tokens: spec.sizes.host.0,
            disk_tokens: spec.sizes.disk.0,
        }
    }
}

impl SimulationReport {
    /// Of runs in any order of loads, policies and seeds. What is to be known of the trace comes first.
    pub fn of(subject: ReportSubject, of_trace: Vec<String>, runs: Vec<RunFigures>) -> Self {
        let all = summarize_policies(&runs);
        let first = runs.first().and_then(|run| run.traffic.cache);
        let of_first: Vec<RunFigures> = runs.iter().filter(|run| run.traffic.cache == first).cloned().collect();
        let (cells, others): (Vec<PolicySummary>, Vec<PolicySummary>) =
            all.iter().cloned().partition(|cell| cell.cache == first);
        let verdicts = verdicts(&of_first, &cells);
        let mut notes: Vec<String> = of_trace.into_iter().chain(notes(&runs, &verdicts)).collect();
        if let Some(first) = first.filter(|_| !others.is_empty()) {
            notes.push(format!("verdicts and other plots are under `{first}`; cache management has all of them"));
        }
        let ablations = ablations(&of_first, &cells);
        let caches = if others.is_empty() { Vec::new() } else { all };
        Self {
            subject,
            runs,
            cells,
            caches,
            verdicts,
            ablations,
            notes,
            definitions: definitions(),
            planning: Vec::new(),
        }
    }

    /// The policies, in the order in which they first ran.
    pub(super) fn policies(&self) -> Vec<&'static str> {
        let mut seen = HashSet::new();
        self.cells.iter().map(|cell| cell.policy).filter(|policy| seen.insert(*policy)).collect()
    }

    /// The loads, the least first.
    pub(super) fn loads(&self) -> Vec<f64> {
        let mut loads: Vec<f64> = self.cells.iter().map(|cell| cell.load).collect();
        loads.sort_by(f64::total_cmp);
        loads.dedup();
        loads
    }

    pub(super) fn at(&self, load: f64) -> Vec<&PolicySummary> {
        self.cells.iter().filter(|cell| cell.load.total_cmp(&load).is_eq()).collect()
    }
}
