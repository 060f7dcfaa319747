//! What each part of OwnerServe is worth: its figures without the part, by its figures whole.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Mean, Metric, PolicySummary, RunFigures};
use crate::policies::{Ablation, PolicyKind};

/// How a ratio comes about, in words.
pub(super) const ABLATION: &str = "OwnerServe without one part, or told something wrong, by OwnerServe whole at the same load: above \
    1 the part is worth something; ± is the 95 % confidence of the ratios of single seeds";

const FIGURES: [&str; 7] =
    ["ttft_mean_s", "ttft_p95_s", "step_mean_s", "session_mean_s", "prefill_mtok", "moved_gb", "duplicates"];

/// OwnerServe without one part, at one load.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct AblationResult {
    /// Sessions at once, or the factor on the recorded rate.
    pub load: f64,
    /// Its name as a policy.
    pub policy: &'static str,
    /// What is gone or wrong.
    pub what: &'static str,
    /// By figure, its value by that of OwnerServe whole; none where either has none, or the whole one has zero.
    pub ratios: BTreeMap<&'static str, Option<Mean>>,
}

/// One of every ablation that ran beside OwnerServe whole, by load.
pub fn ablations(runs: &[RunFigures], cells: &[PolicySummary]) -> Vec<AblationResult> {
    let ran = |load: f64, policy: &str| cells.iter().any(|cell| cell.load == load && cell.policy == policy);
    let whole = cells.iter().filter(|cell| cell.policy == PolicyKind::OwnerServe.as_str());
    let worth = |load: f64, ablation: Ablation| {
        let ratio = |name: &&'static str| (*name, ratio(runs, load, (ablation.as_str(), name)));
        let ratios = FIGURES.iter().map(ratio).collect();
        AblationResult { load, policy: ablation.as_str(), what: ablation.description(), ratios }
    };
    whole
        .flat_map(|cell| Ablation::ALL.iter().map(|ablation| (cell.load, *ablation)))
        .filter(|(load, ablation)| ran(*load, ablation.as_str()))
        .map(|(load, ablation)| worth(load, ablation))
        .collect()
}

/// The mean over seeds of what a policy's figure is by that of OwnerServe whole.
fn ratio(runs: &[RunFigures], load: f64, (policy, figure): (&str, &str)) -> Option<Mean> {
    let metric = Metric::by_name(figure)?;
    let of = |run: &&RunFigures, policy: &str| run.policy == policy && run.traffic.load == load;
    let whole = PolicyKind::OwnerServe.as_str();
    let ratio = |run: &RunFigures| {
        let seed = run.traffic.seed;
        let whole = runs.iter().find(|other| of(other, whole) && other.traffic.seed == seed)?;
        let whole = (metric.value)(whole).filter(|value| *value > 0.0)?;
        Some((metric.value)(run)? / whole)
    };
    let ratios: Vec<f64> = runs.iter().filter(|run| of(run, policy)).filter_map(ratio).collect();
    Mean::of(&ratios)
}

/// One row an ablation, below the columns' names; `-` where there is no ratio.
pub fn ablation_table(ablations: &[AblationResult]) -> Vec<Vec<String>> {
    let names = ["ablation", "load"].into_iter().chain(FIGURES).map(str::to_owned).collect();
    let row = |worth: &AblationResult| {
        let said =
            |figure: &&str| worth.ratios.get(*figure).copied().flatten().map_or("-".to_owned(), |mean| mean.format(3));
        [worth.policy.to_owned(), worth.load.to_string()].into_iter().chain(FIGURES.iter().map(said)).collect()
    };
    std::iter::once(names).chain(ablations.iter().map(row)).collect()
}
