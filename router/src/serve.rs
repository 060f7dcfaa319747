//! `ownerserve serve`: starts everything, from a configuration to two listeners, and shuts it down again.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::app_state::{AppState, AppStateError, operator_settings};
use crate::certificate_files::CertificateFiles;
use crate::config::Config;
use crate::exposure::exposures;
use crate::operator::{OperatorStartError, OperatorState};
use crate::{file_modes, operator};
use proxy::pipeline::commit_retry;
use proxy::prefix_cache::tokenizer_drift;
use proxy::server::{
    BoundSocket, ClosedConnections, ConnectionMetrics, HttpServer, ListenerTls, ListenerTlsConfig, ServerLimits,
    TlsError, UnauthenticatedLimits, descriptors,
};
use proxy::shutdown_signal::wait_for_signal;
use proxy::{adapters, front_door, prefix_replication, salt_proof};

/// Number of workers for which file descriptors are reserved where discovery finds them.
const FOUND_WORKERS: usize = 64;
/// Time between two checks of watched files.
const FILE_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Why the router did not start, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The keys file or the ledger was rejected.
    #[error(transparent)]
    AppState(#[from] AppStateError),
    /// The ledger failed while it ran.
    #[error(transparent)]
    Ledger(ownership::LedgerNodeError),
    /// The operators' tokens or audit log were rejected.
    #[error(transparent)]
    Operator(#[from] OperatorStartError),
    /// A listener's certificate cannot be used.
    #[error("{setting}: {source}")]
    Tls {
        /// The setting that names it.
        setting: &'static str,
        /// Why.
        source: TlsError,
    },
    /// A listener could not be bound.
    #[error("cannot listen on {address} ({setting}): {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The setting that names it.
        setting: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// A running router.
#[derive(Debug)]
pub struct RunningServer {
    /// State that its requests share.
    pub gateway: Arc<AppState>,
    operator_state: OperatorState,
    proxy: HttpServer,
    operator: HttpServer,
    background: Vec<JoinHandle<()>>,
}

impl RunningServer {
    /// Starts everything and returns once both listeners are bound.
    pub async fn start(config: Config) -> Result<Self, ServeError> {
        // Everything that can fail is checked before the ledger founds or joins a cluster.
        let (proxy, operator) = (config.proxy.listen, config.operator.listen);
        let open_files = descriptors::raise_limit();
        let mut proxy = bind(proxy, "proxy.listen")?;
        let mut operator = bind(operator, "operator.listen")?.with_head_errors(operator::head_problem);
        let proxy_tls = load_tls(config.proxy.tls.as_ref(), "proxy.tls")?;
        let operator_tls = load_tls(config.operator.tls.as_ref(), "operator.tls")?;
        if let Some(tls) = &proxy_tls {
            proxy = proxy.with_tls(tls);
        }
        if let Some(tls) = &operator_tls {
            operator = operator.with_tls(tls);
        }
        let certificates = CertificateFiles::stat(&config);
        let operator_settings = operator_settings(&config);
        OperatorState::check(&operator_settings)?;
        let gateway = Arc::new(AppState::open(config).await?);
        let operator_state = OperatorState::open(gateway.operator_parts(), operator_settings)?;
        let settings = &gateway.config.proxy;
        let found = if gateway.config.discovery.is_enabled() { FOUND_WORKERS } else { 0 };
        let needs = descriptors::DescriptorDemand {
            clients: settings.max_connections,
            workers: gateway.config.workers.len().max(found),
            is_in_cluster: gateway.config.cluster.listen.is_some(),
        };
        let shares = descriptors::ConnectionLimits::of(open_files, needs);
        let limits = ServerLimits {
            header_timeout: settings.header_timeout.0,
            write_timeout: settings.write_timeout.0,
            unauthenticated: Some(UnauthenticatedLimits {
                // Otherwise strangers could take all connections, and none of theirs would be evicted for a new one.
                connections: settings.max_unauthenticated_connections.min(half(shares.clients)),
                per_address: settings.max_unauthenticated_connections_per_address,
                timeout: settings.authentication_timeout.0,
            }),
            connections: shares.clients,
            drain_timeout: settings.drain_timeout.0,
        };
        let process = &gateway.metrics.process;
        let counts = |open, listener| ConnectionMetrics {
            open,
            closed: ClosedConnections::of(&process.unauthenticated_closed, listener),
            idle_closed: process.idle_closed.with_label_values(&[listener]),
        };
        let open = counts(process.connections.clone(), "clients");
        let routes = front_door::routes(&gateway.front_door);
        let tasks = gateway.directory().supervision();
        let proxy = HttpServer::start_supervised(proxy, routes, limits, open, (tasks, "proxy_listener"))
            .map_err(|source| ServeError::Listen { address: settings.listen, setting: "proxy.listen", source })?;
        let small = ServerLimits {
            connections: shares.operators,
            unauthenticated: Some(UnauthenticatedLimits {
                connections: half(shares.operators),
                per_address: half(half(shares.operators)),
                timeout: settings.authentication_timeout.0,
            }),
            drain_timeout: Duration::from_secs(1),
            ..limits
        };
        let address = gateway.config.operator.listen;
        let uncounted = prometheus::IntGauge::new("operator", "not shown").expect("a valid name");
        let (routes, kept) = (operator::routes(&operator_state), (tasks, "operator_listener"));
        let operator = HttpServer::start_supervised(operator, routes, small, counts(uncounted, "operators"), kept)
            .map_err(|source| ServeError::Listen { address, setting: "operator.listen", source })?;
        let mut background = Vec::new();
        if gateway.isolation.keys().required() {
            let (keys, followed) = (gateway.isolation.keys().clone(), gateway.watched_files("api_keys"));
            let limited: Vec<_> = gateway.config.tenants.keys().cloned().collect();
            background.push(tasks.supervise("api_keys", move || {
                keys.clone().follow_file(FILE_POLL_INTERVAL, followed.clone(), limited.clone())
            }));
        }
        if gateway.config.operator.tokens_file.is_some() {
            let operator_state = operator_state.clone();
            background.push(tasks.supervise("operator_tokens", move || operator_state.follow_tokens()));
        }
        let (ledger, fleet, catalog) = (gateway.ledger.clone(), gateway.fleet().clone(), gateway.catalog().clone());
        background.push(tasks.supervise("sessions", move || commit_retry::run(ledger.clone())));
        let workers = fleet.clone();
        background
            .push(tasks.supervise("adapters", move || adapters::watch_mismatches(workers.clone(), catalog.clone())));
        let drift = gateway.caches.prefix_cache.tokenizer_drift.clone();
        background
            .push(tasks.supervise("tokenizer_drift", move || tokenizer_drift::follow(drift.clone(), fleet.clone())));
        let replication = gateway.replication_task();
        background.push(tasks.supervise("prefix_replication", move || prefix_replication::run(replication.clone())));
        if gateway.isolation.keys().required() && gateway.config.auth.verify_cache_salt {
            let prover = gateway.salt_prover();
            background.push(tasks.supervise("cache_salt_checks", move || salt_proof::follow(prover.clone())));
        }
        for (tls, what) in [(proxy_tls, "proxy_certificate"), (operator_tls, "operator_certificate")] {
            if let Some(tls) = tls.map(Arc::new) {
                let followed = gateway.watched_files(what);
                background
                    .push(tasks.supervise(what, move || tls.clone().watch_files(FILE_POLL_INTERVAL, followed.clone())));
            }
        }
        if let Some(files) = certificates {
            let app_state = gateway.clone();
            let follow = move || files.clone().follow(app_state.clone(), FILE_POLL_INTERVAL);
            background.push(tasks.supervise("cluster_certificates", follow));
        }
        let serving = Self { gateway, operator_state, proxy, operator, background };
        serving.log_addresses();
        Ok(serving)
    }

    /// Returns the address for clients.
    pub fn proxy_address(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// Returns the address for operators.
    pub fn operator_address(&self) -> SocketAddr {
        self.operator.address()
    }

    /// Lets running requests end within the drain timeout, then stops everything.
    pub async fn stop(self) {
        self.operator_state.begin_shutdown();
        let cut = self.proxy.stop().await;
        if cut > 0 {
            tracing::warn!(connections = cut, "connections were cut: the drain time-out was over");
        }
        self.operator.stop().await;
        commit_retry::flush(&self.gateway.ledger).await;
        for task in self.background {
            task.abort();
        }
        self.gateway.close().await;
    }

    fn log_addresses(&self) {
        let Self { gateway: app_state, .. } = self;
        tracing::info!(address = %self.proxy.address(), "clients connect here");
        tracing::info!(address = %self.operator.address(), "operators connect here, /metrics included");
        for exposure in exposures(&app_state.config) {
            tracing::warn!("{}", exposure.detail);
        }
        file_modes::warnings(&app_state.config).iter().for_each(|warning| tracing::warn!("{warning}"));
        let data_dir = app_state.config.ledger.data_dir.display();
        tracing::info!(%data_dir, cluster = %app_state.directory().cluster(), node = %app_state.ledger.node_id(), "ledger");
        let routing = app_state.routing.get();
        let percent = u8::from(routing.rollout_percent);
        tracing::info!(mode = routing.mode.as_ref(), rollout_percent = percent, "mode");
        app_state.catalog().bad_templates().for_each(|bad| tracing::warn!("{bad}"));
        for (model, folder) in app_state.catalog().models_without_template() {
            tracing::warn!(%model, folder = %folder.display(), "there is no chat template in models.NAME.tokenizer_dir: its conversations are \
                known by their bytes only (approximate), completions exactly; put the engines' chat_template.jinja there");
        }
        for worker in app_state.fleet().snapshot().iter() {
            tracing::info!(endpoint = %worker.endpoint, role = worker.role.as_str(), "worker");
        }
        if app_state.config.workers.is_empty() && !app_state.config.discovery.is_enabled() {
            tracing::warn!("no workers: give --worker URL, or [[workers]] or [discovery] in the configuration");
        }
    }
}

fn half(connections: usize) -> usize {
    (connections / 2).max(1)
}

fn load_tls(config: Option<&ListenerTlsConfig>, setting: &'static str) -> Result<Option<ListenerTls>, ServeError> {
    config.map(ListenerTls::load).transpose().map_err(|source| ServeError::Tls { setting, source })
}

fn bind(address: SocketAddr, setting: &'static str) -> Result<BoundSocket, ServeError> {
    BoundSocket::bind(address).map_err(|source| ServeError::Listen { address, setting, source })
}

/// Serves until SIGTERM or ctrl-c. When the ledger fails for good, it continues or ends, as configured; either way it
/// returns that error at the end.
pub async fn run(config: Config) -> Result<(), ServeError> {
    let serving = RunningServer::start(config).await?;
    let app_state = serving.gateway.clone();
    let ended = tokio::select! {
        () = wait_for_signal() => Ok(()),
        failure = app_state.directory().wait_for_failure() => Err(failure),
    };
    if let Err(failure) = &ended
        && app_state.config.ledger.on_failure.keeps_serving(failure)
    {
        app_state.ledger.ledger_failed(failure);
        wait_for_signal().await;
    }
    tracing::info!("ending: running requests may finish");
    serving.stop().await;
    ended.map_err(ServeError::Ledger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;
    use crate::testing::{StubWorker, get, post, start_router, wait_until};

    #[tokio::test]
    async fn exited_background_tasks_are_counted_alarmed_and_restarted() {
        let (worker, files) = (StubWorker::start("one", "tiny").await, tempfile::tempdir().unwrap());
        let file = |name: &str, text: &str| {
            let path = files.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let settings = [
            format!("auth.keys_file={:?}", file("keys.toml", "[keys]\n\"sk-a\" = \"a\"\n\"sk-b\" = \"b\"\n")),
            format!("discovery.workers_file={:?}", file("workers.toml", "workers = []\n")),
            "discovery.dns=[{address = \"localhost:1\"}]".to_owned(),
        ];
        let settings: Vec<&str> = settings.iter().map(String::as_str).collect();
        let router = start_router(&[&worker], &settings).await;
        let tasks = router.gateway.directory().supervision().clone();
        let names = tasks.tasks();
        let wanted = "api_keys workers_file dns leases discovery probes events proxy_listener sessions writer proposer";
        for wanted in wanted.split(' ') {
            assert!(names.contains(&wanted), "{wanted} is not among {names:?}");
        }
        for name in names {
            let before = tasks.unexpected_ends().get(name).copied().unwrap_or(0);
            tasks.inject_failure(name);
            wait_until(name, || tasks.unexpected_ends().get(name).is_some_and(|times| *times > before)).await;
            let metrics = get(router.operator_address(), "/metrics").await;
            let text = String::from_utf8_lossy(&metrics.body).into_owned();
            assert!(text.contains(&format!("background_task_restarts_total{{task=\"{name}\"}}")), "{name}");
            let ready = get(router.operator_address(), "/readyz").await.json();
            let alarms = ready["degraded"].as_array().unwrap();
            let is_told = |alarm: &serde_json::Value| {
                alarm["component"] == "background_tasks"
                    && alarm["detail"].as_str().is_some_and(|detail| detail.contains(name))
            };
            assert!(alarms.iter().any(is_told), "{name}: {ready}");
        }
        // All of them are released again.
        let request = http::Request::post("/v1/completions").header("authorization", "Bearer sk-a");
        let body = "{\"model\":\"tiny\",\"prompt\":\"\"}";
        assert_eq!(crate::testing::send(router.proxy_address(), request, body).await.status, 200);
        assert_eq!(post(router.proxy_address(), "/v1/completions", body).await.status, 401);
        router.gateway.directory().write_snapshot().await.unwrap();
        router.stop().await;
    }

    #[tokio::test]
    async fn unopenable_audit_log_is_rejected_before_founding_a_cluster() {
        let data = tempfile::tempdir().unwrap();
        let folder = format!("ledger.data_dir={:?}", data.path());
        let settings = ["proxy.listen=127.0.0.1:0", "operator.listen=127.0.0.1:0", &folder];
        let settings = settings.into_iter().map(str::to_owned).collect();
        let config = Config::load(None, &Overrides { settings, workers: Vec::new() }).unwrap();
        std::fs::write(data.path().join("audit"), "a file where a folder should be").unwrap();
        let message = RunningServer::start(config).await.unwrap_err().to_string();
        assert!(message.contains("the audit log in"), "{message}");
        let left: Vec<_> = std::fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["audit"], "nothing was founded");
    }
}
