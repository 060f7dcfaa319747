//! Forgetting what is kept of people's words, at every router: each has some in its memory, and all share Redis.

use clap::Subcommand;
use vocabulary::SessionId;

use super::client::Client;
use super::endpoints::{tell_done, write_all};
use super::error::CtlError;
use super::lists::escaped;
use super::output::Output;
use super::table::Columns;
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

const DONE: Columns = "ENDPOINT /endpoint, DONE /answer/did";

/// Forgets it at every endpoint.
pub(crate) async fn forget(client: &Client, command: &ForgetCommand, output: Output) -> Result<(), CtlError> {
    tell_done(&write_all(client, delete(command.path())).await, DONE, output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_name_stands_in_the_path_as_it_is_read_there() {
        let tenant = || "a/b c".to_owned();
        assert_eq!(ForgetCommand::Tenant { tenant: tenant() }.path(), "tenants/a%2Fb%20c/kept");
        let session = SessionId(7);
        let path = ForgetCommand::Session { session, tenant: Some(tenant()) }.path();
        assert_eq!(path, format!("sessions/{session}/kept?tenant=a%2Fb%20c"));
    }
}
