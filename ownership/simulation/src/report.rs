//! What many seeds came to, in words and figures.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::faults::Fault;
use crate::run::Report;

/// The sum of many runs.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Seeds that ran.
    pub seeds: u64,
    /// Those in which something did not hold.
    pub failed: Vec<Report>,
    /// Simulated time.
    pub simulated: Duration,
    tally: BTreeMap<&'static str, u64>,
}

impl Totals {
    /// Adds a run.
    pub fn add(&mut self, report: Report) {
        self.seeds += 1;
        self.simulated += report.lasted;
        for (what, count) in &report.tally {
            *self.tally.entry(what).or_default() += count;
        }
        if report.broken.is_some() {
            self.failed.push(report);
        }
    }

    /// How often something was counted.
    pub fn count(&self, what: &str) -> u64 {
        self.tally.get(what).copied().unwrap_or(0)
    }

    /// Faults injected.
    pub fn faults(&self) -> u64 {
        Fault::names().map(|name| self.count(name)).sum()
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hours = self.simulated.as_secs_f64() / 3_600.0;
        writeln!(f, "{} seeds, {hours:.1} simulated hours, {} failed", self.seeds, self.failed.len())?;
        let of = |names: &[&'static str]| {
            let counts = names.iter().map(|name| format!("{name} {}", self.count(name)));
            counts.collect::<Vec<_>>().join(", ")
        };
        let faults: Vec<&'static str> = Fault::names().collect();
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

/// One run, for people.
pub fn describe(report: &Report) -> String {
    let mut text = format!(
        "seed {}: {:.1} simulated seconds, trace {:016x}",
        report.seed,
        report.lasted.as_secs_f64(),
        report.trace
    );
    for (what, count) in &report.tally {
        text.push_str(&format!("\n  {what}: {count}"));
    }
    text.push('\n');
    text.push_str(&verdict(report));
    text
}

/// What did not hold, and how to see it again.
pub fn verdict(report: &Report) -> String {
    match &report.broken {
        None => format!("seed {}: everything held", report.seed),
        Some(broken) => format!(
            "seed {} FAILED: {}\n  {}\n  replay: just simulate 1 --seed {}",
            report.seed, broken.check, broken.detail, report.seed
        ),
    }
}
