//! Barred links: lists those of every router, and clears one everywhere. Each router checks its own transfers.

use clap::Subcommand;

use super::args::WorkerArg;
use super::client::OperatorClient;
use super::endpoints::{print_responses, print_write_results, query_all, write_all};
use super::error::CtlError;
use super::output::OutputFormat;
use super::table::ColumnSpec;
use super::writes::delete;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum LinksCommand {
    /// Lets KV move from one worker to another again, at every endpoint.
    Clear {
        /// Who sends, by id or URL.
        from: WorkerArg,
        /// Who reads, by id or URL.
        to: WorkerArg,
    },
}

const LINK_COLUMNS: ColumnSpec = "ENDPOINT /endpoint, ONE IN /answer/one_in, BARRED /answer/barred";

/// Shows every endpoint's barred links, or clears one.
pub(crate) async fn links(
    client: &OperatorClient,
    command: Option<&LinksCommand>,
    output: OutputFormat,
) -> Result<(), CtlError> {
    let Some(LinksCommand::Clear { from, to }) = command else {
        return print_responses(&query_all(client, "correctness").await, LINK_COLUMNS, output);
    };
    print_write_results(&write_all(client, delete(format!("correctness/{from}/{to}"))).await, LINK_COLUMNS, output)
}
