//! Links between workers that transfer checks have disabled: lists those of every router, and enables one everywhere.
//! Each router checks its own transfers.

use clap::Subcommand;

use super::args::WorkerArg;
use super::client::OperatorClient;
use super::endpoints::{print_responses, print_write_results, query_all, write_all};
use super::error::CtlError;
use super::output::OutputFormat;
use super::table::TableColumns;
use super::writes::delete;

/// Links between workers, at every endpoint.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum LinkCommand {
    /// Lists the links that transfer checks disabled, because KV arrived changed over them.
    List,
    /// Lets KV move from one worker to another again.
    Enable {
        /// The worker that sends, by id or URL.
        source: WorkerArg,
        /// The worker that receives, by id or URL.
        target: WorkerArg,
    },
}

const LINK_COLUMNS: TableColumns =
    "ENDPOINT /endpoint, SAMPLE EVERY /answer/sample_every, DISABLED LINKS /answer/disabled_links";

impl LinkCommand {
    pub(crate) async fn run(&self, client: &OperatorClient, output: OutputFormat) -> Result<(), CtlError> {
        match self {
            Self::List => print_responses(&query_all(client, "transfer-checks").await, LINK_COLUMNS, output),
            Self::Enable { source, target } => {
                let request = delete(format!("transfer-checks/disabled-links/{source}/{target}"));
                print_write_results(&write_all(client, request).await, LINK_COLUMNS, output)
            }
        }
    }
}
