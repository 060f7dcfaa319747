//! Result of one policy, as a table and as the JSON of `--report`. Pure.

use std::collections::BTreeMap;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use serde::Serialize;

use super::ComparedPolicy;
use super::measure::{MetricsScrape, mean_ms, percentile_ms};
use super::session::FinishedStep;
use crate::ctl::pretty;

/// Figures of one policy as written by `--report`; the demo's help defines them.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct PolicyStats {
    pub requests: usize,
    pub errors: usize,
    pub ttft_p50_ms: f64,
    pub ttft_p99_ms: f64,
    pub step_latency_mean_ms: f64,
    pub step_latency_p99_ms: f64,
    pub computed_prompt_tokens: u64,
    pub owner_hit_rate: f64,
    pub duplicate_factor: f64,
    pub kv_transfer_bytes: u64,
    pub actions: BTreeMap<String, u64>,
}

/// All measurements of one run.
pub(super) struct RunMeasurements<'a> {
    /// Steps as measured at the client.
    pub steps: &'a [FinishedStep],
    /// The workers' metrics at the end. Workers are restarted for each run, so counters start at 0.
    pub workers: &'a [MetricsScrape],
    /// The router's metrics at the end.
    pub router: &'a MetricsScrape,
    /// KV bytes per token.
    pub kv_bytes_per_token: u64,
}

impl RunMeasurements<'_> {
    pub(super) fn figures(&self) -> PolicyStats {
        let served = || self.steps.iter().filter_map(|step| step.outcome.as_ref().ok());
        let first_tokens: Vec<_> = served().map(|served| served.first_token).collect();
        let whole: Vec<_> = served().map(|served| served.total).collect();
        let tokens = |source| {
            let of = |page: &MetricsScrape| page.sum("vllm:prompt_tokens_by_source_total", &[("source", source)]);
            self.workers.iter().map(of).sum::<f64>() as u64
        };
        PolicyStats {
            requests: self.steps.len(),
            errors: self.steps.iter().filter(|step| step.outcome.is_err()).count(),
            ttft_p50_ms: percentile_ms(&first_tokens, 0.5),
            ttft_p99_ms: percentile_ms(&first_tokens, 0.99),
            step_latency_mean_ms: mean_ms(&whole),
            step_latency_p99_ms: percentile_ms(&whole, 0.99),
            computed_prompt_tokens: tokens("local_compute"),
            owner_hit_rate: owner_hit_rate(self.steps),
            duplicate_factor: duplicate_factor(self.router),
            kv_transfer_bytes: tokens("external_kv_transfer") * self.kv_bytes_per_token,
            actions: actions(self.router),
        }
    }
}

/// Executed actions by the router's counters.
pub(super) fn actions(router: &MetricsScrape) -> BTreeMap<String, u64> {
    let counts = router.by("ownerserve_plan_actions_total", "action");
    counts.into_iter().map(|(action, count)| (action, count as u64)).filter(|(_, count)| *count > 0).collect()
}

/// Resident blocks divided by distinct ones, from the router's residency index, which the workers' KV events feed
/// under every policy.
pub(super) fn duplicate_factor(router: &MetricsScrape) -> f64 {
    let resident_blocks = router.sum("ownerserve_residency_blocks", &[]);
    let distinct = router.sum("ownerserve_residency_distinct_blocks", &[]);
    if distinct > 0.0 { rounded(resident_blocks / distinct) } else { 0.0 }
}

/// Share of follow-up steps served by the worker of the session's previous step, among those whose previous worker is
/// known; 0 without any.
pub(super) fn owner_hit_rate(steps: &[FinishedStep]) -> f64 {
    let mut at: BTreeMap<(usize, usize), Option<&str>> = BTreeMap::new();
    for step in steps {
        let worker = step.outcome.as_ref().ok().and_then(|served| served.worker.as_deref());
        at.insert((step.session, step.turn), worker);
    }
    let owner = |(session, turn): (usize, usize)| at.get(&(session, turn.checked_sub(1)?)).copied().flatten();
    let pairs: Vec<_> = at.iter().filter_map(|(step, worker)| Some((owner(*step)?, (*worker)?))).collect();
    let hits = pairs.iter().filter(|(owner, worker)| owner == worker).count();
    if pairs.is_empty() { 0.0 } else { rounded(hits as f64 / pairs.len() as f64) }
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

/// Results of all policies, in the order of their runs.
#[derive(Default)]
pub(super) struct PolicyComparison {
    runs: Vec<(ComparedPolicy, PolicyStats)>,
}

impl PolicyComparison {
    pub(super) fn add(&mut self, policy: ComparedPolicy, figures: PolicyStats) {
        self.runs.push((policy, figures));
    }

    /// Returns whether any step of any run failed.
    pub(super) fn has_errors(&self) -> bool {
        self.runs.iter().any(|(_, figures)| figures.errors > 0)
    }

    /// Returns the JSON of `--report`.
    pub(super) fn json(&self) -> String {
        let policies: BTreeMap<&str, _> = self.runs.iter().map(|(policy, figures)| (policy.into(), figures)).collect();
        pretty(&BTreeMap::from([("policies", policies)]))
    }

    /// Returns the final table: one row per figure, one column per policy.
    pub(super) fn table(&self) -> Vec<String> {
        let row = |name: &str, cell: &dyn Fn(&(ComparedPolicy, PolicyStats)) -> String| {
            std::iter::once(name.to_owned()).chain(self.runs.iter().map(cell)).collect::<Vec<_>>()
        };
        let mut table = Table::new();
        table.load_style(NOTHING).add_rows([
            row("", &|(policy, _)| policy.to_string()),
            row("requests", &|(_, run)| run.requests.to_string()),
            row("errors", &|(_, run)| run.errors.to_string()),
            row("TTFT p50", &|(_, run)| format!("{:.1} ms", run.ttft_p50_ms)),
            row("TTFT p99", &|(_, run)| format!("{:.1} ms", run.ttft_p99_ms)),
            row("step latency mean", &|(_, run)| format!("{:.1} ms", run.step_latency_mean_ms)),
            row("step latency p99", &|(_, run)| format!("{:.1} ms", run.step_latency_p99_ms)),
            row("computed prompt tokens", &|(_, run)| run.computed_prompt_tokens.to_string()),
            row("owner hit rate", &|(_, run)| format!("{:.1} %", run.owner_hit_rate * 100.0)),
            row("duplicate factor", &|(_, run)| format!("{:.2}", run.duplicate_factor)),
            row("KV transfers", &|(_, run)| format!("{:.1} MiB", run.kv_transfer_bytes as f64 / f64::from(1 << 20))),
        ]);
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let mix = |(policy, run): &(ComparedPolicy, PolicyStats)| {
            format!("actions of {policy}: {}", action_mix(&run.actions))
        };
        table.lines().chain([String::new()]).chain(self.runs.iter().map(mix)).collect()
    }
}

/// Formats the actions, most frequent first.
pub(super) fn action_mix(actions: &BTreeMap<String, u64>) -> String {
    let mut mix: Vec<_> = actions.iter().collect();
    mix.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let words: Vec<_> = mix.iter().map(|(action, count)| format!("{action} {count}")).collect();
    if words.is_empty() { "none".into() } else { words.join(" · ") }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
