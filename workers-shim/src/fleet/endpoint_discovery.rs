//! Asks a worker for the transfer endpoint of its KV connector.

use std::sync::Arc;

use super::kv_connector::{KvConnectorCapability, connector_of};
use super::probe::get_url;
use super::worker_definition::WorkerDefinition;
use super::worker_handle::WorkerHandle;
use crate::engine_api::{ConnectorUnavailable, TransferEndpoint};
use crate::scrape::Scrape;

/// Asks the worker for its transfer endpoint.
pub(super) async fn discover_endpoint(
    client: &reqwest::Client,
    worker: &WorkerHandle,
    scrape: &Scrape,
) -> KvConnectorCapability {
    let profile = &worker.spec.profile.link;
    let spoken = connector_of(profile, scrape);
    let missing = spoken.dialect().missing_requirement(scrape).map(Arc::from);
    if !spoken.dialect().needs_endpoint(worker.spec.role) {
        return KvConnectorCapability {
            protocol: spoken,
            endpoint: None,
            fetch_only: true,
            missing_requirement: missing,
        };
    }
    let Some(url) = spoken.dialect().discovery_url(&worker.spec.endpoint, profile.bootstrap_url.as_deref()) else {
        return KvConnectorCapability {
            protocol: spoken,
            endpoint: Some(Arc::default()),
            missing_requirement: missing,
            ..KvConnectorCapability::default()
        };
    };
    let key = worker.spec.api_key.as_ref().filter(|_| is_under_endpoint(&url, &worker.spec.endpoint));
    let answer = get_url(client, &url, key).await.map_err(|_| ConnectorUnavailable::NoAnswer);
    match answer
        .and_then(|text| spoken.dialect().parse_endpoint(&url, &text))
        .and_then(|endpoint| check_role(endpoint, &worker.spec))
    {
        Ok(endpoint) => KvConnectorCapability {
            protocol: spoken,
            endpoint: Some(Arc::new(endpoint)),
            missing_requirement: missing,
            ..KvConnectorCapability::default()
        },
        Err(why) => {
            let says = format!("it speaks {}, and {url} does not tell where it is met: {why}", spoken.as_str());
            KvConnectorCapability {
                protocol: spoken,
                missing_requirement: Some(says.into()),
                ..KvConnectorCapability::default()
            }
        }
    }
}

/// Returns whether the URL lies under this endpoint. A plain prefix test would also match a longer port number.
fn is_under_endpoint(url: &str, endpoint: &str) -> bool {
    url.strip_prefix(endpoint).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn check_role(endpoint: TransferEndpoint, spec: &WorkerDefinition) -> Result<TransferEndpoint, ConnectorUnavailable> {
    match endpoint.role {
        Some(role) if role != spec.role => {
            Err(ConnectorUnavailable::Role { actual: role, configured: spec.role, endpoint: spec.endpoint.clone() })
        }
        _ => Ok(endpoint),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_key_is_sent_to_no_other_port() {
        assert!(is_under_endpoint("http://h:80/server_info", "http://h:80"));
        assert!(!is_under_endpoint("http://h:8998/query", "http://h:899"));
    }
}
