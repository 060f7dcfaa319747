//! Client to the workers: how each is reached, and with which credentials.

use std::sync::Arc;

use axum::response::Response;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use vocabulary::WorkerId;
use workers_shim::engine_api::EventBufferBudget;
use workers_shim::fleet::Fleet;

use crate::auth::bearer;
use crate::host_check::remove_credentials;
use crate::offload_pool::OffloadPool;
use crate::upstream::{Upstream, UpstreamError, WorkerBody, WorkerRequest, request_headers};
use crate::worker_pool::{PoolMember, WorkerPool};

/// What becomes of the credentials in clients' requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CredentialPolicy {
    /// This router checks none: they are for the workers.
    PassOn,
    /// They are keys for this router, and reach no worker.
    Remove,
}

/// Sends requests to workers. Clones share connections and workers.
#[derive(Clone, Debug)]
pub struct WorkerClient {
    fleet: Arc<Fleet>,
    pool: Arc<WorkerPool>,
    upstream: Upstream,
    offload_pool: Arc<OffloadPool>,
    credentials: CredentialPolicy,
}

impl WorkerClient {
    /// Returns a client to the workers of `fleet` that `pool` lists.
    pub fn new(
        (fleet, pool): (Arc<Fleet>, Arc<WorkerPool>),
        upstream: Upstream,
        offload_pool: Arc<OffloadPool>,
        credentials: CredentialPolicy,
    ) -> Self {
        Self { fleet, pool, upstream, offload_pool, credentials }
    }

    /// Returns the fleet of workers.
    pub fn fleet(&self) -> &Arc<Fleet> {
        &self.fleet
    }

    /// Returns how the workers are reached.
    pub fn pool(&self) -> &Arc<WorkerPool> {
        &self.pool
    }

    /// Returns the pool that reads long answers.
    pub fn offload_pool(&self) -> &OffloadPool {
        &self.offload_pool
    }

    /// Returns the memory budget for unfinished events of all workers' streams.
    pub fn event_budget(&self) -> EventBufferBudget {
        self.upstream.events()
    }

    /// Returns how a worker is reached, even if it is leaving.
    pub fn worker(&self, id: WorkerId) -> Option<Arc<PoolMember>> {
        self.pool.member(id)
    }

    /// Returns the endpoint of a worker for logs and reports, or its id where it is not listed.
    pub fn endpoint_name(&self, id: WorkerId) -> String {
        self.worker(id).map_or_else(|| id.to_string(), |worker| worker.config.endpoint().to_string())
    }

    /// Sends a request to a worker and waits for the head of its answer.
    pub async fn send(
        &self,
        worker: &PoolMember,
        request: WorkerRequest,
    ) -> Result<Response<WorkerBody>, UpstreamError> {
        self.upstream.send(worker.config.endpoint(), request).await
    }

    /// Builds the headers for this worker from a client's: end-to-end only, with the worker's key instead of the
    /// client's.
    ///
    /// A client's key for *us* is never forwarded: its header goes to a worker only where neither we nor the worker
    /// need a key. A worker that registered itself never gets it: a caller of the operator API could collect keys that
    /// way.
    pub fn headers_for(&self, worker: &PoolMember, client: &HeaderMap) -> HeaderMap {
        let mut headers = request_headers(client);
        let key = bearer(worker.config.api_key.as_ref());
        if key.is_some() || self.credentials == CredentialPolicy::Remove || !worker.source.is_configured() {
            remove_credentials(&mut headers);
        }
        if let Some(key) = key {
            headers.insert(AUTHORIZATION, key);
        }
        headers
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app_state::AppState;
    use crate::auth::AuthConfig;
    use crate::config::{Config, LedgerConfig};
    use crate::discovery::WorkerConfig;
    use crate::discovery::WorkerSource;
    use http::HeaderValue;
    use vocabulary::Secret;

    async fn sent_authorization(worker_key: Option<&str>, keys_file: Option<&str>) -> (Option<String>, bool) {
        sent_authorization_for(WorkerSource::Static, worker_key, keys_file).await
    }

    async fn sent_authorization_for(
        source: WorkerSource,
        worker_key: Option<&str>,
        keys_file: Option<&str>,
    ) -> (Option<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, keys_file.unwrap_or_default()).unwrap();
        let auth = AuthConfig { keys_file: keys_file.map(|_| path), ..AuthConfig::default() };
        let ledger = LedgerConfig { data_dir: folder.path().join("ledger"), ..LedgerConfig::default() };
        let app_state = AppState::open(Config { auth, ledger, ..Config::default() }).await.unwrap();
        let mut config = WorkerConfig::from_url("http://a:1".parse().unwrap());
        config.api_key = worker_key.map(Secret::from);
        let worker = PoolMember { id: WorkerId::of_endpoint(config.endpoint()), source, config };
        let client = HeaderMap::from_iter([
            (AUTHORIZATION, HeaderValue::from_static("Bearer client")),
            (http::HeaderName::from_static("x-api-key"), HeaderValue::from_static("client")),
        ]);
        let headers = app_state.workers.headers_for(&worker, &client);
        (headers.get(AUTHORIZATION).map(|v| v.to_str().unwrap().to_owned()), headers.contains_key("x-api-key"))
    }

    #[tokio::test]
    async fn client_keys_reach_workers_only_when_the_router_checks_none() {
        let file = Some("[keys]\n\"client\" = \"a\"");
        assert_eq!(sent_authorization(None, None).await, (Some("Bearer client".into()), true));
        assert_eq!(sent_authorization(None, file).await, (None, false));
        assert_eq!(sent_authorization(Some("worker"), file).await, (Some("Bearer worker".into()), false));
        assert_eq!(sent_authorization(Some("worker"), None).await, (Some("Bearer worker".into()), false));
    }

    #[tokio::test]
    async fn client_keys_do_not_reach_self_registered_workers() {
        for source in [WorkerSource::Static, WorkerSource::File, WorkerSource::Dns, WorkerSource::Kubernetes] {
            assert_eq!(
                sent_authorization_for(source, None, None).await,
                (Some("Bearer client".into()), true),
                "{source:?}"
            );
        }
        assert_eq!(sent_authorization_for(WorkerSource::Api, None, None).await, (None, false));
    }
}
