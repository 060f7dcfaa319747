//! Erases stored conversation content at every router: each has some in memory, and all share Redis.

use clap::Subcommand;
use vocabulary::SessionId;

use super::client::OperatorClient;
use super::endpoints::{print_write_results, write_all};
use super::error::CtlError;
use super::lists::escaped;
use super::output::OutputFormat;
use super::table::ColumnSpec;
use super::writes::delete;

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum ForgetCommand {
    /// Transcripts of stored responses and token checkpoints of all of a tenant's sessions.
    Tenant {
        /// The tenant.
        tenant: String,
    },
    /// The same of one session.
    Session {
        /// The session.
        session: SessionId,
        /// Its tenant, where the ledger does not know the session any more.
        #[arg(long, value_name = "NAME")]
        tenant: Option<String>,
    },
}

impl ForgetCommand {
    fn path(&self) -> String {
        match self {
            Self::Tenant { tenant } => format!("tenants/{}/kept", escaped(tenant)),
            Self::Session { session, tenant: None } => format!("sessions/{session}/kept"),
            Self::Session { session, tenant: Some(tenant) } => {
                format!("sessions/{session}/kept?tenant={}", escaped(tenant))
            }
        }
    }
}

const RESULT_COLUMNS: ColumnSpec = "ENDPOINT /endpoint, DONE /answer/did";

/// Erases it at every endpoint.
pub(crate) async fn forget(
    client: &OperatorClient,
    command: &ForgetCommand,
    output: OutputFormat,
) -> Result<(), CtlError> {
    print_write_results(&write_all(client, delete(command.path())).await, RESULT_COLUMNS, output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_name_is_percent_encoded_in_the_path() {
        let tenant = || "a/b c".to_owned();
        assert_eq!(ForgetCommand::Tenant { tenant: tenant() }.path(), "tenants/a%2Fb%20c/kept");
        let session = SessionId(7);
        let path = ForgetCommand::Session { session, tenant: Some(tenant()) }.path();
        assert_eq!(path, format!("sessions/{session}/kept?tenant=a%2Fb%20c"));
    }
}
