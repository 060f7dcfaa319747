//! Caveats that a reader must know before trusting the figures.

use std::collections::BTreeSet;

use super::{FigureVerdict, RunStats, TimeDistribution};

/// Distribution of a run, with its name.
type DistributionAccessor = (&'static str, fn(&RunStats) -> &TimeDistribution);

const DISTRIBUTIONS: [DistributionAccessor; 5] = [
    ("time to the first token", |run| &run.ttft),
    ("time to the first token of small steps", |run| &run.small_step_ttft),
    ("step time", |run| &run.step),
    ("session time", |run| &run.session),
    ("time per token", |run| &run.tpot),
];

/// Returns notes on unserved steps, on distributions without measurements, and on too few runs.
pub fn notes(runs: &[RunStats], verdicts: &[FigureVerdict]) -> Vec<String> {
    let mut notes: Vec<String> = runs.iter().filter(|run| run.unserved > 0).map(unserved).collect();
    for (name, times) in DISTRIBUTIONS {
        let empty: Vec<&RunStats> = runs.iter().filter(|run| times(run).count == 0).collect();
        if let Some(first) = empty.first() {
            let of = if empty.len() == runs.len() { "any run".to_owned() } else { named(&empty, first) };
            notes.push(format!("no {name} was measured in {of}: `-` there, and no part of a mean"));
        }
    }
    let seeds: BTreeSet<u64> = runs.iter().map(|run| run.traffic.seed).collect();
    if seeds.len() < 2 {
        notes.push("one seed says nothing of chance: `--seed 1,2,3,4,5` gives means with confidence".to_owned());
    }
    if verdicts.is_empty() {
        notes.push("no verdict: it takes `ownerserve` and at least one baseline among the policies".to_owned());
    }
    notes
}

fn unserved(run: &RunStats) -> String {
    let RunStats { policy, traffic, steps, unserved, .. } = run;
    format!(
        "{policy} at load {} with seed {} never served {unserved} of {} steps: its times are of the others only",
        traffic.load,
        traffic.seed,
        steps + unserved
    )
}

fn named(empty: &[&RunStats], first: &RunStats) -> String {
    let one = format!("{} at load {} with seed {}", first.policy, first.traffic.load, first.traffic.seed);
    match empty.len() - 1 {
        0 => one,
        more => format!("{one} and {more} more runs"),
    }
}
