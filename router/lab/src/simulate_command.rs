//! `ownerserve simulate`: a trace against a fleet in virtual time, under as many policies and loads as one likes. Reads
//! the trace, shows how far it is, and writes the figures; what happens in between is the simulator's.

mod progress_meter;
mod report_files;
mod tier_variants;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::io::Write as _;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use clap::{Args, ValueEnum};
use simulator::policies::{PolicyKind, Stopwatch};
use simulator::report::{self, ReportSubject, SimulationReport};
use simulator::trace::{ArrivalProcess, ReplayLimits, SessionListError, Trace};
use simulator::{HardwareProfile, SetupError, Simulation, SimulationSetup, TierPolicy};
use vocabulary::{ByteCount, Micros, TimeSpan, Tokens};

use crate::ctl::{aligned, pretty};
use crate::trace_command::files::{self, TraceFilesError};
pub(crate) use progress_meter::ProgressMeter;
use report_files::{ReportFiles, ReportPathError};
use simulator::report::{DecisionLatency, TimeDistribution};
use tier_variants::{TierVariant, TierVariantError};
use vocabulary::flags;

/// Default number of concurrent sessions.
const DEFAULT_SESSIONS: usize = 24;

const LONG_HELP: &str = "\
ownerserve predicts the length of an answer from earlier answers, as routers do, because recordings lack the client's limit;
`--policy ablations` runs complete OwnerServe, and with one part removed or one input falsified: ownerserve_no_fetch etc.;
ownerserve_known_output_length is told the exact length of answers.
llm_d_cached_counts counts evictable cache as memory taken, as the simulation that the figures are compared with does; llm_d is
given what engines report.
pooled_memory and oracle are bounds, not policies: one cache for all workers, without interference.";

/// What the report's words mean, as `--help` ends.
fn figures_help() -> String {
    let rows = report::definitions().into_iter().map(|one| [format!("  {}", one.name), one.what.to_owned()]);
    format!("Figures (times are virtual):\n{}\n{LONG_HELP}", aligned(rows))
}

/// Replays a trace against a simulated fleet, under one policy after the other.
#[derive(Debug, Args)]
#[command(after_long_help = figures_help())]
pub struct SimulateArgs {
    /// A trace, or a folder of files of one, as `trace stats` takes it.
    trace: PathBuf,
    /// Routing policies; `all` for every policy and bound, `ablations` for complete OwnerServe and each of its ablations.
    /// Ablations and `llm_d_cached_counts` are in `all` only by name.
    #[arg(long, value_delimiter = ',', default_value = "all", value_parser = parse_policies)]
    policy: Vec<PolicySelection>,
    /// Sessions at once, at most those of the trace; or factors on the recorded rate, 0.001 to 1000000, where requests
    /// come at recorded times. When left out, 24 sessions, or all that there are if fewer; and the recorded rate.
    #[arg(long, value_delimiter = ',', allow_negative_numbers = true)]
    load: Vec<f64>,
    /// Workers.
    #[arg(long, default_value_t = 8)]
    workers: usize,
    /// What each of them is.
    #[arg(long, default_value = HardwareProfile::H100_8B.name, value_parser = spec)]
    profile: HardwareProfile,
    /// Tokens of KV in a worker's device memory, in place of the profile's.
    #[arg(long, value_name = "TOKENS")]
    device_tokens: Option<u64>,
    /// Tokens of KV in a worker's host tier.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    host_tokens: u64,
    /// Bandwidth per second from the host tier to the device, as 20GB; when left out, the profile's.
    #[arg(long, value_name = "SIZE", value_parser = flags::bandwidth)]
    host_bandwidth: Option<ByteCount>,
    /// Tokens of KV on a worker's disk, which takes what the host tier pushes out.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    disk_tokens: u64,
    /// Read bandwidth per second of a disk that does not write; when left out, 6GB.
    #[arg(long, value_name = "SIZE", value_parser = flags::bandwidth)]
    disk_read_bandwidth: Option<ByteCount>,
    /// Write bandwidth per second of a disk that does not read; when left out, 3GB.
    #[arg(long, value_name = "SIZE", value_parser = flags::bandwidth)]
    disk_write_bandwidth: Option<ByteCount>,
    /// What the model's layers keep: its `config.json`, or a file as `models.NAME.attention_file` takes it. Memory, links and
    /// tiers then hold and move this model's bytes; computing is as fast as the profile says. When left out, every token
    /// has KV of its own.
    #[arg(long, value_name = "FILE")]
    attention_file: Option<PathBuf>,
    /// Policy of the tiers below device memory: `none` has no such tiers, `lru` takes all that is evicted, `full`,
    /// `periodic:TOKENS` and `no_windows` say besides where windows are stored, `lowest_cost` stores and restores in the
    /// cheapest way. The last four need `--attention-file`. Each of several is simulated and compared in the report;
    /// verdicts and other plots are under the first. When left out, `lru`.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    tier_policy: Vec<TierPolicy>,
    /// Seeds, five or more for confidence: each is another order of the sessions or of the gaps between requests, and other choices of policies that
    /// leave some to chance.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    seeds: Vec<u64>,
    /// Replays only the sessions of this list, each id once and on a line of its own, in its order and at recorded times
    /// for every seed.
    #[arg(long, value_name = "FILE")]
    session_list: Option<PathBuf>,
    /// Leaves out steps whose prompt and answer are longer.
    #[arg(long, value_name = "TOKENS", default_value_t = ReplayLimits::default().max_context.0)]
    max_context_tokens: u64,
    /// Replays at most this number of steps of a session; a session with fewer than three is left out.
    #[arg(long, value_name = "N", default_value_t = ReplayLimits::default().max_steps, value_parser = parse_min_steps)]
    max_steps: usize,
    /// Shortens longer pauses to this duration.
    #[arg(long, value_name = "DURATION", default_value = "300s", value_parser = flags::duration)]
    max_pause: TimeSpan,
    /// Writes a page with plots, tables and definitions; the same as FILE.json and every run as FILE.csv beside it.
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// How the figures are written.
    #[arg(short, long, value_enum, default_value_t)]
    output: SimulationFormat,
}

