//! `ownerserve serve`: everything put together, from a configuration to two listeners, and back to nothing.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::certificates::Certificates;
use crate::config::Config;
use crate::exchange::keeper;
use crate::exposure::exposures;
use crate::gateway::{Gateway, GatewayError};
use crate::identity::agreement;
use crate::operator::{Desk, DeskError};
use crate::server::{Bound, Server, ServerLimits, Tls, TlsConfig, TlsError, UnauthenticatedLimits, descriptors};
use crate::{adapters, ahead, file_modes, operator, proxy, salt_proof};

/// Most connections of the operators' listener.
const OPERATORS: usize = 256;
/// How often files that are read anew are looked at.
const FILES_EVERY: Duration = Duration::from_secs(5);

/// Why it did not start, or did not go on.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The keys file or the ledger was refused.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// The ledger failed while it ran.
    #[error(transparent)]
    Ledger(ownership::OwnershipError),
    /// The operators' tokens or audit log were refused.
    #[error(transparent)]
    Desk(#[from] DeskError),
    /// A listener has no certificate to show.
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
        /// Where.
        address: SocketAddr,
        /// The setting that says so.
        setting: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

/// A running front door.
#[derive(Debug)]
pub struct Serving {
    /// What its requests share.
    pub gateway: Arc<Gateway>,
    desk: Desk,
    proxy: Server,
    operator: Server,
    background: Vec<JoinHandle<()>>,
}

impl Serving {
    /// Starts everything and returns once both listeners are bound.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        // Whatever can be refused is refused before the ledger founds a cluster, or joins one.
        let (proxy, operator) = (config.proxy.listen, config.operator.listen);
        let open_files = descriptors::raise_limit();
        let mut proxy = take(proxy, "proxy.listen")?;
        let mut operator = take(operator, "operator.listen")?;
        let proxy_tls = tls(config.proxy.tls.as_ref(), "proxy.tls")?;
        let operator_tls = tls(config.operator.tls.as_ref(), "operator.tls")?;
        if let Some(tls) = &proxy_tls {
            proxy = proxy.with_tls(tls);
        }
        if let Some(tls) = &operator_tls {
            operator = operator.with_tls(tls);
        }
        let certificates = Certificates::look(&config);
        Desk::check(&config)?;
        let gateway = Arc::new(Gateway::open(config).await?);
        let desk = Desk::open(&gateway)?;
        let settings = &gateway.config.proxy;
        let limits = ServerLimits {
            header_timeout: settings.header_timeout.0,
            write_timeout: settings.write_timeout.0,
            unauthenticated: Some(UnauthenticatedLimits {
                connections: settings.unauthenticated_connections,
                per_address: settings.unauthenticated_per_address,
                timeout: settings.authentication_timeout.0,
            }),
            connections: descriptors::connections(settings.connections, open_files),
            drain_timeout: settings.drain_timeout.0,
        };
        let open = gateway.metrics.process.connections.clone();
        let routes = proxy::routes(&gateway);
        let proxy = Server::start(proxy, routes, limits, open).map_err(|source| StartError::Listen {
            address: settings.listen,
            setting: "proxy.listen",
            source,
        })?;
        let small = ServerLimits {
            connections: OPERATORS,
            unauthenticated: Some(UnauthenticatedLimits {
                connections: OPERATORS / 2,
                per_address: OPERATORS / 4,
                timeout: settings.authentication_timeout.0,
            }),
            drain_timeout: Duration::from_secs(1),
            ..limits
        };
        let address = gateway.config.operator.listen;
        let uncounted = prometheus::IntGauge::new("operator", "not shown").expect("a valid name");
        let operator = Server::start(operator, operator::routes(&desk), small, uncounted)
            .map_err(|source| StartError::Listen { address, setting: "operator.listen", source })?;
        let limited = gateway.config.tenants.keys().cloned().collect();
        let mut background = vec![
            tokio::spawn(gateway.keys.clone().follow_file(FILES_EVERY, gateway.followed("api_keys"), limited)),
            tokio::spawn(keeper::keep(gateway.clone())),
            tokio::spawn(adapters::follow(gateway.clone())),
            tokio::spawn(agreement::follow(gateway.clone())),
            tokio::spawn(ahead::run(gateway.clone())),
            tokio::spawn(desk.follow_tokens()),
        ];
        for (tls, what) in [(proxy_tls, "proxy_certificate"), (operator_tls, "operator_certificate")] {
            background.extend(tls.map(|tls| tokio::spawn(tls.follow_files(FILES_EVERY, gateway.followed(what)))));
        }
        let proves = gateway.keys.required() && gateway.config.auth.prove_salts;
        background.extend(proves.then(|| tokio::spawn(salt_proof::follow(gateway.clone()))));
        background.extend(certificates.map(|files| tokio::spawn(files.follow(gateway.clone(), FILES_EVERY))));
        let serving = Self { gateway, desk, proxy, operator, background };
        serving.announce();
        Ok(serving)
    }

    /// Where clients connect.
    pub fn proxy_address(&self) -> SocketAddr {
        self.proxy.address()
    }

    /// Where operators connect.
    pub fn operator_address(&self) -> SocketAddr {
        self.operator.address()
    }

    /// Lets running requests end within the drain time-out, then ends everything.
    pub async fn stop(self) {
        self.desk.end();
        let cut = self.proxy.stop().await;
        if cut > 0 {
            tracing::warn!(connections = cut, "connections were cut: the drain time-out was over");
        }
        self.operator.stop().await;
        keeper::last_words(&self.gateway).await;
        for task in self.background {
            task.abort();
        }
        self.gateway.close().await;
    }

    fn announce(&self) {
        let Self { gateway, .. } = self;
        tracing::info!(address = %self.proxy.address(), "clients connect here");
        tracing::info!(address = %self.operator.address(), "operators connect here, /metrics included");
        for exposure in exposures(&gateway.config) {
            tracing::warn!("{}", exposure.detail);
        }
        file_modes::warnings(&gateway.config).iter().for_each(|warning| tracing::warn!("{warning}"));
        let data_dir = gateway.config.ledger.data_dir.display();
        tracing::info!(%data_dir, cluster = %gateway.directory().cluster(), node = %gateway.node(), "ledger");
        let steering = gateway.steering.get();
        let percent = u8::from(steering.rollout_percent);
        tracing::info!(mode = steering.mode.as_ref(), rollout_percent = percent, "mode");
        gateway.catalog().bad_templates().for_each(|bad| tracing::warn!("{bad}"));
        for (model, folder) in gateway.catalog().without_template() {
            tracing::warn!(%model, folder = %folder.display(), "there is no chat template in models.NAME.text: its conversations are \
                known by their bytes only (fallback), completions exactly; put the engines' chat_template.jinja there");
        }
        for worker in gateway.fleet().snapshot().iter() {
            tracing::info!(endpoint = %worker.endpoint, role = worker.role.as_str(), "worker");
        }
        if gateway.config.workers.is_empty() && !gateway.config.discovery.finds() {
            tracing::warn!("no workers: give --worker URL, or [[workers]] or [discovery] in the configuration");
        }
    }
}

