//! `ownerserve trace generate`: generates synthetic traces.

use std::io::Write as _;

use clap::{Args, ValueEnum};
use simulator::trace::{SharingPattern, Workload};
use vocabulary::TimeSpan;

use vocabulary::flags;

/// Makes up sessions of a known shape, as lines that `simulate`, `validate-sim` and `trace stats` read.
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
    fanout: u32,
    /// Tokens of a prefix, or of the context that branches go on from.
    #[arg(long, value_name = "TOKENS", default_value_t = 16_000, value_parser = clap::value_parser!(u64).range(64..=1_000_000))]
    shared_prefix_tokens: u64,
    /// Steps of a session, or of each branch.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    steps: u32,
    /// Tokens that a step adds besides the answer before it, on average.
    #[arg(long, value_name = "TOKENS", default_value_t = 800, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    new_tokens: u64,
    /// Tokens of an answer, on average.
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    output_tokens: u64,
    /// Think time between an answer and the next step, on average.
    #[arg(long, value_name = "DURATION", default_value = "5s",
        value_parser = |text: &str| flags::duration_within(text, TimeSpan::seconds(0)..=TimeSpan::seconds(86_400)))]
    think_time: TimeSpan,
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
        WorkloadArg::SharedPrefix => SharingPattern::SharedPrefix { prefixes: args.fanout },
        WorkloadArg::ForkedRollouts => SharingPattern::ForkedRollouts { branches: args.fanout },
    };
    let GenerateArgs { sessions, shared_prefix_tokens, steps, new_tokens, output_tokens, think_time, seed, .. } = *args;
    let workload = Workload {
        shape,
        sessions,
        shared_tokens: shared_prefix_tokens,
        turns: steps,
        new_tokens,
        answer: output_tokens,
        pause: think_time.0.as_secs_f64(),
        seed,
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for session in 0..sessions {
        writeln!(out, "{}", workload.session_line(session))?;
    }
    out.flush()
}
