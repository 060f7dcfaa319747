//! Barred links: which there are at every router, and to clear one everywhere. Each router checks its own transfers.

use clap::Subcommand;

use super::args::WorkerArg;
use super::client::Client;
use super::endpoints::{ask_all, tell, tell_done, write_all};
use super::error::CtlError;
use super::output::Output;
use super::table::Columns;
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

const LINKS: Columns = "ENDPOINT /endpoint, ONE IN /answer/one_in, BARRED /answer/barred";

/// Shows every endpoint's barred links, or clears one.
pub(crate) async fn links(client: &Client, command: Option<&LinksCommand>, output: Output) -> Result<(), CtlError> {
    let Some(LinksCommand::Clear { from, to }) = command else {
        return tell(&ask_all(client, "correctness").await, LINKS, output);
    };
    tell_done(&write_all(client, delete(format!("correctness/{from}/{to}"))).await, LINKS, output)
}