/// What one word of `--policy` names.
#[derive(Clone, Debug)]
struct PolicySelection(Vec<PolicyKind>);

fn parse_policies(word: &str) -> Result<PolicySelection, simulator::policies::UnknownPolicy> {
    Ok(PolicySelection(match word {
        "all" => PolicyKind::ALL.to_vec(),
        "ablations" => PolicyKind::ablations().collect(),
        name => vec![PolicyKind::from_str(name)?],
    }))
}

#[derive(Debug, thiserror::Error)]
#[error("accepted: a whole number, {} or more: sessions with fewer steps are left out", ReplayLimits::default().min_steps)]
struct MinStepsArgError;

fn parse_min_steps(word: &str) -> Result<usize, MinStepsArgError> {
    word.parse().ok().filter(|steps| *steps >= ReplayLimits::default().min_steps).ok_or(MinStepsArgError)
}

/// A number that cannot be: what is accepted.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct OutOfRange(&'static str);

/// A number of this range, or else `accepted`.
pub(crate) fn parse_number(text: &str, range: RangeInclusive<f64>, accepted: &'static str) -> Result<f64, OutOfRange> {
    text.parse().ok().filter(|number| range.contains(number)).ok_or(OutOfRange(accepted))
}

#[derive(Debug, thiserror::Error)]
#[error("accepted: {}", HardwareProfile::ALL.map(|spec| spec.name).join(", "))]
struct UnknownProfile;

