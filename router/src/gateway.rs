//! What every request can reach: configuration, the workers and the way to them, keys, metrics, the dial.

use std::sync::Arc;

use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderValue};

use crate::auth::{Keys, KeysError, Secret};
use crate::config::{Config, WorkerConfig};
use crate::pipeline::steering::LiveSteering;
use crate::resources::ResponseMakers;
use crate::roster::Roster;
use crate::telemetry::metrics::Metrics;
use crate::upstream::{Upstream, request_headers};

/// The front door's shared state; one a process, or one a server in tests.
#[derive(Debug)]
pub struct Gateway {
    /// As loaded at start.
    pub config: Config,
    /// The client to the workers.
    pub upstream: Upstream,
    /// API keys and tenants.
    pub keys: Arc<Keys>,
    /// All metrics.
    pub metrics: Metrics,
    /// Mode and rollout, changeable at run time.
    pub steering: LiveSteering,
    /// The workers, for requests that no plan is made for.
    pub roster: Arc<Roster>,
    /// Which worker made which response.
    pub responses: ResponseMakers,
}

impl Gateway {
    /// Everything that needs no IO but reading the keys file.
    pub fn new(config: Config) -> Result<Self, KeysError> {
        Ok(Self {
            upstream: Upstream::new(config.upstream.clone()),
            keys: Arc::new(Keys::open(&config.auth)?),
            metrics: Metrics::default(),
            steering: LiveSteering::new(config.steering.steering()),
            roster: Arc::new(Roster::new(&config.workers)),
            responses: ResponseMakers::default(),
            config,
        })
    }

    /// A client's headers as they go to this worker: end to end, and with the worker's key in place of the client's.
    ///
    /// A client's key for *us* never leaves: it goes to a worker only where we ask for none and the worker has none.
    pub fn headers_for(&self, worker: &WorkerConfig, client: &HeaderMap) -> HeaderMap {
        let mut headers = request_headers(client);
        let key = bearer(worker.api_key.as_ref());
        if key.is_some() || self.keys.required() {
            headers.remove(AUTHORIZATION);
            headers.remove("x-api-key");
        }
        if let Some(key) = key {
            headers.insert(AUTHORIZATION, key);
        }
        headers
    }
}

/// `Bearer KEY`, marked so that nothing prints it. A key that cannot stand in a header is left out.
pub(crate) fn bearer(key: Option<&Secret>) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(format!("Bearer {}", key?.expose())).ok()?;
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::AuthConfig;

    fn sent(worker_key: Option<&str>, keys_file: Option<&str>) -> (Option<String>, bool) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, keys_file.unwrap_or_default()).unwrap();
        let auth = AuthConfig { keys_file: keys_file.map(|_| path) };
        let gateway = Gateway::new(Config { auth, ..Config::default() }).unwrap();
        let mut worker = WorkerConfig::at("http://a:1".parse().unwrap());
        worker.api_key = worker_key.map(Secret::from);
        let client = HeaderMap::from_iter([
            (AUTHORIZATION, HeaderValue::from_static("Bearer client")),
            (http::HeaderName::from_static("x-api-key"), HeaderValue::from_static("client")),
        ]);
        let headers = gateway.headers_for(&worker, &client);
        (headers.get(AUTHORIZATION).map(|v| v.to_str().unwrap().to_owned()), headers.contains_key("x-api-key"))
    }

    #[test]
    fn a_clients_key_stays_here_unless_nobody_here_wants_one() {
        let file = Some("[keys]\n\"client\" = \"a\"");
        assert_eq!(sent(None, None), (Some("Bearer client".into()), true));
        assert_eq!(sent(None, file), (None, false));
        assert_eq!(sent(Some("worker"), file), (Some("Bearer worker".into()), false));
        assert_eq!(sent(Some("worker"), None), (Some("Bearer worker".into()), false));
    }
}
