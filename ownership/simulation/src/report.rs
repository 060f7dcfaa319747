//! Summary of many seeds as text.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::faults::FaultKind;
use crate::run::SeedReport;

/// Sum of many runs.
#[derive(Clone, Debug, Default)]
pub struct SeedTotals {
    /// Number of seeds that ran.
    pub seeds: u64,
    /// Seeds in which a property was violated.
    pub failed: Vec<SeedReport>,
    /// Simulated time.
    pub simulated: Duration,
    counts: BTreeMap<&'static str, u64>,
}

impl SeedTotals {
    /// Adds a run.
    pub fn add(&mut self, report: SeedReport) {
        self.seeds += 1;
        self.simulated += report.simulated;
        for (what, count) in &report.counts {
            *self.counts.entry(what).or_default() += count;
        }
        if report.violation.is_some() {
            self.failed.push(report);
        }
    }

    /// Returns how often something was counted.
    pub fn count(&self, what: &str) -> u64 {
        self.counts.get(what).copied().unwrap_or(0)
    }

    /// Returns the number of injected faults.
    pub fn faults(&self) -> u64 {
        FaultKind::names().map(|name| self.count(name)).sum()
    }
}

impl fmt::Display for SeedTotals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hours = self.simulated.as_secs_f64() / 3_600.0;
        writeln!(f, "{} seeds, {hours:.1} simulated hours, {} failed", self.seeds, self.failed.len())?;
        let of = |names: &[&'static str]| {
            let counts = names.iter().map(|name| format!("{name} {}", self.count(name)));
            counts.collect::<Vec<_>>().join(", ")
        };
        let faults: Vec<&'static str> = FaultKind::names().collect();
        writeln!(f, "faults injected: {} ({})", self.faults(), of(&faults))?;
        let change = [
            "learners joined",
            "voters changed",
            "leaders lost in a change",
            "changes finished by another leader",
            "nodes removed",
            "leader transfers asked for",
        ];
        writeln!(f, "membership: {}", of(&change))?;
        let levels = [
            "releases swapped",
            "levels raised",
            "raises refused",
            "let in beside a raise",
            "not let in beside a raise",
        ];
        writeln!(f, "releases: {}", of(&levels))?;
        let raft = ["elections", "snapshots asked for", "snapshots installed", "starts", "messages", "messages lost"];
        writeln!(f, "raft: {}", of(&raft))?;
        let checked = ["entries", "operations", "operations in histories", "linearizable reads", "replayed serials"];
        writeln!(f, "checked: {}, leases ended {}", of(&checked), self.count("leases ended"))?;
        let looked = ["changes told", "watches begun", "watches compacted", "bounded reads", "bounded reads refused"];
        write!(f, "onlookers: {}", of(&looked))
    }
}

/// Describes one run.
pub fn describe(report: &SeedReport) -> String {
    let mut text = format!(
        "seed {}: {:.1} simulated seconds, trace {:016x}",
        report.seed,
        report.simulated.as_secs_f64(),
        report.trace
    );
    for (what, count) in &report.counts {
        text.push_str(&format!("\n  {what}: {count}"));
    }
    text.push('\n');
    text.push_str(&verdict(report));
    text
}

/// Describes the violation, and how to reproduce it.
pub fn verdict(report: &SeedReport) -> String {
    match &report.violation {
        None => format!("seed {}: everything held", report.seed),
        Some(broken) => format!(
            "seed {} FAILED: {}\n  {}\n  replay: just simulate 1 --seed {}",
            report.seed, broken.check, broken.detail, report.seed
        ),
    }
}
