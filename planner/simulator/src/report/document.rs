//! The complete report of one command's runs.

use std::collections::HashSet;

use serde::Serialize;

use super::{
    AblationResult, FigureVerdict, PolicySummary, RunStats, TermDefinition, TimeDistribution, ablations, definitions,
    notes, summarize_policies, verdicts,
};
use crate::HardwareProfile;
use crate::trace::{ArrivalProcess, Trace};

/// All runs, their summaries, and definitions of terms.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct SimulationReport {
    /// Trace and fleet of the runs.
    #[serde(flatten)]
    pub subject: ReportSubject,
    /// Every run.
    pub runs: Vec<RunStats>,
    /// Every policy at every load, summarized over its seeds.
    pub cells: Vec<PolicySummary>,
    /// Summaries under every tier policy, if several were requested; everything else is under the first one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tier_policies: Vec<PolicySummary>,
    /// Comparison of OwnerServe with the best baseline.
    pub verdicts: Vec<FigureVerdict>,
    /// Comparison of OwnerServe with its ablations, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<AblationResult>,
    /// Caveats that a reader must know before trusting the figures.
    pub notes: Vec<String>,
    /// Definitions of terms.
    pub definitions: Vec<TermDefinition>,
    /// Time of decisions on this machine, if measured; everything else is machine-independent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planning: Vec<DecisionLatency>,
}

/// Wall-clock time that a policy took to place a step.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct DecisionLatency {
    /// Name of the policy.
    pub policy: &'static str,
    /// Microseconds per decision.
    pub micros: TimeDistribution,
}

/// Trace and fleet of a report.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct ReportSubject {
    /// Name of the trace, as given.
    pub trace: String,
    /// Sessions within the limits; for requests at recorded times, the number of recordings.
    pub sessions: usize,
    /// Number of steps.
    pub steps: usize,
    /// Unit of the load.
    pub load_is: &'static str,
    /// Hardware profile of the workers.
    pub profile: &'static str,
    /// Number of workers.
    pub workers: usize,
    /// GPUs of all workers.
    pub gpus: usize,
    /// Tokens of KV in a worker's device memory.
    pub device_tokens: u64,
    /// Tokens of KV in a worker's host tier.
    pub host_tokens: u64,
    /// Tokens of KV on a worker's disk.
    pub disk_tokens: u64,
}

impl ReportSubject {
    /// Describes a trace as it is replayed.
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
    /// Builds the report of runs in any order. Notes about the trace come first.
    pub fn of(subject: ReportSubject, of_trace: Vec<String>, runs: Vec<RunStats>) -> Self {
        let all = summarize_policies(&runs);
        let first = runs.first().and_then(|run| run.traffic.tier_policy);
        let of_first: Vec<RunStats> = runs.iter().filter(|run| run.traffic.tier_policy == first).cloned().collect();
        let (cells, others): (Vec<PolicySummary>, Vec<PolicySummary>) =
            all.iter().cloned().partition(|cell| cell.tier_policy == first);
        let verdicts = verdicts(&of_first, &cells);
        let mut notes: Vec<String> = of_trace.into_iter().chain(notes(&runs, &verdicts)).collect();
        if let Some(first) = first.filter(|_| !others.is_empty()) {
            notes.push(format!(
                "verdicts and other plots are under tier policy `{first}`; the table of tier policies has all"
            ));
        }
        let ablations = ablations(&of_first, &cells);
        let tier_policies = if others.is_empty() { Vec::new() } else { all };
        Self {
            subject,
            runs,
            cells,
            tier_policies,
            verdicts,
            ablations,
            notes,
            definitions: definitions(),
            planning: Vec::new(),
        }
    }

    /// Returns the policies, in the order in which they first ran.
    pub(super) fn policies(&self) -> Vec<&'static str> {
        let mut seen = HashSet::new();
        self.cells.iter().map(|cell| cell.policy).filter(|policy| seen.insert(*policy)).collect()
    }

    /// Returns the loads in ascending order.
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
