//! Worth of each part of OwnerServe: figures without the part, divided by those of complete OwnerServe.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Metric, PolicySummary, RunStats, SeedMean};
use crate::policies::{Ablation, PolicyKind};

/// Definition of the ratio, as text.
pub(super) const ABLATION: &str = "OwnerServe without one part, or told something wrong, by OwnerServe whole at the same load: above \
    1 the part is worth something; ± is the 95 % confidence of the ratios of single seeds";

const FIGURES: [&str; 7] = [
    "ttft_mean_s",
    "ttft_p95_s",
    "step_mean_s",
    "session_mean_s",
    "prefill_mtok",
    "transferred_gb",
    "duplicate_factor",
];

/// Result of one ablation at one load.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct AblationResult {
    /// Concurrent sessions, or the factor on the recorded rate.
    pub load: f64,
    /// Policy name of the ablation.
    pub policy: &'static str,
    /// Description of what is removed or wrong.
    pub what: &'static str,
    /// Ratio of each figure to that of complete OwnerServe; none if either is missing or the latter is zero.
    pub ratios: BTreeMap<&'static str, Option<SeedMean>>,
}

/// Returns one result per ablation and load that ran together with complete OwnerServe.
pub fn ablations(runs: &[RunStats], cells: &[PolicySummary]) -> Vec<AblationResult> {
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

/// Returns the mean over seeds of the ratio of a policy's figure to OwnerServe's.
fn ratio(runs: &[RunStats], load: f64, (policy, figure): (&str, &str)) -> Option<SeedMean> {
    let metric = Metric::by_name(figure)?;
    let of = |run: &&RunStats, policy: &str| run.policy == policy && run.traffic.load == load;
    let whole = PolicyKind::OwnerServe.as_str();
    let ratio = |run: &RunStats| {
        let seed = run.traffic.seed;
        let whole = runs.iter().find(|other| of(other, whole) && other.traffic.seed == seed)?;
        let whole = (metric.value)(whole).filter(|value| *value > 0.0)?;
        Some((metric.value)(run)? / whole)
    };
    let ratios: Vec<f64> = runs.iter().filter(|run| of(run, policy)).filter_map(ratio).collect();
    SeedMean::of(&ratios)
}

/// Returns one row per ablation after a header row; `-` if there is no ratio.
pub fn ablation_table(ablations: &[AblationResult]) -> Vec<Vec<String>> {
    let names = ["ablation", "load"].into_iter().chain(FIGURES).map(str::to_owned).collect();
    let row = |worth: &AblationResult| {
        let ratio_text =
            |figure: &&str| worth.ratios.get(*figure).copied().flatten().map_or("-".to_owned(), |mean| mean.format(3));
        [worth.policy.to_owned(), worth.load.to_string()].into_iter().chain(FIGURES.iter().map(ratio_text)).collect()
    };
    std::iter::once(names).chain(ablations.iter().map(row)).collect()
}
