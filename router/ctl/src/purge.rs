//! Erases stored conversation content at every router: each has some in memory, and all share Redis.

use vocabulary::SessionId;

use super::client::OperatorClient;
use super::endpoints::{print_write_results, write_all};
use super::error::CtlError;
use super::lists::escaped;
use super::output::OutputFormat;
use super::table::TableColumns;
use super::writes::delete;

const RESULT_COLUMNS: TableColumns = "ENDPOINT /endpoint, RESULT /answer/result";

/// Erases what is stored of a tenant, at every endpoint.
pub(crate) async fn tenant(client: &OperatorClient, tenant: &str, output: OutputFormat) -> Result<(), CtlError> {
    purge(client, tenant_path(tenant), output).await
}

/// Erases what is stored of a session, at every endpoint.
pub(crate) async fn session(
    client: &OperatorClient,
    (session, tenant): (SessionId, Option<&str>),
    output: OutputFormat,
) -> Result<(), CtlError> {
    purge(client, session_path(session, tenant), output).await
}

async fn purge(client: &OperatorClient, path: String, output: OutputFormat) -> Result<(), CtlError> {
    print_write_results(&write_all(client, delete(path)).await, RESULT_COLUMNS, output)
}

fn tenant_path(tenant: &str) -> String {
    format!("tenants/{}/retained-data", escaped(tenant))
}

fn session_path(session: SessionId, tenant: Option<&str>) -> String {
    let query = tenant.map_or_else(String::new, |tenant| format!("?tenant={}", escaped(tenant)));
    format!("sessions/{session}/retained-data{query}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_name_is_percent_encoded_in_the_path() {
        assert_eq!(tenant_path("a/b c"), "tenants/a%2Fb%20c/retained-data");
        let session = SessionId(7);
        assert_eq!(session_path(session, None), format!("sessions/{session}/retained-data"));
        assert_eq!(session_path(session, Some("a/b c")), format!("sessions/{session}/retained-data?tenant=a%2Fb%20c"));
    }
}
