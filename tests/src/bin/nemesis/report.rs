//! The result as a table for people, and as JSON.

use std::fmt::Write;

use serde::Serialize;

use crate::throughput::{AttemptTally, quantile};
use crate::trial::{MIN_CALM_WRITES, TrialOutcome};

/// Result of a run.
#[derive(Debug, Serialize)]
pub(crate) struct NemesisReport {
    /// Seed of the fault choices.
    pub(crate) seed: u64,
    /// Namespaces, or loopback only.
    pub(crate) stage: &'static str,
    /// Why namespaces are not used.
    pub(crate) without_namespaces: Option<String>,
    /// Why disk and clock faults are not available.
    pub(crate) without_levers: Option<String>,
    /// One outcome per executed nemesis.
    pub(crate) outcomes: Vec<TrialOutcome>,
    /// Violations found at the end of the run.
    pub(crate) broken: Vec<String>,
    /// Counts of other traffic.
    pub(crate) seen: BackgroundTraffic,
    /// Folder of logs and histories.
    pub(crate) folder: String,
    /// Duration in seconds.
    pub(crate) took: f64,
}

/// Traffic besides the operations.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct BackgroundTraffic {
    /// Bytes between nodes.
    pub(crate) carried: u64,
    /// Changes received by watches.
    pub(crate) changes: usize,
    /// Number of watch resumptions.
    pub(crate) resumed: u64,
    /// Streamed responses.
    pub(crate) streams: usize,
    /// Operations on registers.
    pub(crate) registers: usize,
}

impl NemesisReport {
    /// Returns whether all guarantees held.
    pub(crate) fn holds(&self) -> bool {
        self.broken.is_empty() && self.outcomes.iter().all(TrialOutcome::holds)
    }

    /// Nemeses during which the load was too small to prove anything.
    pub(crate) fn inconclusive(&self) -> Vec<&'static str> {
        self.outcomes.iter().filter(|outcome| !outcome.is_conclusive()).map(|outcome| outcome.nemesis).collect()
    }

    /// Formats the table for people.
    pub(crate) fn table(&self) -> String {
        let mut out = String::from(
            "\nnemesis                  faults   acked refused unknown  reads   writes/s  worst s  fail-over   recovery  verdict\n",
        );
        for outcome in &self.outcomes {
            line(&mut out, outcome);
        }
        // Writing to a string cannot fail.
        let _ = writeln!(out, "\n{}", self.sum());
        for broken in &self.broken {
            let _ = writeln!(out, "BROKEN at the end: {broken}");
        }
        out
    }

    fn sum(&self) -> String {
        let faults: u32 = self.outcomes.iter().map(|outcome| outcome.faults).sum();
        let checked: u64 = self.outcomes.iter().map(|outcome| outcome.tally.total()).sum();
        let fail_overs: Vec<f64> = self.outcomes.iter().flat_map(|outcome| outcome.fail_overs.clone()).collect();
        let seconds = |value: Option<f64>| value.map_or("none".to_owned(), |value| format!("{value:.2} s"));
        let recovery = self.outcomes.iter().map(|outcome| outcome.recovery).fold(0.0, f64::max);
        format!(
            "{faults} faults injected, {checked} operations on sessions and {} on registers checked; fail-over median {}, p99 {} of {}; longest recovery {recovery:.1} s; \
             {} changes watched, {} times resumed; {} streams; {} MB between nodes; {} in {:.0} s; seed {}",
            self.seen.registers,
            seconds(quantile(&fail_overs, 0.5)),
            seconds(quantile(&fail_overs, 0.99)),
            fail_overs.len(),
            self.seen.changes,
            self.seen.resumed,
            self.seen.streams,
            self.seen.carried >> 20,
            self.stage,
            self.took,
            self.seed,
        )
    }
}

fn line(out: &mut String, outcome: &TrialOutcome) {
    let AttemptTally { acknowledged, refused, unknown, reads } = outcome.tally;
    let longest = outcome.fail_overs.iter().copied().reduce(f64::max);
    let fail_over = longest.map_or(String::new(), |longest| format!("{longest:.2} s"));
    let verdict = match (outcome.holds(), outcome.faults, outcome.is_conclusive()) {
        (false, ..) => "BROKEN",
        (true, 0, _) => "NOT RUN here",
        (true, _, true) => "holds",
        (true, _, false) => "DOES NOT COUNT: too little load",
    };
    let _ = writeln!(
        out,
        "{:<24} {:>6} {acknowledged:>7} {refused:>7} {unknown:>7} {reads:>6} {:>10.0} {:>8} {fail_over:>10} {:>8.1} s  {verdict}",
        outcome.nemesis, outcome.faults, outcome.load, outcome.least_load, outcome.recovery,
    );
    if !outcome.note.is_empty() {
        let _ = writeln!(out, "{:26}{}", "", outcome.note);
    }
    for broken in &outcome.broken {
        let _ = writeln!(out, "{:26}{broken}", "");
    }
    if !outcome.is_conclusive() {
        let _ = writeln!(
            out,
            "{:26}{} writes were acknowledged in a window without faults, {MIN_CALM_WRITES} are needed: use a quieter machine",
            "", outcome.calm_writes
        );
    }
}
