//! OwnerServe beside the best baseline of each load: it may be slower than that by so much and no more.

use serde::Serialize;

use super::{Mean, Metric, PolicySummary, RunFigures};
use crate::policies::PolicyKind;

/// How a verdict comes about, in words.
pub(super) const VERDICT: &str = "at each load, OwnerServe's mean over seeds by that of the baseline that is best at this very \
    figure; ± is the 95 % confidence of the ratios of single seeds, which both served the same traffic. PASS: the ratio is \
    within the bound. A baseline that left steps unserved is not the best; OwnerServe with unserved steps is SHORT. The \
    bounds `pooled_memory` and `oracle` are no baselines";

/// What OwnerServe is held to, and by how much it may exceed the best baseline.
const BOUNDS: [(&str, f64); 3] = [("step_mean_s", 1.03), ("session_mean_s", 1.03), ("ttft_p95_s", 1.10)];

/// OwnerServe at one load, by one figure.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct BaselineVerdict {
    /// Sessions at once, or the factor on the recorded rate.
    pub load: f64,
    /// Which figure.
    pub figure: &'static str,
    /// The best baseline by it.
    pub best: &'static str,
    /// What that has.
    pub theirs: Mean,
    /// What OwnerServe has.
    pub ours: Mean,
    /// OwnerServe's by the best's.
    pub ratio: Mean,
    /// What the ratio may be.
    pub bound: f64,
    /// Whether it is that.
    pub holds: bool,
}

impl BaselineVerdict {
    /// `PASS` or `SHORT`.
    pub fn label(&self) -> &'static str {
        if self.holds { "PASS" } else { "SHORT" }
    }

    /// Whether the confidence interval lies on one side of the bound; none of one seed.
    pub fn is_significant(&self) -> Option<bool> {
        self.ratio.confidence.map(|confidence| (self.ratio.mean - self.bound).abs() > confidence)
    }
}

/// Every load's verdicts; none where OwnerServe or every baseline is missing.
pub fn verdicts(runs: &[RunFigures], cells: &[PolicySummary]) -> Vec<BaselineVerdict> {
    let own = PolicyKind::OwnerServe.as_str();
    let ours = cells.iter().filter(|cell| cell.policy == own);
    ours.flat_map(|ours| BOUNDS.iter().filter_map(|bound| verdict(runs, (cells, ours), *bound))).collect()
}

fn verdict(
    runs: &[RunFigures],
    (cells, own): (&[PolicySummary], &PolicySummary),
    (figure, bound): (&'static str, f64),
) -> Option<BaselineVerdict> {
    let complete = |cell: &&PolicySummary| cell.load == own.load && cell.unserved == 0 && is_baseline(cell.policy);
    // A seed without a value would make a mean of other traffic.
    let whole = |cell: &PolicySummary| cell.mean(figure).filter(|mean| mean.seeds == cell.seeds);
    let others = cells.iter().filter(complete).filter_map(|cell| Some((cell.policy, whole(cell)?)));
    let (best, theirs) = others.min_by(|(_, a), (_, b)| a.mean.total_cmp(&b.mean))?;
    let ours = whole(own)?;
    let values = |policy: &str| -> Vec<f64> {
        let metric = Metric::by_name(figure);
        let cell = runs.iter().filter(|run| run.policy == policy && run.traffic.load == own.load);
        cell.filter_map(|run| (metric?.value)(run)).collect()
    };
    let ratios: Vec<f64> = values(own.policy).iter().zip(values(best)).map(|(ours, theirs)| ours / theirs).collect();
    let ratio = Mean { mean: ours.mean / theirs.mean, ..Mean::of(&ratios)? };
    let holds = own.unserved == 0 && ratio.mean <= bound;
    Some(BaselineVerdict { load: own.load, figure, best, theirs, ours, ratio, bound, holds })
}

fn is_baseline(policy: &str) -> bool {
    policy.parse::<PolicyKind>().is_ok_and(PolicyKind::is_baseline)
}

/// One row a verdict, below the columns' names.
pub fn verdict_table(verdicts: &[BaselineVerdict]) -> Vec<Vec<String>> {
    let names = ["load", "figure", "best baseline", "best", "ownerserve", "ratio", "bound", "verdict"];
    let row = |verdict: &BaselineVerdict| {
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
