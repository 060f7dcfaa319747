//! What the seeds of one policy at one load come to.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use super::metrics::MetricVisibility;
use super::{Mean, Metric, PredictionQuality, RunFigures, TimeDistribution};
use crate::cache_strategy::CacheStrategy;

/// One policy at one load.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct PolicySummary {
    /// Who decided.
    pub policy: &'static str,
    /// Sessions at once, or the factor on the recorded rate.
    pub load: f64,
    /// How slower tiers are kept, where that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheStrategy>,
    /// How many seeds it was given.
    pub seeds: usize,
    /// Steps that were never served, of all seeds.
    pub unserved: usize,
    /// Every figure by its column's name; none where no seed had one.
    pub figures: BTreeMap<&'static str, Option<Mean>>,
    /// Share of its steps that each way of serving was taken for.
    pub actions: BTreeMap<&'static str, f64>,
    /// How well first tokens were foretold, by the way of serving and of `all`: sums of steps, means of the rest by steps.
    pub foretold: BTreeMap<&'static str, PredictionQuality>,
    /// p0 to p100 of the times to the first token, each the mean of the seeds'; empty where nothing was measured.
    pub first_token: Vec<f64>,
    /// The same of whole steps.
    pub step: Vec<f64>,
}

impl PolicySummary {
    /// A figure's mean over seeds.
    pub fn mean(&self, name: &str) -> Option<Mean> {
        self.figures.get(name).copied().flatten()
    }

    fn of(runs: &[&RunFigures]) -> Option<Self> {
        let first = runs.first()?;
        let figure = |metric: &Metric| {
            let values: Vec<f64> = runs.iter().filter_map(|run| (metric.value)(run)).collect();
            (metric.name, Mean::of(&values))
        };
        let mut actions = BTreeMap::new();
        let counted: usize = runs.iter().flat_map(|run| run.service.actions.values()).sum();
        for (action, count) in runs.iter().flat_map(|run| &run.service.actions) {
            *actions.entry(*action).or_default() += *count as f64 / counted.max(1) as f64;
        }
        Some(Self {
            policy: first.policy,
            load: first.traffic.load,
            cache: first.traffic.cache,
            seeds: runs.len(),
            unserved: runs.iter().map(|run| run.unserved).sum(),
            figures: Metric::ALL.iter().map(figure).collect(),
            actions,
            foretold: mean_predictions(runs),
            first_token: curve(runs, |run| &run.first_token),
            step: curve(runs, |run| &run.step),
        })
    }
}

/// Seeds with more steps of an action count more in it.
fn mean_predictions(runs: &[&RunFigures]) -> BTreeMap<&'static str, PredictionQuality> {
    let mut all: BTreeMap<&'static str, Vec<PredictionQuality>> = BTreeMap::new();
    for (name, one) in runs.iter().flat_map(|run| &run.service.foretold) {
        all.entry(*name).or_default().push(*one);
    }
    all.into_iter().map(|(name, seeds)| (name, PredictionQuality::mean(&seeds))).collect()
}

fn curve(runs: &[&RunFigures], times: fn(&RunFigures) -> &TimeDistribution) -> Vec<f64> {
    let curves: Vec<&Vec<f64>> = runs.iter().map(|run| &times(run).curve).filter(|curve| !curve.is_empty()).collect();
    let Some(points) = curves.first().map(|curve| curve.len()) else { return Vec::new() };
    let mean = |at: usize| curves.iter().map(|curve| curve[at]).sum::<f64>() / curves.len() as f64;
    (0..points).map(mean).collect()
}

/// Every policy at every load under each cache management, in the order in which they first ran.
pub fn summarize_policies(runs: &[RunFigures]) -> Vec<PolicySummary> {
    let mut groups: Vec<Vec<&RunFigures>> = Vec::new();
    let mut places = HashMap::new();
    for run in runs {
        let place = *places.entry((run.traffic.load.to_bits(), run.policy, run.traffic.cache)).or_insert_with(|| {
            groups.push(Vec::new());
            groups.len() - 1
        });
        groups[place].push(run);
    }
    groups.iter().filter_map(|runs| PolicySummary::of(runs)).collect()
}

/// One row a cell with what people look at first, below the columns' names. `-` where nothing was measured.
pub fn summary_table(cells: &[PolicySummary]) -> Vec<Vec<String>> {
    let shown: Vec<&Metric> =
        Metric::ALL.iter().filter(|metric| metric.visibility != MetricVisibility::InFiles).collect();
    rows(cells, &shown, of)
}

/// One row a cell with the confidence of each of these figures that has one, below the columns' names.
pub(super) fn with_confidence(cells: &[PolicySummary], names: &[&str]) -> Vec<Vec<String>> {
    let metrics: Vec<&Metric> = names.iter().filter_map(|name| Metric::by_name(name)).collect();
    rows(cells, &metrics, |metric, mean| mean.format(metric.digits))
}

fn rows(cells: &[PolicySummary], metrics: &[&Metric], said: fn(&Metric, Mean) -> String) -> Vec<Vec<String>> {
    let names = ["policy", "load"].into_iter().chain(metrics.iter().map(|metric| metric.name));
    let row = |cell: &PolicySummary| {
        let said = |metric: &&Metric| cell.mean(metric.name).map_or_else(|| "-".to_owned(), |mean| said(metric, mean));
        [cell.policy.to_owned(), cell.load.to_string()].into_iter().chain(metrics.iter().map(said)).collect()
    };
    std::iter::once(names.map(str::to_owned).collect()).chain(cells.iter().map(row)).collect()
}

fn of(metric: &Metric, mean: Mean) -> String {
    match metric.visibility {
        MetricVisibility::InTableWithConfidence => mean.format(metric.digits),
        MetricVisibility::InTable | MetricVisibility::InFiles => format!("{:.*}", metric.digits, mean.mean),
    }
}
