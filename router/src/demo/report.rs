//! What one policy came to, as a table and as `--report`'s JSON. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    measure::{Page, mean_ms, percentile_ms},
    policy::Policy,
    session::Step,
};

/// The figures of one policy; as `--report` writes them.
#[derive(Serialize, Clone, PartialEq, Debug)]
pub(super) struct Figures {
    /// Steps that were sent.
    pub requests: usize,
    /// Those that did not end in a whole answer.
    pub errors: usize,
    /// Median time from sending a step to its first text, at the client.
    pub first_token_p50_ms: f64,
    /// The 99th percentile of the same.
    pub first_token_p99_ms: f64,
    /// Mean time from sending a step to its last byte, at the client: what the planner makes short.
    pub step_mean_ms: f64,
    /// The 99th percentile of the same.
    pub step_p99_ms: f64,
    /// Prompt tokens that workers computed: the sum of their `vllm:prompt_tokens_by_source_total{source="local_compute"}`.
    pub prefill_tokens: u64,
    /// Of the steps that continue a session, the share answered by its owner: the worker that answered the step before.
    pub owner_hit_rate: f64,
    /// KV blocks resident at the end, summed over workers, by those that are distinct; 1 means that nothing lies twice.
    pub duplicate_factor: f64,
    /// KV that came from other workers: `source="external_kv_transfer"` tokens times the profile's
    /// `kv_bytes_per_token`.
    pub kv_bytes_moved: u64,
    /// How often each way of serving was chosen.
    pub actions: BTreeMap<String, u64>,
}

/// Everything measured in one run.
pub(super) struct Measured<'a> {
    /// At the client.
    pub steps: &'a [Step],
    /// The workers' pages at the end; workers are fresh, so counters are the run's own.
    pub workers: &'a [Page],
    /// The router's page at the end.
    pub router: &'a Page,
    /// What a token of KV weighs.
    pub kv_bytes_per_token: u64,
}

impl Measured<'_> {
    /// The figures of the run.
    pub(super) fn figures(&self) -> Figures {
        let served = || self.steps.iter().filter_map(|step| step.outcome.as_ref().ok());
        let first_tokens: Vec<_> = served().map(|served| served.first_token).collect();
        let whole: Vec<_> = served().map(|served| served.whole).collect();
        let tokens = |source| {
            let of = |page: &Page| page.sum("vllm:prompt_tokens_by_source_total", &[("source", source)]);
            self.workers.iter().map(of).sum::<f64>() as u64
        };
        Figures {
            requests: self.steps.len(),
            errors: self.steps.iter().filter(|step| step.outcome.is_err()).count(),
            first_token_p50_ms: percentile_ms(&first_tokens, 0.5),
            first_token_p99_ms: percentile_ms(&first_tokens, 0.99),
            step_mean_ms: mean_ms(&whole),
            step_p99_ms: percentile_ms(&whole, 0.99),
            prefill_tokens: tokens("local_compute"),
            owner_hit_rate: owner_hit_rate(self.steps),
            duplicate_factor: duplicate_factor(self.router),
            kv_bytes_moved: tokens("external_kv_transfer") * self.kv_bytes_per_token,
            actions: actions(self.router),
        }
    }
}

/// The router's count of chosen actions.
pub(super) fn actions(router: &Page) -> BTreeMap<String, u64> {
    let counts = router.by("ownerserve_plan_actions_total", "action");
    counts.into_iter().map(|(action, count)| (action, count as u64)).filter(|(_, count)| *count > 0).collect()
}

/// From the router's residency index, which the workers' own KV events feed under every policy.
pub(super) fn duplicate_factor(router: &Page) -> f64 {
    let held = router.sum("ownerserve_residency_blocks", &[]);
    let distinct = router.sum("ownerserve_residency_distinct_blocks", &[]);
    if distinct > 0.0 { rounded(held / distinct) } else { 0.0 }
}

/// Follow-up steps answered by the worker of the session's step before, by all follow-up steps whose predecessor is
/// known; 0 without any.
pub(super) fn owner_hit_rate(steps: &[Step]) -> f64 {
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

/// All policies that ran, in the order they ran.
#[derive(Default)]
pub(super) struct Report {
    runs: Vec<(Policy, Figures)>,
}

#[derive(Serialize)]
struct Document<'a> {
    policies: BTreeMap<&'static str, &'a Figures>,
}

impl Report {
    /// Adds one run.
    pub(super) fn add(&mut self, policy: Policy, figures: Figures) {
        self.runs.push((policy, figures));
    }

    /// Whether any step of any run failed.
    pub(super) fn has_errors(&self) -> bool {
        self.runs.iter().any(|(_, figures)| figures.errors > 0)
    }

    /// The JSON of `--report`.
    pub(super) fn json(&self) -> String {
        let policies = self.runs.iter().map(|(policy, figures)| (policy.as_str(), figures)).collect();
        serde_json::to_string_pretty(&Document { policies }).expect("figures are plain numbers and words") + "\n"
    }

    /// The table at the end: one row a figure, one column a policy.
    pub(super) fn table(&self) -> Vec<String> {
        let mut rows = vec![vec![String::new()], vec!["requests".into()], vec!["errors".into()]];
        let timings = ["first token p50", "first token p99", "step mean", "step p99"];
        let work = ["prefill tokens", "owner hits", "duplicate factor", "KV moved"];
        rows.extend(timings.into_iter().chain(work).map(|label| vec![label.into()]));
        for (policy, figures) in &self.runs {
            for (row, cell) in rows.iter_mut().zip(column(*policy, figures)) {
                row.push(cell);
            }
        }
        let line = |row: &Vec<String>| {
            let cells: String = row[1..].iter().map(|cell| format!("{cell:>18}")).collect();
            format!("{:<18}{cells}", row[0])
        };
        let mut lines: Vec<_> = rows.iter().map(line).collect();
        lines.push(String::new());
        for (policy, figures) in &self.runs {
            lines.push(format!("actions of {policy}: {}", action_mix(&figures.actions)));
        }
        lines
    }
}

fn column(policy: Policy, figures: &Figures) -> [String; 11] {
    [
        policy.to_string(),
        figures.requests.to_string(),
        figures.errors.to_string(),
        format!("{:.1} ms", figures.first_token_p50_ms),
        format!("{:.1} ms", figures.first_token_p99_ms),
        format!("{:.1} ms", figures.step_mean_ms),
        format!("{:.1} ms", figures.step_p99_ms),
        figures.prefill_tokens.to_string(),
        format!("{:.1} %", figures.owner_hit_rate * 100.0),
        format!("{:.2}", figures.duplicate_factor),
        format!("{:.1} MiB", figures.kv_bytes_moved as f64 / f64::from(1 << 20)),
    ]
}

/// The most frequent action first.
pub(super) fn action_mix(actions: &BTreeMap<String, u64>) -> String {
    let mut mix: Vec<_> = actions.iter().collect();
    mix.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
    let words: Vec<_> = mix.iter().map(|(action, count)| format!("{action} {count}")).collect();
    if words.is_empty() { "none".into() } else { words.join(" · ") }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
