//! Real cluster of processes on loopback: simulated workers, and one `serve` in front of them.
//!
//! Every process is a child of this one and runs the same binary; all are gone when the cluster is stopped or
//! dropped.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use vocabulary::WorkerRole;
use workers_shim::sim::EngineProfile;

use super::ComparedPolicy;
use super::child_process::{ChildProcess, EXIT_WITH_PARENT};
use super::client::ProxyClient;
use super::measure::MetricsScrape;

/// Workers of the demo cluster: 2 prefill, 4 decode, 2 hybrid.
const ROLES: [(WorkerRole, usize); 3] = [(WorkerRole::Prefill, 2), (WorkerRole::Decode, 4), (WorkerRole::Hybrid, 2)];
/// Engine profile of the workers, embedded so that the demo runs from anywhere.
const PROFILE: &str = include_str!("../../../../configs/profiles/demo.toml");
/// Timeout from the start of the processes until all respond.
const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// Interval between two readiness checks.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum start attempts: other programs may take a port between its choice and its use.
const MAX_START_ATTEMPTS: usize = 3;

/// A cluster did not start or failed.
#[derive(Debug, thiserror::Error)]
pub enum LocalClusterError {
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    /// A child exited on its own.
    #[error("{name} ended ({status}); its last lines:\n{}", lines.join("\n"))]
    Exited { name: String, status: std::process::ExitStatus, lines: Vec<String> },
    /// A child runs but does not respond.
    #[error("{name} was not ready within {READY_TIMEOUT:?}; its last lines:\n{}", lines.join("\n"))]
    NotReady { name: String, lines: Vec<String> },
}

fn system_error(what: &'static str) -> impl FnOnce(std::io::Error) -> LocalClusterError {
    move |source| LocalClusterError::System { what, source }
}

/// Engine profile that the workers simulate.
pub(crate) fn profile() -> EngineProfile {
    toml::from_str(PROFILE).expect("the profile that is compiled in was tested")
}

#[derive(Clone, Debug)]
pub(crate) struct LocalClusterOptions {
    pub roles: Vec<WorkerRole>,
    /// Engine profile of the workers, as TOML.
    pub profile: &'static str,
    /// Policy of `serve`.
    pub policy: ComparedPolicy,
    /// Further settings, in the syntax of `--set`.
    pub settings: &'static [&'static str],
    /// How many times faster than the modelled engines the simulated ones run.
    pub speed_up: f64,
}

impl LocalClusterOptions {
    pub(crate) fn demo(policy: ComparedPolicy, speed_up: f64) -> Self {
        let roles = ROLES.iter().flat_map(|(role, count)| std::iter::repeat_n(*role, *count)).collect();
        Self { roles, profile: PROFILE, policy, settings: &[], speed_up }
    }
}

pub(crate) struct LocalWorker {
    pub role: WorkerRole,
    /// OpenAI endpoint and `/metrics`.
    pub address: SocketAddr,
    process: ChildProcess,
}

pub(crate) struct LocalCluster {
    pub workers: Vec<LocalWorker>,
    /// Client address of the proxy.
    pub proxy: SocketAddr,
    /// Operator API and `/metrics`.
    pub operator: SocketAddr,
    serve: ChildProcess,
    client: ProxyClient,
    _data: tempfile::TempDir,
}

impl LocalCluster {
    /// Starts all processes and waits until each responds.
    pub(crate) async fn start(options: LocalClusterOptions) -> Result<LocalCluster, LocalClusterError> {
        let mut attempt = 1;
        loop {
            match LocalCluster::start_once(&options).await {
                Err(LocalClusterError::Exited { lines, .. })
                    if attempt < MAX_START_ATTEMPTS && is_port_conflict(&lines) =>
                {
                    attempt += 1
                }
                result => return result,
            }
        }
    }

    async fn start_once(options: &LocalClusterOptions) -> Result<LocalCluster, LocalClusterError> {
        let ports = free_ports(options.roles.len() + 2)?;
        let (own, workers) = ports.split_at(2);
        let data = tempfile::tempdir().map_err(system_error("make a folder for the ledger"))?;
        let profile = data.path().join("profile.toml");
        std::fs::write(&profile, options.profile).map_err(system_error("write the workers' profile"))?;
        let mut started = Vec::new();
        for (number, (role, address)) in options.roles.iter().copied().zip(workers).enumerate() {
            let name = format!("{} worker {number}", role.as_str());
            let args = worker_args((role, *address), options, &profile);
            let process = ChildProcess::spawn(name, &args).map_err(system_error("start a worker"))?;
            started.push(LocalWorker { role, address: *address, process });
        }
        let args = serve_args(options, own, &started, data.path());
        let serve = ChildProcess::spawn("serve".into(), &args).map_err(system_error("start serve"))?;
        let (proxy, operator, client) = (own[0], own[1], ProxyClient::new());
        let mut cluster = LocalCluster { workers: started, proxy, operator, serve, client, _data: data };
        match cluster.wait_until_ready().await {
            Ok(()) => Ok(cluster),
            Err(error) => {
                cluster.stop().await;
                Err(error)
            }
        }
    }

