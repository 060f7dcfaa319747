//! `ownerserve validate-sim`: validates the simulator. Replays one trace against the simulated fleet and against the live
//! proxy with simulated workers, and compares the two.

mod live_replay;
mod report;

use std::convert::Infallible;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use clap::Args;
use futures::future::try_join_all;
use simulator::policies::{Ablation, PolicyKind};
use simulator::report::RunStats;
use simulator::trace::{ReplayLimits, Trace};
use simulator::{HardwareProfile, SetupError, Simulation, SimulationSetup};
use vocabulary::{Micros, TimeSpan, Tokens, WorkerRole};
use workers_shim::sim::EngineProfile;

use crate::ctl::pretty;
use crate::demo::ComparedPolicy;
use crate::demo::local_cluster::{LocalCluster, LocalClusterError, LocalClusterOptions};
use crate::demo::measure::MetricsScrape;
use crate::simulate_command::ProgressMeter;
use crate::trace_command::files::{self, TraceFilesError};
use live_replay::{LiveMeasurements, LiveReplay};
use report::ValidationReport;
use vocabulary::flags;

/// Engine profile of the workers, embedded so that the command runs from anywhere.
const PROFILE: &str = include_str!("../../../configs/profiles/validate-sim.toml");

/// Interval between two progress updates.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(500);

const LONG_HELP: &str = "\
The simulated fleet and the live one have the same workers, sessions, pauses and lengths; prompts are token ids, so that
their blocks are equal where the trace's are. Live workers, links and speeds are learnt by the router as always; the
simulated planner is told them, and answers' lengths, which live clients limit. In both, what a worker is to send waits
for its turn there, and no transfer is checked afterwards: the first one over each link would be, by computing it again.
Aims: mean times to first token within 10 %, each action's share of the steps within 5 points. It takes real time, some three
minutes as it is, and this machine's own load is in the live figures: how much of the time to first token was outside of the engines
is told apart, and --slowdown makes it less. Who meets whom in a queue is chance, and one order of the sessions says little:
times to first token are means over several repetitions, each with another order.";

/// Validates the simulator: replays a trace in virtual time and against the live proxy with simulated workers.
#[derive(Debug, Args)]
#[command(after_long_help = LONG_HELP)]
pub struct ValidateSimArgs {
    /// A trace of sessions, as `simulate` takes it.
    trace: PathBuf,
    /// Workers.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=16))]
    workers: u8,
    /// Concurrent sessions.
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u8).range(1..=64))]
    concurrency: u8,
    /// Sessions in all.
    #[arg(long, default_value_t = 18, value_parser = clap::value_parser!(u16).range(1..=1000))]
    sessions: u16,
    /// Maximum number of steps of a session.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u16).range(3..=1000))]
    max_steps: u16,
    /// Leaves out steps whose prompt and answer are longer.
    #[arg(long, value_name = "TOKENS", default_value_t = 48_000, value_parser = clap::value_parser!(u64).range(1_000..=64_000))]
    max_context_tokens: u64,
    /// Shortens longer pauses to this duration.
    #[arg(long, value_name = "DURATION", default_value = "3s",
        value_parser = |text: &str| flags::duration_within(text, TimeSpan::seconds(0)..=TimeSpan::seconds(60)))]
    max_pause: TimeSpan,
    /// Slows the live engines and their sessions by this factor, so that the overhead of the proxy and this machine weighs
    /// less.
    #[arg(long, value_name = "FACTOR", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=4))]
    slowdown: u8,
    /// Seed of the first repetition; the others have the seeds after it.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(..=u64::from(u32::MAX)))]
    seed: u64,
    /// Repetitions, each with another order of the sessions and a cluster of its own, all at once.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    repetitions: u8,
    /// Writes the figures here, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// One order of the sessions, and the simulated fleet's result.
struct SimulatedRun {
    seed: u64,
    trace: Arc<Trace>,
    figures: RunStats,
}

/// A simulated run and the live run of the same order.
struct PairedRun {
    simulation: SimulatedRun,
    live: LiveMeasurements,
    router: MetricsScrape,
    workers: Vec<MetricsScrape>,
}

