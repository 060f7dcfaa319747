//! `ownerserve simulate`: a trace against a fleet in virtual time, under as many policies and loads as one likes. Reads
//! the trace, shows how far it is, and writes the figures; what happens in between is the simulator's.

mod progress;

use std::io::Write as _;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::Serialize;
use simulator::policies::PolicyKind;
use simulator::report::{self, Figures};
use simulator::trace::{Limits, Trace, UnknownSession};
use simulator::{Setup, SetupError, Spec, World};
use vocabulary::{Micros, Tokens};

use crate::ctl::aligned;
use crate::trace_command::files::{self, FilesError};
pub(crate) use progress::Progress;

const FIGURES: &str = "\
Figures (times are virtual; those of steps count while as many sessions run as were asked for):
  ttft            from a step's arrival to its first token; small: of steps that add at most 1,024 tokens
  step, session   from a step's arrival to the end of its answer; the sum of that over a session's steps
  prefill_mtok    millions of prompt tokens that were computed
  hit             share of prompt tokens found in the memory of the worker that computed the rest
  owner_hit       share of the steps that go on from others which found at least 95 % of what anybody held of them
  fetched         share of prompt tokens that another worker sent before the prompt began
  duplicates      cached tokens of all workers by the distinct ones among them
  moved_gb        KV that went over links
  tpot            time of an answer after its first token, by its tokens
  stall           share of the time of answers in which they waited for a prompt beside them
  prefill_use     share of the workers' time in which they computed prompts
  unplanned       steps that the policy had no plan of its own for; they went where the fewest requests were
  sessions_per_gpu_hour  sessions that came to their end, by the hours of all workers' GPUs
  occupancy       sessions at once x mean prompt / memory of all workers

ownerserve is told of an answer what routers know: 256 tokens where the client sets no limit, which no recording tells;
ownerserve_told_length is told the exact length, for ablations. llm_d_cached_counts counts evictable cache as memory
taken, as the simulation that the figures are compared with does; llm_d is given what engines report.
pooled_memory and oracle are bounds, not policies: one cache for all workers, without interference.";

/// Replays a trace against a simulated fleet, under one policy after the other.
#[derive(Debug, Args)]
#[command(after_long_help = FIGURES)]
pub(crate) struct SimulateArgs {
    /// A trace, or a folder of files of one, as `trace stats` takes it.
    trace: PathBuf,
    /// Who decides; `all` for every policy and bound. `ownerserve_told_length` and `llm_d_cached_counts` are named only.
    #[arg(long, value_delimiter = ',', default_value = "all", value_parser = policies)]
    policy: Vec<Policies>,
    /// Sessions at once, at most those of the trace; or factors on the recorded rate, 0.001 to 1000000, where requests
    /// come at recorded times.
    #[arg(long, value_delimiter = ',', default_value = "24")]
    load: Vec<f64>,
    /// Workers.
    #[arg(long, default_value_t = 8)]
    workers: usize,
    /// What each of them is.
    #[arg(long, default_value = Spec::H100_8B.name, value_parser = spec)]
    profile: Spec,
    /// Tokens of KV in a worker's device memory, in place of the profile's.
    #[arg(long, value_name = "TOKENS")]
    device_tokens: Option<u64>,
    /// Tokens of KV in a worker's host tier.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    host_tokens: u64,
    /// Seeds: each is another order of the sessions or of the gaps between requests, and other choices of policies that
    /// leave some to chance.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    seed: Vec<u64>,
    /// Replays only the sessions of this list, one id a line, in its order and at recorded times for every seed.
    #[arg(long, value_name = "FILE")]
    sessions: Option<PathBuf>,
    /// Leaves out steps whose prompt and answer are longer.
    #[arg(long, value_name = "TOKENS", default_value_t = Limits::default().context.0)]
    context: u64,
    /// Replays at most so many steps of a session.
    #[arg(long, default_value_t = Limits::default().steps)]
    steps: usize,
    /// Shortens pauses to so many seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    longest_pause: u64,
    /// How the figures are written.
    #[arg(short, long, value_enum, default_value_t)]
    output: Output,
}

