//! Summary over seeds of one policy at one load.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::metrics::MetricVisibility;
use super::{Metric, PredictionQuality, RunStats, SeedMean, TimeDistribution};
use crate::tier_policy::TierPolicy;

/// Summary of one policy at one load.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct PolicySummary {
    /// Name of the policy.
    pub policy: &'static str,
    /// Concurrent sessions, or the factor on the recorded rate.
    pub load: f64,
    /// Tier policy, if one was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tier_policy: Option<TierPolicy>,
    /// Number of seeds.
    pub seeds: usize,
    /// Steps that were never served, over all seeds.
    pub unserved: usize,
    /// Figures by column name; none if no seed had a value.
    pub figures: BTreeMap<&'static str, Option<SeedMean>>,
    /// Share of steps by action.
    pub actions: BTreeMap<&'static str, f64>,
    /// Prediction quality of the time to first token, by action and for `all`: steps are summed, the rest is averaged
    /// by steps.
    pub ttft_prediction: BTreeMap<&'static str, PredictionQuality>,
    /// Percentiles p0 to p100 of the time to first token, each averaged over seeds; empty if nothing was measured.
    pub ttft: Vec<f64>,
    /// The same percentiles of step time.
    pub step: Vec<f64>,
}

impl PolicySummary {
    /// Returns the mean of a figure over seeds.
    pub fn mean(&self, name: &str) -> Option<SeedMean> {
        self.figures.get(name).copied().flatten()
    }

    fn of(runs: &[&RunStats]) -> Option<Self> {
        let first = runs.first()?;
        let figure = |metric: &Metric| {
            let values: Vec<f64> = runs.iter().filter_map(|run| (metric.value)(run)).collect();
            (metric.name, SeedMean::of(&values))
        };
        let mut actions = BTreeMap::new();
        let counted: usize = runs.iter().flat_map(|run| run.service.actions.values()).sum();
        for (action, count) in runs.iter().flat_map(|run| &run.service.actions) {
            *actions.entry(*action).or_default() += *count as f64 / counted.max(1) as f64;
        }
        Some(Self {
            policy: first.policy,
            load: first.traffic.load,
            tier_policy: first.traffic.tier_policy,
            seeds: runs.len(),
            unserved: runs.iter().map(|run| run.unserved).sum(),
            figures: Metric::ALL.iter().map(figure).collect(),
            actions,
            ttft_prediction: mean_predictions(runs),
            ttft: curve(runs, |run| &run.ttft),
            step: curve(runs, |run| &run.step),
        })
    }
}

/// Averages over seeds, weighted by the number of steps of each action.
fn mean_predictions(runs: &[&RunStats]) -> BTreeMap<&'static str, PredictionQuality> {
    let mut all: BTreeMap<&'static str, Vec<PredictionQuality>> = BTreeMap::new();
    for (name, one) in runs.iter().flat_map(|run| &run.service.ttft_prediction) {
        all.entry(*name).or_default().push(*one);
    }
    all.into_iter().map(|(name, seeds)| (name, PredictionQuality::mean(&seeds))).collect()
}

fn curve(runs: &[&RunStats], times: fn(&RunStats) -> &TimeDistribution) -> Vec<f64> {
    let curves: Vec<&Vec<f64>> = runs.iter().map(|run| &times(run).curve).filter(|curve| !curve.is_empty()).collect();
    let Some(points) = curves.first().map(|curve| curve.len()) else { return Vec::new() };
    let mean = |at: usize| curves.iter().map(|curve| curve[at]).sum::<f64>() / curves.len() as f64;
    (0..points).map(mean).collect()
}

/// Returns the summary of every policy at every load and tier policy, in the order in which they first ran.
pub fn summarize_policies(runs: &[RunStats]) -> Vec<PolicySummary> {
    let mut groups: Vec<Vec<&RunStats>> = Vec::new();
    let mut places = HashMap::new();
    for run in runs {
        let place =
            *places.entry((run.traffic.load.to_bits(), run.policy, run.traffic.tier_policy)).or_insert_with(|| {
                groups.push(Vec::new());
                groups.len() - 1
            });
        groups[place].push(run);
    }
    groups.iter().filter_map(|runs| PolicySummary::of(runs)).collect()
}

/// Returns one row per cell with the main figures, after a header row; `-` if nothing was measured.
pub fn summary_table(cells: &[PolicySummary]) -> Vec<Vec<String>> {
    let shown: Vec<&Metric> =
        Metric::ALL.iter().filter(|metric| metric.visibility != MetricVisibility::Files).collect();
    rows(cells, &shown, of)
}

/// Returns one row per cell with these figures and their confidence, after a header row.
pub(super) fn with_confidence(cells: &[PolicySummary], names: &[&str]) -> Vec<Vec<String>> {
    let metrics: Vec<&Metric> = names.iter().filter_map(|name| Metric::by_name(name)).collect();
    rows(cells, &metrics, |metric, mean| mean.format(metric.digits))
}

fn rows(
    cells: &[PolicySummary],
    metrics: &[&Metric],
    format_mean: fn(&Metric, SeedMean) -> String,
) -> Vec<Vec<String>> {
    let names = ["policy", "load"].into_iter().chain(metrics.iter().map(|metric| metric.name));
    let row = |summary: &PolicySummary| {
        let cell_text = |metric: &&Metric| {
            summary.mean(metric.name).map_or_else(|| "-".to_owned(), |mean| format_mean(metric, mean))
        };
        [summary.policy.to_owned(), summary.load.to_string()].into_iter().chain(metrics.iter().map(cell_text)).collect()
    };
    std::iter::once(names.map(str::to_owned).collect()).chain(cells.iter().map(row)).collect()
}

fn of(metric: &Metric, mean: SeedMean) -> String {
    match metric.visibility {
        MetricVisibility::TableWithConfidence => mean.format(metric.digits),
        MetricVisibility::Table | MetricVisibility::Files => format!("{:.*}", metric.digits, mean.mean),
    }
}

/// Figures that tier policies are compared by.
const TIER_POLICY_FIGURES: [&str; 13] = [
    "ttft_mean_s",
    "ttft_p95_s",
    "step_mean_s",
    "session_mean_s",
    "prefill_mtok",
    "recomputed_mtok",
    "restored_mtok",
    "restore_host_s",
    "restore_disk_s",
    "disk_written_gb",
    "disk_read_gb",
    "write_amplification",
    "hbm_session_capacity",
];

/// Returns one row per cell after a header row; `-` if nothing was measured.
pub fn tier_policy_table(cells: &[PolicySummary]) -> Vec<Vec<String>> {
    let cache = |summary: &PolicySummary| summary.tier_policy.map_or_else(|| "-".to_owned(), |cache| cache.to_string());
    let caches = std::iter::once("tier_policy".to_owned()).chain(cells.iter().map(cache));
    caches.zip(with_confidence(cells, &TIER_POLICY_FIGURES)).map(|(cache, row)| [vec![cache], row].concat()).collect()
}