/// Errors of the validation.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum ValidateSimError {
    #[error(transparent)]
    Files(#[from] TraceFilesError),
    #[error(
        "{trace} has {left} sessions with steps of at most {max_context_tokens} tokens, fewer than the {concurrency} concurrent \
         ones; accepted: a smaller --concurrency, a larger --max-context-tokens, or another trace of sessions"
    )]
    TooFew { trace: PathBuf, left: usize, max_context_tokens: u64, concurrency: u8 },
    #[error("the requests of {0} come at recorded times; accepted: a trace of sessions")]
    NoSessions(PathBuf),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error(transparent)]
    Cluster(#[from] LocalClusterError),
    #[error("{failed} of {steps} live steps failed, the first one so: {first}")]
    Failed { failed: usize, steps: usize, first: String },
    #[error("a process did not answer with its metrics at the end; try again while this machine is less busy")]
    NoMetrics,
    #[error("cannot write {path}: {source}")]
    Report { path: PathBuf, source: std::io::Error },
    #[error("cannot write the figures: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the traces against real routers and in the simulator, and writes the comparison.
pub async fn run(args: &ValidateSimArgs) -> Result<(), ValidateSimError> {
    if let Some(path) = &args.report {
        // Fails now rather than after minutes.
        let opened = std::fs::OpenOptions::new().create(true).append(true).open(path);
        opened.map_err(|source| ValidateSimError::Report { path: path.clone(), source })?;
    }
    let trace = args.traffic()?;
    let orders: Result<Vec<_>, ValidateSimError> = args.seeds().map(|seed| args.simulate(&trace, seed)).collect();
    let compared = ValidationReport::of(&args.replay_live(orders?).await?, args.slowdown.into());
    std::io::stdout().lock().write_all(compared.table().as_bytes())?;
    let Some(path) = &args.report else { return Ok(()) };
    std::fs::write(path, pretty(&compared)).map_err(|source| ValidateSimError::Report { path: path.clone(), source })
}

fn profile() -> EngineProfile {
    toml::from_str(PROFILE).expect("the profile that is compiled in was tested")
}

impl ValidateSimArgs {
    fn seeds(&self) -> impl Iterator<Item = u64> + use<> {
        (self.seed..).take(self.repetitions.into())
    }

    /// Returns the steps to replay. Resent responses are not reused: the recorded agent's responses differ from those
    /// of simulated workers.
    fn traffic(&self) -> Result<Trace, ValidateSimError> {
        let limits = ReplayLimits {
            max_context: Tokens(self.max_context_tokens),
            max_steps: self.max_steps.into(),
            max_pause: Micros(self.max_pause.0.as_micros() as u64),
            ..ReplayLimits::default()
        };
        let trace = files::load(&self.trace)?;
        if trace.arrivals == simulator::trace::ArrivalProcess::Recorded {
            return Err(ValidateSimError::NoSessions(self.trace.clone()));
        }
        let mut trace = trace.apply_limits(&limits);
        let left = trace.sessions.len();
        if left < usize::from(self.concurrency) {
            return Err(ValidateSimError::TooFew {
                trace: self.trace.clone(),
                left,
                max_context_tokens: self.max_context_tokens,
                concurrency: self.concurrency,
            });
        }
        trace.sessions.iter_mut().flat_map(|session| &mut session.steps).for_each(|step| step.resent_path = None);
        Ok(trace)
    }

    /// Simulates the first sessions of one order.
    fn simulate(&self, trace: &Trace, seed: u64) -> Result<SimulatedRun, ValidateSimError> {
        let mut trace = trace.clone().shuffled(seed);
        trace.sessions.truncate(self.sessions.into());
        let spec = HardwareProfile::from_profile("validate_sim", &profile());
        let setup = SimulationSetup { workers: self.workers.into(), spec, load: f64::from(self.concurrency), seed };
        let figures =
            Simulation::new(&trace, PolicyKind::Ablated(Ablation::KnownOutputLength), setup)?.run(&mut |_, _| {});
        Ok(SimulatedRun { seed, trace: Arc::new(trace), figures })
    }

    /// Replays all orders concurrently, each with a cluster of its own.
    async fn replay_live(&self, orders: Vec<SimulatedRun>) -> Result<Vec<PairedRun>, ValidateSimError> {
        let (all, over) = (orders.iter().map(|order| order.trace.steps().count()).sum(), Arc::default());
        let mut clusters = Vec::new();
        for _ in &orders {
            clusters.push(LocalCluster::start(self.cluster_options()).await?);
        }
        let lives = orders.into_iter().zip(clusters).map(|(order, cluster)| self.replay(order, cluster, &over));
        let mut progress = ProgressMeter::new(1);
        progress.begin("live");
        let both = tokio::select! {
            both = try_join_all(lives) => both,
            never = show_progress(&progress, &over, all) => match never {},
        };
        progress.end();
        both
    }

    fn cluster_options(&self) -> LocalClusterOptions {
        LocalClusterOptions {
            roles: vec![WorkerRole::Hybrid; self.workers.into()],
            profile: PROFILE,
            policy: ComparedPolicy::Ownerserve,
            settings: &["transfer_check.sample_every=0"],
            speed_up: 1.0 / f64::from(self.slowdown),
        }
    }

    async fn replay(
        &self,
        order: SimulatedRun,
        mut cluster: LocalCluster,
        over: &Arc<AtomicUsize>,
    ) -> Result<PairedRun, ValidateSimError> {
        let pace = (self.concurrency.into(), self.slowdown.into());
        let live = LiveReplay::new(order.trace.clone(), pace, (cluster.proxy, over.clone()));
        let replayed = live.replay(&mut cluster).await;
        let (router, workers) = (cluster.scrape_router().await, cluster.scrape_workers().await);
        cluster.stop().await;
        replayed?;
        if router.is_empty() || workers.iter().any(MetricsScrape::is_empty) {
            return Err(ValidateSimError::NoMetrics);
        }
        let seen = live.measurements();
        match seen.errors.first() {
            Some(first) => {
                Err(ValidateSimError::Failed { failed: seen.errors.len(), steps: seen.steps, first: first.clone() })
            }
            None => Ok(PairedRun { simulation: order, live: seen, router, workers }),
        }
    }
}

/// Shows the progress until it is dropped.
async fn show_progress(progress: &ProgressMeter, over: &AtomicUsize, all: usize) -> Infallible {
    let mut look = tokio::time::interval(PROGRESS_INTERVAL);
    loop {
        look.tick().await;
        progress.show(over.load(Ordering::Relaxed), all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_profile_is_a_valid_engine() {
        profile().check().unwrap();
    }
}