fn spec(name: &str) -> Result<HardwareProfile, UnknownProfile> {
    HardwareProfile::by_name(name).ok_or(UnknownProfile)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
enum SimulationFormat {
    /// For people.
    #[default]
    Table,
    /// For programs, every figure.
    Json,
    /// For spreadsheets, one row a run.
    Csv,
}

/// Why nothing was simulated.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum SimulateError {
    #[error(transparent)]
    Files(#[from] TraceFilesError),
    #[error("cannot read the list of sessions {path}: {source}")]
    List { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Listed(#[from] SessionListError),
    #[error("`{flag}` names {value} twice; accepted: each value once")]
    Duplicate { flag: &'static str, value: String },
    #[error(
        "nothing of {trace} is left within the limits: no step of at most {context} tokens (--max-context-tokens), or no \
         session with {least} of them; accepted: a larger --max-context-tokens, or another trace"
    )]
    EmptyTrace { trace: PathBuf, context: u64, least: usize },
    #[error("--load: {0}")]
    Load(SetupError),
    #[error(transparent)]
    Setup(SetupError),
    #[error(transparent)]
    TierVariant(#[from] TierVariantError),
    #[error(transparent)]
    Report(#[from] ReportPathError),
    #[error("cannot write the figures: {0}")]
    Output(#[from] std::io::Error),
}

impl From<SetupError> for SimulateError {
    /// Prefixes errors of the load with its flag.
    fn from(error: SetupError) -> Self {
        match error {
            SetupError::Load { .. } | SetupError::Span { .. } => Self::Load(error),
            SetupError::Workers { .. } | SetupError::TooLong { .. } | SetupError::Empty => Self::Setup(error),
        }
    }
}

/// Runs the simulations and writes their report.
pub fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    // What cannot be written is known before the first run: it costs no figures.
    let inputs = args.input_paths();
    let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
    let files = args.report.as_ref().map(|page| ReportFiles::new(page, &inputs)).transpose()?;
    let report = args.simulate(files::load(&args.trace)?)?;
    let text = match args.output {
        SimulationFormat::Table => report_text(&report),
        SimulationFormat::Csv => report::csv(&report.runs),
        SimulationFormat::Json => pretty(&report),
    };
    if args.output == SimulationFormat::Csv {
        report.notes.iter().try_for_each(|note| writeln!(std::io::stderr().lock(), "note: {note}"))?;
    }
    // First what needs no disk: hours of runs are not lost with a folder.
    std::io::stdout().lock().write_all(text.as_bytes())?;
    Ok(files.map_or(Ok(()), |files| files.write(&report))?)
}

/// The table, the verdicts and what must be known of them.
fn report_text(report: &SimulationReport) -> String {
    let mut text = aligned(report::summary_table(&report.cells));
    for (title, table) in [
        ("", report::verdict_table(&report.verdicts)),
        ("by tier policy:\n", report::tier_policy_table(&report.tier_policies)),
        ("by ownerserve whole:\n", report::ablation_table(&report.ablations)),
    ] {
        if table.len() > 1 {
            text += &format!("\n{title}{}", aligned(table));
        }
    }
    for note in &report.notes {
        text += &format!("\nnote: {note}");
    }
    text + if report.notes.is_empty() { "" } else { "\n" }
}

impl SimulateArgs {
    fn limits(&self) -> ReplayLimits {
        ReplayLimits {
            max_context: Tokens(self.max_context_tokens),
            max_steps: self.max_steps,
            max_pause: Micros(self.max_pause.0.as_micros() as u64),
            ..ReplayLimits::default()
        }
    }

    /// What is read, and must not be written.
    fn input_paths(&self) -> Vec<PathBuf> {
        [Some(files::resolve(&self.trace)), self.session_list.clone(), self.attention_file.clone()]
            .into_iter()
            .flatten()
            .collect()
    }

    fn simulate(&self, trace: Trace) -> Result<SimulationReport, SimulateError> {
        self.check()?;
        let list = self.session_list.as_ref().map(|path| {
            std::fs::read_to_string(path).map_err(|source| SimulateError::List { path: path.clone(), source })
        });
        let list = list.transpose()?;
        let trace = trace.apply_limits(&self.limits());
        if trace.sessions.is_empty() {
            let (trace, least) = (self.trace.clone(), self.limits().min_steps);
            return Err(SimulateError::EmptyTrace { trace, context: self.max_context_tokens, least });
        }
        let trace = match &list {
            Some(ids) => trace.in_order(ids)?,
            None => trace,
        };
        let variants =
            tier_variants::tier_variants((self.attention_file.as_ref(), &self.tier_policy), self.spec(), &trace)?;
        let cells = variants.iter().map(|variant| self.cells(&variant.spec, &trace)).collect::<Result<Vec<_>, _>>()?;
        let mut progress = ProgressMeter::new(cells.iter().map(Vec::len).sum::<usize>() * self.seeds.len());
        // Only reports tell of this machine: everything else is equal wherever it runs.
        let (mut figures, clock) = (Vec::new(), DecisionStopwatch::default());
        for seed in &self.seeds {
            let trace = if list.is_some() { trace.clone() } else { trace.clone().shuffled(*seed) };
            for (variant, cells) in variants.iter().zip(&cells) {
                let trace = variant.apply_model(&trace);
                for (kind, setup) in cells {
                    let mut world = world(variant, (&trace, *kind), SimulationSetup { seed: *seed, ..*setup })?;
                    if self.report.is_some() {
                        clock.set_policy(kind.as_str());
                        world = world.with_stopwatch(&clock);
                    }
                    progress.begin(&format!("{} at {} with seed {seed}", kind.as_str(), setup.load));
                    figures.push(world.run(&mut |over, all| progress.show(over, all)));
                }
            }
        }
        progress.end();
        let fleet = variants.first().map_or_else(|| self.spec(), |variant| variant.spec);
        let subject = ReportSubject::new(self.trace.display().to_string(), &trace, (self.workers, &fleet));
        let notes = trace.notes.into_iter().chain(variants.iter().filter_map(TierVariant::note)).collect();
        Ok(SimulationReport { planning: clock.planning_times(), ..SimulationReport::of(subject, notes, figures) })
    }

    /// A load or seed that is given twice would count twice, and narrow the confidence interval.
    fn check(&self) -> Result<(), SimulateError> {
        let loads = self.load.iter().map(f64::to_string).collect();
        let seeds = self.seeds.iter().map(u64::to_string).collect();
        let policies = self.policy_kinds().map(|kind| kind.as_str().to_owned()).collect();
        let tiers = self.tier_policy.iter().map(TierPolicy::to_string).collect();
        let all = [("--load", loads), ("--seeds", seeds), ("--policy", policies), ("--tier-policy", tiers)];
        all.into_iter().try_for_each(check_unique)
    }

    fn policy_kinds(&self) -> impl Iterator<Item = PolicyKind> {
        self.policy.iter().flat_map(|policies| policies.0.iter().copied())
    }

    fn spec(&self) -> HardwareProfile {
        let mut spec = self.profile;
        let sizes = &mut spec.sizes;
        (sizes.host, sizes.disk) = (Tokens(self.host_tokens), Tokens(self.disk_tokens));
        sizes.device = self.device_tokens.map_or(sizes.device, Tokens);
        let tokens = |bandwidth: ByteCount| bandwidth.0 as f64 / spec.kv_bytes as f64;
        for (speed, told) in [
            (&mut sizes.host_tokens_per_second, self.host_bandwidth),
            (&mut sizes.disk_speed.read, self.disk_read_bandwidth),
            (&mut sizes.disk_speed.write, self.disk_write_bandwidth),
        ] {
            *speed = told.map_or(*speed, tokens);
        }
        spec
    }

    /// Returns the given loads, or a default that every trace supports.
    fn loads(&self, trace: &Trace) -> Vec<f64> {
        match (self.load.as_slice(), trace.arrivals) {
            ([], ArrivalProcess::AfterDependencies) => vec![trace.sessions.len().min(DEFAULT_SESSIONS) as f64],
            ([], ArrivalProcess::Recorded) => vec![1.0],
            (named, _) => named.to_vec(),
        }
    }

    /// What runs for every seed. All of it is checked before the first run: the last one's mistake costs no figures.
    fn cells(&self, spec: &HardwareProfile, trace: &Trace) -> Result<Vec<(PolicyKind, SimulationSetup)>, SetupError> {
        let mut cells = Vec::new();
        for load in self.loads(trace) {
            for kind in self.policy_kinds() {
                let setup = SimulationSetup { workers: self.workers, spec: *spec, load, seed: 0 };
                setup.check(trace, kind)?;
                cells.push((kind, setup));
            }
        }
        Ok(cells)
    }
}

fn world<'a>(
    variant: &TierVariant,
    (trace, kind): (&'a Trace, PolicyKind),
    setup: SimulationSetup,
) -> Result<Simulation<'a>, SetupError> {
    let world = Simulation::new(trace, kind, setup)?.with_tier_policy(variant.policy);
    Ok(match &variant.model {
        Some(model) => world.with_model(model),
        None => world,
    })
}

fn check_unique((flag, values): (&'static str, Vec<String>)) -> Result<(), SimulateError> {
    let mut seen = HashSet::new();
    match values.into_iter().find(|value| !seen.insert(value.clone())) {
        Some(value) => Err(SimulateError::Duplicate { flag, value }),
        None => Ok(()),
    }
}

/// A stopwatch for one policy after the other.
#[derive(Default)]
struct DecisionStopwatch {
    policy: Cell<&'static str>,
    started: Cell<Option<Instant>>,
    /// Microseconds of each decision, by policy.
    durations: RefCell<HashMap<&'static str, Vec<f64>>>,
}

impl DecisionStopwatch {
    fn set_policy(&self, policy: &'static str) {
        self.policy.set(policy);
    }

    /// What each policy took, in the order of its name.
    fn planning_times(self) -> Vec<DecisionLatency> {
        let durations = self.durations.into_inner().into_iter();
        let mut all: Vec<DecisionLatency> = durations
            .map(|(policy, micros)| DecisionLatency { policy, micros: TimeDistribution::of(micros) })
            .collect();
        all.sort_by_key(|one| one.policy);
        all
    }
}

impl Stopwatch for DecisionStopwatch {
    fn start(&self) {
        self.started.set(Some(Instant::now()));
    }

    fn stop(&self) {
        if let Some(begun) = self.started.take() {
            let micros = begun.elapsed().as_secs_f64() * 1e6;
            self.durations.borrow_mut().entry(self.policy.get()).or_default().push(micros);
        }
    }
}

#[cfg(test)]
mod tests;
