//! `ownerserve trace generate`: made-up traffic where no recording has what is looked for.

use std::io::Write as _;

use clap::{Args, ValueEnum};
use simulator::trace::{TrafficPattern, Workload};

/// Makes up sessions of a known shape, as lines that `simulate`, `closed-loop` and `trace stats` read.
#[derive(Debug, Args)]
pub(super) struct GenerateArgs {
    /// What sessions have in common.
    #[arg(value_enum)]
    shape: WorkloadArg,
    /// Sessions.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sessions: u32,
    /// Different prefixes of shared-prefix; branches of each session of forked-rollouts.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    groups: u32,
    /// Tokens of a prefix, or of the context that branches go on from.
    #[arg(long, value_name = "TOKENS", default_value_t = 16_000, value_parser = clap::value_parser!(u64).range(64..=1_000_000))]
    shared: u64,
    /// Steps of a session, or of each branch.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    turns: u32,
    /// Tokens that a step adds besides the answer before it, on average.
    #[arg(long, value_name = "TOKENS", default_value_t = 800, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    new: u64,
    /// Tokens of an answer, on average.
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    answer: u64,
    /// Seconds between an answer and the next step, on average.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(0..=86_400))]
    pause: u64,
    /// Equal seeds give equal traffic.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum WorkloadArg {
    /// Every session begins with one of a few prefixes.
    SharedPrefix,
    /// Every session's branches go on from its context at the same time.
    ForkedRollouts,
}

/// Writes the sessions to standard output.
pub(super) fn run(args: &GenerateArgs) -> std::io::Result<()> {
    let shape = match args.shape {
        WorkloadArg::SharedPrefix => TrafficPattern::SharedPrefix { prefixes: args.groups },
        WorkloadArg::ForkedRollouts => TrafficPattern::ForkedRollouts { branches: args.groups },
    };
    let GenerateArgs { sessions, shared, turns, new, answer, pause, seed, .. } = *args;
    let workload =
        Workload { shape, sessions, shared_tokens: shared, turns, new_tokens: new, answer, pause: pause as f64, seed };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for session in 0..sessions {
        writeln!(out, "{}", workload.session_line(session))?;
    }
    out.flush()
}
