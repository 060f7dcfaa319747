//! Everything that is told of one command's runs.

use std::collections::HashSet;

use serde::Serialize;

use super::{Cell, Definition, Figures, Times, Verdict, Worth, ablations, cells, definitions, notes, verdicts};
use crate::Spec;
use crate::trace::{Arrivals, Trace};

/// All runs, what they come to, and what the words mean.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Report {
    /// What was replayed on what.
    #[serde(flatten)]
    pub subject: Subject,
    /// Every run.
    pub runs: Vec<Figures>,
    /// Every policy at every load, over its seeds.
    pub cells: Vec<Cell>,
    /// The same under every cache management, where several were asked for: everything else is under the first one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caches: Vec<Cell>,
    /// OwnerServe beside the best baseline.
    pub verdicts: Vec<Verdict>,
    /// OwnerServe without parts of it beside the whole, where that was asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ablations: Vec<Worth>,
    /// What must be known before the figures are believed.
    pub notes: Vec<String>,
    /// What the words mean.
    pub definitions: Vec<Definition>,
    /// How long decisions took on the machine that ran this, where somebody looked: all else is the same everywhere.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planning: Vec<Planning>,
}

/// How long a policy took to place a step, by a real clock.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Planning {
    /// Who decided.
    pub policy: &'static str,
    /// Microseconds of a decision.
    pub micros: Times,
}

/// What was replayed on what.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Subject {
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

impl Subject {
    /// Of a trace as it is replayed.
    pub fn new(name: String, trace: &Trace, (workers, spec): (usize, &Spec)) -> Self {
        let load_is = match trace.arrivals {
            Arrivals::AfterOthers => "sessions at once",
            Arrivals::Recorded => "times the recorded rate",
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

impl Report {
    /// Of runs in any order of loads, policies and seeds. What is to be known of the trace comes first.
    pub fn of(subject: Subject, of_trace: Vec<String>, runs: Vec<Figures>) -> Self {
        let all = cells(&runs);
        let first = runs.first().and_then(|run| run.traffic.cache);
        let of_first: Vec<Figures> = runs.iter().filter(|run| run.traffic.cache == first).cloned().collect();
        let (cells, others): (Vec<Cell>, Vec<Cell>) = all.iter().cloned().partition(|cell| cell.cache == first);
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

    pub(super) fn at(&self, load: f64) -> Vec<&Cell> {
        self.cells.iter().filter(|cell| cell.load.total_cmp(&load).is_eq()).collect()
    }
}
