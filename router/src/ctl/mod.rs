//! `ownerserve ctl`: what an operator asks of a cluster, or of its files while it is down.

mod snapshot;

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use crate::cli::failed;

/// Looks into a cluster, and into its files.
#[derive(Clone, Debug, Args)]
pub(crate) struct CtlArgs {
    #[command(subcommand)]
    command: CtlCommand,
    /// How answers are printed.
    #[arg(short, long, value_enum, global = true, default_value_t)]
    output: Output,
}

#[derive(Clone, Debug, Subcommand)]
enum CtlCommand {
    /// Snapshots of the ledger, as files.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
}

/// How answers are printed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, ValueEnum)]
pub(crate) enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs.
    Json,
}

impl Output {
    /// Prints an answer: as JSON, or as these names and values.
    #[expect(clippy::print_stdout, reason = "this is what the command is asked for")]
    pub(crate) fn print(self, answer: &impl Serialize, rows: &[(&str, String)]) {
        match self {
            Output::Json => println!("{}", serde_json::to_string_pretty(answer).expect("an answer encodes")),
            Output::Table => {
                let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
                for (name, value) in rows {
                    println!("{name:width$}  {value}");
                }
            }
        }
    }
}

/// Runs one command.
pub(crate) async fn run(args: &CtlArgs) -> ExitCode {
    let done = match &args.command {
        CtlCommand::Snapshot(command) => snapshot::run(command, args.output).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}
