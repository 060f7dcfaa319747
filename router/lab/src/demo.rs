//! `ownerserve demo`: replays recorded agent sessions against a real cluster of processes, under three policies.
//!
//! All traffic is real HTTP to child processes of this binary; nothing is measured in-process. Listens on loopback
//! only and leaves nothing running.

mod child_process;
pub(crate) mod client;
mod corpus;
mod live_view;
pub(crate) mod local_cluster;
pub(crate) mod measure;
mod report;
mod session;
mod think_time;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use strum::VariantArray as _;

pub use child_process::exit_with_parent;

use client::ProxyClientError;
use corpus::{CorpusError, RecordedDialogue};
use live_view::{LiveView, RunDescription, RunSnapshot};
use local_cluster::{LocalCluster, LocalClusterError, LocalClusterOptions};
use report::{PolicyComparison, PolicyStats, RunMeasurements};
use session::{FinishedStep, ReplayProgress, ReplaySetup};
use think_time::ThinkTimeModel;

use crate::simulate_command::{OutOfRange, parse_number};
use proxy::shutdown_signal::wait_for_signal;

/// Maximum number of step errors shown at the end of a run.
const MAX_SHOWN_ERRORS: usize = 5;
/// Wait after the last response for the workers' last events to reach the router's index.
const SETTLE_TIME: Duration = Duration::from_millis(500);

const FIGURES_HELP: &str = "\
Figures of --report, for each policy:
  requests                steps that were sent, one for each recorded assistant turn
  errors                  those that did not end in a whole answer
  ttft_p50_ms             median time from sending a step to its first text, real time, at the client
  ttft_p99_ms             99th percentile of the same
  step_latency_mean_ms    mean time from sending a step to its last byte
  step_latency_p99_ms     99th percentile of the same
  computed_prompt_tokens  prompt tokens that workers computed: the sum of their
                          vllm:prompt_tokens_by_source_total{source=\"local_compute\"}
  owner_hit_rate          of the steps that continue a session, the share answered by its last owner, which is
                          the worker that answered the step before (simulated workers name themselves)
  duplicate_factor        KV blocks resident at the end, summed over workers, by the distinct ones among them,
                          as the workers' KV events tell the router's index; 1: no block is resident twice
  kv_transfer_bytes       source=\"external_kv_transfer\" tokens of all workers times the KV bytes of a token
  actions                 how often each action was executed

The workers are fresh for each policy. Sessions, think times and answer lengths are the same; round-robin and
session pinning use decode and hybrid workers only. With --speed-up all times shrink, the reported ones too.";

/// Watch real agent sessions being served by ownership, next to round-robin and session pinning.
#[derive(clap::Args, Clone, Debug)]
#[command(after_long_help = FIGURES_HELP)]
pub struct DemoArgs {
    /// How many recorded sessions to replay under each policy.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub sessions: u16,
    /// The most sessions at once.
    #[arg(long, default_value_t = 48, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub concurrency: u16,
    /// How many times faster than the modelled engines the simulated ones run; think times shrink with it.
    #[arg(long, default_value_t = 1.0, value_parser = factor)]
    pub speed_up: f64,
    /// Multiplies the synthetic think times.
    #[arg(long, default_value_t = 1.0, value_parser = scale)]
    pub think_scale: f64,
    /// Seed of the think times.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Writes the figures of all policies here, as JSON.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Replays another corpus: a file or folder of tau_bench (.json.gz) or lmcache (.jsonl.gz) recordings.
    #[arg(long, value_name = "FILE|DIR")]
    pub corpus: Option<PathBuf>,
    /// Which policies to compare, in this order.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = ComparedPolicy::VARIANTS.iter().copied())]
    pub policies: Vec<ComparedPolicy>,
    /// Keeps the last cluster serving until ctrl-c.
    #[arg(long)]
    pub keep_running: bool,
}

fn factor(text: &str) -> Result<f64, OutOfRange> {
    parse_number(text, 0.01..=1000.0, "a number from 0.01 to 1000 is accepted")
}

fn scale(text: &str) -> Result<f64, OutOfRange> {
    parse_number(text, 0.0..=1000.0, "a number from 0 to 1000 is accepted")
}

/// Errors of the demo.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    /// There are no sessions to replay.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// The cluster failed.
    #[error(transparent)]
    Cluster(#[from] LocalClusterError),
    /// The report cannot be written.
    #[error("cannot write the report {0}: {1}")]
    Report(PathBuf, #[source] std::io::Error),
}

/// Runs the demo. The exit status is 1 if any step or the cluster failed, 130 after ctrl-c.
pub async fn run(options: DemoArgs) -> ExitCode {
    let mut view = LiveView::new();
    // Dropping the unfinished run kills its children.
    let performed = tokio::select! {
        performed = run_policies(&options, &mut view) => performed,
        () = wait_for_signal() => return ExitCode::from(130),
    };
    match performed {
        Ok(report) if report.has_errors() => ExitCode::FAILURE,
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            view.print_lines(&[format!("demo: {error}")]);
            ExitCode::FAILURE
        }
    }
}

async fn run_policies(options: &DemoArgs, view: &mut LiveView) -> Result<PolicyComparison, DemoError> {
    let began = Instant::now();
    if let Some(path) = &options.report {
        // Fails now rather than after a minute.
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
        opened.map_err(|source| DemoError::Report(path.clone(), source))?;
    }
    let mut dialogues = corpus::load(options.corpus.as_deref())?;
    dialogues.truncate(options.sessions.into());
    let dialogues = Arc::new(dialogues);
    let mut report = PolicyComparison::default();
    let mut previous: Option<LocalCluster> = None;
    for policy in &options.policies {
        if let Some(cluster) = previous.take() {
            cluster.stop().await;
        }
        // Workers are restarted so that no policy inherits another's cache.
        let cluster = previous.insert(LocalCluster::start(LocalClusterOptions::demo(*policy, options.speed_up)).await?);
        let run = PolicyReplay { options, policy: *policy, dialogues: dialogues.clone() };
        report.add(*policy, run.run_on(cluster, view).await?);
    }
    let seconds = began.elapsed().as_secs_f64();
    view.print_lines(&[report.table(), vec![format!("\n{seconds:.1} s in all")]].concat());
    if let Some(path) = &options.report {
        let written = std::fs::write(path, report.json());
        written.map_err(|source| DemoError::Report(path.clone(), source))?;
    }
    if let Some(cluster) = previous {
        if options.keep_running {
            keep_serving(&cluster, view).await;
        }
        cluster.stop().await;
    }
    Ok(report)
}

/// A run under one policy.
struct PolicyReplay<'a> {
    options: &'a DemoArgs,
    policy: ComparedPolicy,
    dialogues: Arc<Vec<RecordedDialogue>>,
}

