//! `ownerserve what-if`: a decision log through the planner again, under another policy or in another fleet; of a log of
//! mode `shadow`, what the planner would have saved. Reads files and writes to the terminal.

mod compare;
mod estimate;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use planner::Policy;
use serde::Serialize;
use vocabulary::WorkerId;

use crate::ctl::{OutputFormat, WorkerArg, aligned, field_list, pretty, row};
use crate::simulate_command::{OutOfRange, ProgressMeter, parse_number};
use compare::{ComparisonBuilder, ModeCounts, ReproductionCounts, WhatIfComparison, WhatIfScenario};
use proxy::decisions::{DecisionRecords, DecisionRecordsError};

const NOTE: &str = "\
Every figure but those under OBSERVED TTFT is a prediction by the cost model: the time to first token as its terms queue,
compute, network and restore have it. A step is asked about as it was met: what another choice would have changed for
later steps, as who holds what and how long queues are, is not in it; `simulate` replays that.";

/// Asks the planner again what a decision log was decided on, and compares.
#[derive(Debug, Args)]
#[command(after_help = NOTE)]
pub struct WhatIfArgs {
    /// A router's data directory, its folder `decisions`, or one file of it.
    log: PathBuf,
    /// Takes the policy from section [planner] of this file in place of the recorded one.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Changes one value of the policy, for example planner.interference_weight=1. Goes over the file; may be repeated.
    #[arg(long = "set", value_name = "PATH=VALUE")]
    settings: Vec<String>,
    /// A fleet without this worker, by id or URL; may be repeated.
    #[arg(long, value_name = "WORKER")]
    exclude_worker: Vec<WorkerArg>,
    /// Workers that compute prompts faster by this factor, 0.01 to 100.
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    prefill_speedup: Option<f64>,
    /// Links that are faster by this factor, 0.01 to 100.
    #[arg(long, value_name = "FACTOR", value_parser = factor)]
    link_speedup: Option<f64>,
    /// How the figures are written.
    #[arg(short, long, value_enum, default_value_t)]
    output: OutputFormat,
}

/// Workers that a message lists.
const MAX_NAMED_WORKERS: usize = 20;

fn factor(text: &str) -> Result<f64, OutOfRange> {
    parse_number(text, 0.01..=100.0, "accepted is a number from 0.01 to 100")
}

/// Reads a policy: of this file, else the given one, with these settings on top.
pub(crate) type PolicyReader = fn(&Policy, Option<&Path>, &[String]) -> Result<Policy, PolicyError>;

/// Why a policy was refused.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct PolicyError(pub Box<dyn std::error::Error + Send + Sync>);

/// Why nothing was compared.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum WhatIfError {
    #[error(transparent)]
    Records(#[from] DecisionRecordsError),
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error("--set {0}: only values of the policy change what is planned; accepted are paths that begin with planner.")]
    NotThePolicy(String),
    #[error("--exclude-worker {worker}: no decision of this log knew it; accepted: {known}")]
    UnknownWorker { worker: WorkerId, known: String },
    #[error("cannot write the figures: {0}")]
    Output(#[from] std::io::Error),
}

#[derive(Serialize)]
struct WhatIfReport<'a> {
    /// Every figure but those of `ttft_prediction.*.observed_ms`.
    marked_as: &'static str,
    files: usize,
    #[serde(flatten)]
    comparison: &'a WhatIfComparison,
    /// What was left out.
    notes: Vec<String>,
}