/// What one word of `--policy` names.
#[derive(Clone, Debug)]
struct Policies(Vec<PolicyKind>);

fn policies(word: &str) -> Result<Policies, simulator::policies::UnknownPolicy> {
    Ok(Policies(if word == "all" { PolicyKind::ALL.to_vec() } else { vec![PolicyKind::from_str(word)?] }))
}

#[derive(Debug, thiserror::Error)]
#[error("accepted: {}", Spec::ALL.map(|spec| spec.name).join(", "))]
struct UnknownProfile;

fn spec(name: &str) -> Result<Spec, UnknownProfile> {
    Spec::named(name).ok_or(UnknownProfile)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
enum Output {
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
pub(crate) enum SimulateError {
    #[error(transparent)]
    Files(#[from] FilesError),
    #[error("cannot read the list of sessions {path}: {source}")]
    List { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Unknown(#[from] UnknownSession),
    #[error(transparent)]
    Setup(#[from] SetupError),
    #[error("cannot write the figures: {0}")]
    Output(#[from] std::io::Error),
}

pub(crate) fn run(args: &SimulateArgs) -> Result<(), SimulateError> {
    let trace = files::load(&args.trace)?.within(&args.limits());
    let figures = args.figures(trace)?;
    let text = match args.output {
        Output::Table => aligned(&report::table(&figures)),
        Output::Csv => report::csv(&figures),
        Output::Json => {
            let document = Document { profile: args.profile.name, workers: args.workers, runs: &figures };
            serde_json::to_string_pretty(&document).expect("figures are plain numbers and words") + "\n"
        }
    };
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

#[derive(Serialize)]
struct Document<'a> {
    profile: &'static str,
    workers: usize,
    runs: &'a [Figures],
}

impl SimulateArgs {
    fn limits(&self) -> Limits {
        Limits {
            context: Tokens(self.context),
            steps: self.steps,
            longest_pause: Micros(self.longest_pause.saturating_mul(1_000_000)),
            ..Limits::default()
        }
    }

    fn figures(&self, trace: Trace) -> Result<Vec<Figures>, SimulateError> {
        let list = self.sessions.as_ref().map(|path| {
            std::fs::read_to_string(path).map_err(|source| SimulateError::List { path: path.clone(), source })
        });
        let list = list.transpose()?;
        let trace = match &list {
            Some(ids) => trace.in_order(ids)?,
            None => trace,
        };
        let cells = self.cells(&trace)?;
        let mut progress = Progress::new(cells.len() * self.seed.len());
        let mut figures = Vec::new();
        for seed in &self.seed {
            let trace = if list.is_some() { trace.clone() } else { trace.clone().shuffled(*seed) };
            for (kind, setup) in &cells {
                let world = World::new(&trace, *kind, Setup { seed: *seed, ..*setup })?;
                progress.begin(&format!("{} at {}", kind.as_str(), setup.load));
                figures.push(world.run(&mut |over, all| progress.show(over, all)));
            }
        }
        progress.end();
        Ok(figures)
    }

    /// What runs for every seed. All of it is checked before the first run: the last one's mistake costs no figures.
    fn cells(&self, trace: &Trace) -> Result<Vec<(PolicyKind, Setup)>, SetupError> {
        let mut spec = self.profile;
        spec.sizes.host = Tokens(self.host_tokens);
        spec.sizes.device = self.device_tokens.map_or(spec.sizes.device, Tokens);
        let mut cells = Vec::new();
        for load in &self.load {
            for kind in self.policy.iter().flat_map(|policies| &policies.0) {
                let setup = Setup { workers: self.workers, spec, load: *load, seed: 0 };
                setup.check(trace, *kind)?;
                cells.push((*kind, setup));
            }
        }
        Ok(cells)
    }
}

#[cfg(test)]
mod tests;
