//! Verdicts: OwnerServe compared with the best baseline of each load, within fixed bounds.

use serde::Serialize;

use super::{Metric, PolicySummary, RunStats, SeedMean};
use crate::policies::PolicyKind;

/// Definition of a verdict, as text.
pub(super) const VERDICT: &str = "at each load, OwnerServe's mean over seeds by that of the baseline that is best at this very \
    figure; ± is the 95 % confidence of the ratios of single seeds, which both served the same traffic. PASS: the ratio is \
    within the bound. A baseline that left steps unserved is not the best; OwnerServe with unserved steps is SHORT. The \
    bounds `pooled_memory` and `oracle` are no baselines";

/// Figures that are checked, with the largest allowed ratio to the best baseline.
const BOUNDS: [(&str, f64); 3] = [("step_mean_s", 1.03), ("session_mean_s", 1.03), ("ttft_p95_s", 1.10)];

/// Verdict on one figure at one load.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct FigureVerdict {
    /// Concurrent sessions, or the factor on the recorded rate.
    pub load: f64,
    /// Name of the figure.
    pub figure: &'static str,
    /// Baseline that is best at this figure.
    pub best: &'static str,
    /// Mean of that baseline.
    pub theirs: SeedMean,
    /// Mean of OwnerServe.
    pub ours: SeedMean,
    /// Ratio of OwnerServe to the baseline.
    pub ratio: SeedMean,
    /// Largest allowed ratio.
    pub bound: f64,
    /// Whether the ratio is within the bound.
    pub holds: bool,
}

impl FigureVerdict {
    /// Returns `PASS` or `SHORT`.
    pub fn label(&self) -> &'static str {
        if self.holds { "PASS" } else { "SHORT" }
    }

    /// Returns whether the confidence interval excludes the bound; none for a single seed.
    pub fn is_significant(&self) -> Option<bool> {
        self.ratio.confidence.map(|confidence| (self.ratio.mean - self.bound).abs() > confidence)
    }
}

/// Returns the verdicts of every load; none without OwnerServe or without a complete baseline.
pub fn verdicts(runs: &[RunStats], cells: &[PolicySummary]) -> Vec<FigureVerdict> {
    let own = PolicyKind::OwnerServe.as_str();
    let ours = cells.iter().filter(|cell| cell.policy == own);
    ours.flat_map(|ours| BOUNDS.iter().filter_map(|bound| verdict(runs, (cells, ours), *bound))).collect()
}

fn verdict(
    runs: &[RunStats],
    (cells, own): (&[PolicySummary], &PolicySummary),
    (figure, bound): (&'static str, f64),
) -> Option<FigureVerdict> {
    let complete =
        |summary: &&PolicySummary| summary.load == own.load && summary.unserved == 0 && is_baseline(summary.policy);
    // A missing seed would make the mean one of different traffic.
    let whole = |summary: &PolicySummary| summary.mean(figure).filter(|mean| mean.seeds == summary.seeds);
    let others = cells.iter().filter(complete).filter_map(|cell| Some((cell.policy, whole(cell)?)));
    let (best, theirs) = others.min_by(|(_, a), (_, b)| a.mean.total_cmp(&b.mean))?;
    let ours = whole(own)?;
    let values = |policy: &str| -> Vec<f64> {
        let metric = Metric::by_name(figure);
        let cell = runs.iter().filter(|run| run.policy == policy && run.traffic.load == own.load);
        cell.filter_map(|run| (metric?.value)(run)).collect()
    };
    let ratios: Vec<f64> = values(own.policy).iter().zip(values(best)).map(|(ours, theirs)| ours / theirs).collect();
    let ratio = SeedMean { mean: ours.mean / theirs.mean, ..SeedMean::of(&ratios)? };
    let holds = own.unserved == 0 && ratio.mean <= bound;
    Some(FigureVerdict { load: own.load, figure, best, theirs, ours, ratio, bound, holds })
}

fn is_baseline(policy: &str) -> bool {
    policy.parse::<PolicyKind>().is_ok_and(PolicyKind::is_baseline)
}

/// Returns one row per verdict after a header row.
pub fn verdict_table(verdicts: &[FigureVerdict]) -> Vec<Vec<String>> {
    let names = ["load", "figure", "best baseline", "best", "ownerserve", "ratio", "bound", "verdict"];
    let row = |verdict: &FigureVerdict| {
        let digits = Metric::by_name(verdict.figure).map_or(3, |metric| metric.digits);
        let unsure = if verdict.is_significant() == Some(false) { " (within confidence)" } else { "" };
        vec![
            verdict.load.to_string(),
            verdict.figure.to_owned(),
            verdict.best.to_owned(),
            verdict.theirs.format(digits),
            verdict.ours.format(digits),
            verdict.ratio.format(3),
            format!("{:.2}", verdict.bound),
            format!("{}{unsure}", verdict.label()),
        ]
    };
    std::iter::once(names.map(str::to_owned).to_vec()).chain(verdicts.iter().map(row)).collect()
}