/// Plans the steps of the log again and writes the comparison. `read_policy` reads the other policy.
pub fn run(args: &WhatIfArgs, read_policy: PolicyReader) -> Result<(), WhatIfError> {
    if let Some(other) = args.settings.iter().find(|setting| !setting.trim_start().starts_with("planner.")) {
        return Err(WhatIfError::NotThePolicy(other.clone()));
    }
    let mut records = DecisionRecords::open(&args.log)?;
    let files = records.count;
    let mut progress = ProgressMeter::new(files);
    let mut comparing = ComparisonBuilder::default();
    while let Some(entries) = records.next_file() {
        progress.begin("files of the log");
        let entries = entries?;
        // All of a file were decided by one policy, others perhaps by another.
        let Some(first) = entries.first() else { continue };
        let change = args.change(&first.head.policy, read_policy)?;
        entries.into_iter().for_each(|entry| comparing.add(entry, &change));
    }
    progress.end();
    args.check_workers(comparing.workers())?;
    let (comparison, notes) =
        (comparing.finish(), simulator::trace::truncation_note(&records.truncated).into_iter().collect::<Vec<_>>());
    let text = match args.output {
        OutputFormat::Table => {
            let notes = notes.iter().map(|note| format!("\nnote: {note}\n")).collect::<String>();
            comparison_text(&comparison, files) + &notes
        }
        OutputFormat::Json => pretty(&WhatIfReport { marked_as: "prediction", files, comparison: &comparison, notes }),
    };
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

impl WhatIfArgs {
    /// Rejects excluded workers that the log does not know: excluding them would change nothing.
    fn check_workers(&self, workers: &BTreeMap<WorkerId, Arc<str>>) -> Result<(), WhatIfError> {
        let unknown = self.exclude_worker.iter().find(|worker| !workers.contains_key(&worker.0));
        let known = || workers.values().take(MAX_NAMED_WORKERS).map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
        unknown.map_or(Ok(()), |worker| Err(WhatIfError::UnknownWorker { worker: worker.0, known: known() }))
    }

    /// Settings alone go over the recorded policy.
    fn change(&self, recorded: &Policy, read_policy: PolicyReader) -> Result<WhatIfScenario, PolicyError> {
        let is_changed = self.config.is_some() || !self.settings.is_empty();
        let other = || read_policy(recorded, self.config.as_deref().map(Path::new), &self.settings);
        Ok(WhatIfScenario {
            policy: is_changed.then(other).transpose()?,
            removed_workers: self.exclude_worker.iter().map(|worker| worker.0).collect(),
            prefill_speedup: self.prefill_speedup,
            link_speedup: self.link_speedup,
        })
    }
}

fn comparison_text(comparison: &WhatIfComparison, files: usize) -> String {
    let ModeCounts { active, shadow, bypass } = comparison.modes;
    let (all, compared) = (active + shadow + bypass, comparison.compared);
    let mut text = field_list([
        ("decisions", format!("{all} in {files} files: active {active}, shadow {shadow}, bypass {bypass}")),
        ("compared", format!("{compared} steps of {} sessions", comparison.sessions)),
        ("replayed", replay_text(comparison)),
        ("unservable", format!("{} steps", comparison.unservable)),
    ]);
    let (Some(served), Some(planned)) = (&comparison.as_served, &comparison.what_if) else {
        return text
            + "\nNothing could be compared: no record holds what the planner was asked and how it was served.\n";
    };
    let line = |name: &str, of: &dyn Fn(&compare::PlanTotals) -> String| row([name, &of(served), &of(planned)]);
    text.push('\n');
    text += &aligned([
        row(["PREDICTED", "AS SERVED", "WHAT IF"]),
        line("TTFT, mean", &|totals| format!("{:.1}ms", totals.ttft_mean_ms)),
        line("TTFT, p50", &|totals| format!("{:.1}ms", totals.ttft_p50_ms)),
        line("TTFT, p99", &|totals| format!("{:.1}ms", totals.ttft_p99_ms)),
        line("computed prompt tokens", &|totals| totals.computed_tokens.to_string()),
        line("KV transfers", &|totals| format!("{:.1}MiB", totals.kv_transfer_bytes as f64 / f64::from(1 << 20))),
    ]);
    text += &format!("\n{} of {} steps would have another plan. ", comparison.changed_plans, compared);
    text += &savings_text(comparison, served.ttft_mean_ms);
    text.push_str("\n\n");
    let actions = comparison.actions.iter();
    let actions =
        actions.map(|(action, [served, planned])| row([action.as_str(), &served.to_string(), &planned.to_string()]));
    text += &aligned(std::iter::once(row(["ACTION", "AS SERVED", "WHAT IF"])).chain(actions));
    if !comparison.ttft_prediction.is_empty() {
        text.push('\n');
        text += &prediction_table(comparison);
    }
    text
}

fn replay_text(comparison: &WhatIfComparison) -> String {
    let ReproductionCounts { reproduced, unreproduced, without_memory } = comparison.replayed;
    let all = reproduced + unreproduced;
    let without = match without_memory {
        0 => String::new(),
        some => format!(
            "; {some} are of a router that did not log whose KV a step pushes out, and are planned without that"
        ),
    };
    format!("{reproduced} of {all} give the recorded plan under the recorded policy{without}")
}

fn savings_text(comparison: &WhatIfComparison, before: f64) -> String {
    let Some(saved) = comparison.predicted_ttft_saving_ms else { return String::new() };
    let share = if before > 0.0 { format!(" ({:.1} %)", 100.0 * saved.mean / before) } else { String::new() };
    let within = saved.within.map_or_else(
        || "without a confidence interval, since there is one session only".to_owned(),
        |within| format!("95 % confidence {:.2} to {:.2}", saved.mean - within, saved.mean + within),
    );
    format!("Prediction: the time to first token is {:.2} ms{share} shorter, {within}.", saved.mean)
}

fn prediction_table(comparison: &WhatIfComparison) -> String {
    let mut rows = vec![row(["AS SERVED", "STEPS", "PREDICTED TTFT", "OBSERVED TTFT", "MEDIAN ERROR", "BIAS"])];
    for (action, one) in &comparison.ttft_prediction {
        rows.push(row([
            action.as_str(),
            &one.steps.to_string(),
            &format!("{:.1}ms", one.predicted_ms),
            &format!("{:.1}ms", one.observed_ms),
            &format!("{:.0} %", 100.0 * one.error),
            &format!("{:+.0} %", 100.0 * one.bias),
        ]));
    }
    aligned(rows)
}

#[cfg(test)]
mod tests;
