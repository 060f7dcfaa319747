//! `ownerserve trace`: looks at recorded traffic. Reads files and writes to the terminal; serves nobody.

pub(crate) mod files;
mod generate;

use std::io::Write as _;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use simulator::stats::{Percentiles, RepeatedPrefixCriteria, TraceStats};

use crate::ctl::{aligned, pretty, row};
use files::TraceFilesError;

/// Looks at recorded traffic, or makes some up.
#[derive(Debug, Args)]
pub struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    /// Lengths, pauses, ideal hit rates, forks, kinds of step and repetition of a trace.
    Stats(StatsArgs),
    Generate(generate::GenerateArgs),
}

#[derive(Debug, Args)]
struct StatsArgs {
    /// A trace, or a folder of files of one: agent sessions, Mooncake, Azure, lmcache, Claude Code's transcripts or
    /// tau_bench, plain or gzipped; or a router's data directory, for its decision log.
    path: PathBuf,
    /// How the figures are written.
    #[arg(short, long, value_enum, default_value_t)]
    output: StatsFormat,
    /// Repetition: counts prefixes that at least this number of prompts share.
    #[arg(long, value_name = "N", default_value_t = RepeatedPrefixCriteria::default().min_visits)]
    min_visits: u32,
    /// Repetition: counts prefixes of at least this number of tokens.
    #[arg(long, value_name = "TOKENS", default_value_t = RepeatedPrefixCriteria::default().min_prefix_tokens)]
    min_prefix_tokens: u64,
}

/// How figures are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum StatsFormat {
    /// For people.
    #[default]
    Text,
    /// For programs.
    Json,
}

/// Why nothing could be told of a trace.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each is")]
pub enum TraceCommandError {
    #[error(transparent)]
    Files(#[from] TraceFilesError),
    #[error("cannot write the figures: {0}")]
    Output(#[from] std::io::Error),
}

/// Runs the command.
pub fn run(args: &TraceArgs) -> Result<(), TraceCommandError> {
    match &args.command {
        TraceCommand::Stats(args) => print_stats(args),
        TraceCommand::Generate(args) => Ok(generate::run(args)?),
    }
}

fn print_stats(args: &StatsArgs) -> Result<(), TraceCommandError> {
    let trace = files::load(&args.path)?;
    let repetition = RepeatedPrefixCriteria { min_visits: args.min_visits, min_prefix_tokens: args.min_prefix_tokens };
    let stats = TraceStats::of(&trace, repetition);
    let text = match args.output {
        StatsFormat::Text => stats_table(&stats),
        StatsFormat::Json => pretty(&stats),
    };
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}

/// The figures for people.
fn stats_table(stats: &TraceStats) -> String {
    let mut rows = vec![row(["", "p50", "p90", "p99", "max", "mean"])];
    let lengths = &stats.lengths;
    rows.push(spread("steps of a conversation", &stats.steps));
    rows.push(spread("prompt tokens", &lengths.prompt));
    rows.push(spread("new tokens", &lengths.new));
    rows.push(spread("answer tokens", &lengths.answer));
    rows.push(spread("pause (s)", &stats.gaps.seconds));
    rows.push(spread("children of a fork", &stats.forks.children));
    let (hits, forks, repetition) = (&stats.ideal_hits, &stats.forks, &stats.repetition);
    let facts = [
        ("requests", stats.requests.to_string()),
        ("conversations", format!("{}, {} with sub-agents", stats.conversations, stats.with_sub_agents)),
        ("prompt tokens in all", hits.prompt_tokens.to_string()),
        ("distinct prompt tokens", hits.distinct_tokens.to_string()),
        ("ideal hit rate, of prompts", share(hits.everywhere)),
        ("  with answers kept, too", share(hits.with_answers)),
        ("  within conversations", share(hits.within_conversations)),
        ("pauses over 60 s, 300 s", format!("{}, {}", share(stats.gaps.over_60_s), share(stats.gaps.over_300_s))),
        ("forks", format!("{}, {} of them at least 4096 tokens deep", forks.nodes, forks.deep_nodes)),
        (
            "prefix repetition",
            format!(
                "{:.3}: {} prefixes of at least {} tokens and {} visits, by conversations",
                repetition.ratio, repetition.prefixes, repetition.of.min_prefix_tokens, repetition.of.min_visits
            ),
        ),
    ];
    let kinds = stats.kinds.iter().map(|(kind, part)| [format!("kind {kind}"), share(*part)]);
    let below = facts.map(|(name, value)| [name.to_owned(), value]).into_iter().chain(kinds);
    let notes: String = stats.notes.iter().map(|note| format!("\nnote: {note}\n")).collect();
    format!("{}\n{}{notes}", aligned(rows), aligned(below))
}

fn spread(name: &str, of: &Percentiles) -> Vec<String> {
    let values = [of.p50, of.p90, of.p99, of.max, of.mean].map(|value| format!("{value:.1}"));
    std::iter::once(name.to_owned()).chain(values).collect()
}

fn share(part: f64) -> String {
    format!("{:.2} %", part * 100.0)
}

#[cfg(test)]
mod tests;