fn tls(config: Option<&TlsConfig>, setting: &'static str) -> Result<Option<Tls>, StartError> {
    config.map(Tls::load).transpose().map_err(|source| StartError::Tls { setting, source })
}

fn take(address: SocketAddr, setting: &'static str) -> Result<Bound, StartError> {
    Bound::take(address).map_err(|source| StartError::Listen { address, setting, source })
}

/// Serves until SIGTERM or ctrl-c. When the ledger cannot be kept any more it goes on or ends, as configured; either way it
/// ends with that error.
pub async fn run(config: Config) -> Result<(), StartError> {
    let serving = Serving::start(config).await?;
    let gateway = serving.gateway.clone();
    let ended = tokio::select! {
        () = asked_to_end() => Ok(()),
        failure = gateway.directory().failed() => Err(failure),
    };
    if let Err(failure) = &ended
        && gateway.config.ledger.on_failure.goes_on(failure)
    {
        gateway.ledger_failed(failure);
        asked_to_end().await;
    }
    tracing::info!("ending: running requests may finish");
    serving.stop().await;
    ended.map_err(StartError::Ledger)
}

/// Returns at SIGTERM or ctrl-c.
pub async fn asked_to_end() {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = match signal(SignalKind::terminate()) {
        Ok(terminate) => terminate,
        Err(error) => {
            tracing::warn!(%error, "SIGTERM cannot be waited for");
            let _ = tokio::signal::ctrl_c().await;
            return;
        }
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    #[tokio::test]
    async fn an_audit_log_that_cannot_be_opened_is_refused_before_a_cluster_is_founded() {
        let data = tempfile::tempdir().unwrap();
        let folder = format!("ledger.data_dir={:?}", data.path());
        let settings = ["proxy.listen=127.0.0.1:0", "operator.listen=127.0.0.1:0", &folder];
        let settings = settings.into_iter().map(str::to_owned).collect();
        let config = Config::load(None, &Overrides { settings, workers: Vec::new() }).unwrap();
        std::fs::write(data.path().join("audit"), "a file where a folder should be").unwrap();
        let refused = Serving::start(config).await.unwrap_err().to_string();
        assert!(refused.contains("the audit log in"), "{refused}");
        let left: Vec<_> = std::fs::read_dir(data.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["audit"], "nothing was founded");
    }
}