impl PolicyReplay<'_> {
    /// Replays every session on `cluster` and returns the figures.
    async fn run_on(&self, cluster: &mut LocalCluster, view: &mut LiveView) -> Result<PolicyStats, LocalClusterError> {
        let tally = Arc::new(Mutex::new(ReplayProgress::default()));
        let scale = self.options.think_scale / self.options.speed_up;
        let mut sessions = std::pin::pin!(session::replay(ReplaySetup {
            dialogues: self.dialogues.clone(),
            tempo: ThinkTimeModel { seed: self.options.seed, scale },
            proxy: cluster.proxy,
            concurrency: self.options.concurrency.into(),
            tally: tally.clone(),
        }));
        let stage = RunDescription { policy: self.policy, sessions: self.dialogues.len(), workers: cluster.roles() };
        let began = Instant::now();
        let mut redraw = tokio::time::interval(live_view::REDRAW_INTERVAL);
        redraw.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = &mut sessions => break,
                _ = redraw.tick() => {}
            }
            if let Some(error) = cluster.exited_child() {
                return Err(error);
            }
            let router = cluster.scrape_router().await;
            view.show(&RunSnapshot { run: &stage, elapsed: began.elapsed(), progress: &tally.lock(), router: &router });
        }
        tokio::time::sleep(SETTLE_TIME).await;
        let (router, workers) = (cluster.scrape_router().await, cluster.scrape_workers().await);
        let tally = tally.lock();
        let moment = RunSnapshot { run: &stage, elapsed: began.elapsed(), progress: &tally, router: &router };
        view.print_lines(&[vec![moment.line()], failures(&tally)].concat());
        let kv_bytes_per_token = local_cluster::profile().kv_size_per_token.0;
        Ok(RunMeasurements { steps: &tally.steps, workers: &workers, router: &router, kv_bytes_per_token }.figures())
    }
}

/// Returns the first errors of a run, each with its step.
fn failures(tally: &ReplayProgress) -> Vec<String> {
    let failed = tally.steps.iter().filter_map(|step| Some((step, step.outcome.as_ref().err()?)));
    let line = |(step, error): (&FinishedStep, &ProxyClientError)| {
        format!("  session {} step {}: {error}", step.session, step.turn)
    };
    failed.take(MAX_SHOWN_ERRORS).map(line).collect()
}

async fn keep_serving(cluster: &LocalCluster, view: &mut LiveView) {
    view.print_lines(&[
        format!("still serving: http://{}/v1/chat/completions, model tiny", cluster.proxy),
        format!("operator API:  http://{}/ownerserve/v1/workers, /metrics", cluster.operator),
        "ctrl-c ends it".to_owned(),
    ]);
    std::future::pending().await
}

/// Who decides where a step goes, in the order in which they run.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum, strum::Display, strum::IntoStaticStr, strum::VariantArray,
)]
#[value(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum ComparedPolicy {
    /// One worker after the other, decode and hybrid ones; each computes what it lacks.
    RoundRobin,
    /// A session stays where its first step went.
    SessionPinning,
    /// The planner and the ledger.
    Ownerserve,
}

impl ComparedPolicy {
    /// Settings for `serve`, in the syntax of `--set`.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            ComparedPolicy::RoundRobin => &["routing.mode=bypass", "routing.fallback_policy=round_robin"],
            ComparedPolicy::SessionPinning => &["routing.mode=bypass", "routing.fallback_policy=session_pinning"],
            ComparedPolicy::Ownerserve => &["routing.mode=active"],
        }
    }
}

#[cfg(test)]
#[path = "demo/tests.rs"]
mod tests;