    async fn wait_until_ready(&mut self) -> Result<(), LocalClusterError> {
        let deadline = Instant::now() + READY_TIMEOUT;
        for worker in &mut self.workers {
            wait_for_page(&self.client, &mut worker.process, (worker.address, "/health"), deadline).await?;
        }
        wait_for_page(&self.client, &mut self.serve, (self.operator, "/readyz"), deadline).await
    }

    /// Returns the error of the first child that has exited, if any.
    pub(crate) fn exited_child(&mut self) -> Option<LocalClusterError> {
        let processes = self.workers.iter_mut().map(|worker| &mut worker.process).chain([&mut self.serve]);
        processes.into_iter().find_map(|process| process.exit_status().map(|status| exit_error(process, status)))
    }

    /// Returns the workers by address.
    pub(crate) fn roles(&self) -> Vec<(String, WorkerRole)> {
        self.workers.iter().map(|worker| (worker.address.to_string(), worker.role)).collect()
    }

    /// Scrapes the workers' `/metrics`; a worker that does not respond yields an empty page.
    pub(crate) async fn scrape_workers(&self) -> Vec<MetricsScrape> {
        let mut pages = Vec::new();
        for worker in &self.workers {
            pages.push(self.scrape(worker.address).await);
        }
        pages
    }

    /// Scrapes the router's `/metrics`.
    pub(crate) async fn scrape_router(&self) -> MetricsScrape {
        self.scrape(self.operator).await
    }

    async fn scrape(&self, server: SocketAddr) -> MetricsScrape {
        self.client.get_page(server, "/metrics").await.map(|text| MetricsScrape::parse(&text)).unwrap_or_default()
    }

    /// Kills every process and waits until all are gone.
    pub(crate) async fn stop(self) {
        self.serve.stop().await;
        for worker in self.workers {
            worker.process.stop().await;
        }
    }
}

fn worker_args(
    (role, address): (WorkerRole, SocketAddr),
    options: &LocalClusterOptions,
    profile: &Path,
) -> Vec<String> {
    [
        "sim-worker".to_owned(),
        EXIT_WITH_PARENT.to_owned(),
        format!("--listen={address}"),
        format!("--role={}", role.as_str()),
        format!("--profile={}", profile.display()),
        format!("--speed-up={}", options.speed_up),
    ]
    .into()
}

fn serve_args(options: &LocalClusterOptions, own: &[SocketAddr], workers: &[LocalWorker], data: &Path) -> Vec<String> {
    let mut args = vec![
        "serve".to_owned(),
        EXIT_WITH_PARENT.to_owned(),
        format!("--listen={}", own[0]),
        format!("--operator-listen={}", own[1]),
        format!("--data-dir={}", data.join("ledger").display()),
        "--set=models.tiny.tokenizer_dir=builtin".to_owned(),
    ];
    args.extend(workers.iter().map(|worker| format!("--worker=http://{}#{}", worker.address, worker.role.as_str())));
    args.extend(options.policy.settings().iter().chain(options.settings).map(|setting| format!("--set={setting}")));
    args
}

/// Returns free ports. All are bound until the last is chosen, so that none is chosen twice.
fn free_ports(count: usize) -> Result<Vec<SocketAddr>, LocalClusterError> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listeners: std::io::Result<Vec<_>> = (0..count).map(bind).collect();
    let addresses: std::io::Result<Vec<_>> =
        listeners.map_err(system_error("find free ports"))?.iter().map(TcpListener::local_addr).collect();
    addresses.map_err(system_error("find free ports"))
}

fn is_port_conflict(lines: &[String]) -> bool {
    lines.iter().any(|line| line.to_lowercase().contains("in use"))
}

fn exit_error(process: &ChildProcess, status: std::process::ExitStatus) -> LocalClusterError {
    LocalClusterError::Exited { name: process.name.clone(), status, lines: process.last_lines() }
}

async fn wait_for_page(
    client: &ProxyClient,
    process: &mut ChildProcess,
    (server, path): (SocketAddr, &str),
    deadline: Instant,
) -> Result<(), LocalClusterError> {
    while client.get_page(server, path).await.is_err() {
        if let Some(status) = process.exit_status() {
            // Its last log lines may still be in the pipe.
            tokio::time::sleep(POLL_INTERVAL).await;
            return Err(exit_error(process, status));
        }
        if Instant::now() > deadline {
            return Err(LocalClusterError::NotReady { name: process.name.clone(), lines: process.last_lines() });
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_distinct_and_bindable() {
        let ports = free_ports(18).unwrap();
        let mut distinct = ports.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 18);
        assert!(ports.iter().all(|port| TcpListener::bind(port).is_ok()));
    }

    #[test]
    fn built_in_profile_is_a_valid_engine() {
        profile().check().unwrap();
    }

    #[test]
    fn port_conflict_is_recognized_in_child_output() {
        assert!(is_port_conflict(&["Error: Address already in use (os error 98)".into()]));
        assert!(!is_port_conflict(&["no such file".into()]));
    }

    #[test]
    fn exited_child_is_reported_with_its_last_lines() {
        let status = std::os::unix::process::ExitStatusExt::from_raw(1 << 8);
        let error = LocalClusterError::Exited { name: "serve".into(), status, lines: vec!["bad flag".into()] };
        assert_eq!(error.to_string(), "serve ended (exit status: 1); its last lines:\nbad flag");
    }
}
