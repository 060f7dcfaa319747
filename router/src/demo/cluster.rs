//! A real cluster of processes on loopback: simulated workers, then one `serve` in front of them.
//!
//! Every process is a child of this one and of the same binary; nothing is left when the cluster is stopped or dropped.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::time::{Duration, Instant};

use vocabulary::Role;
use workers_shim::sim::Profile;

use super::child::{EXIT_WITH_PARENT, Process};
use super::client::Client;
use super::measure::Page;
use super::policy::Policy;

/// The cluster: 2 prefill, 4 decode, 2 hybrid.
const ROLES: [(Role, usize); 3] = [(Role::Prefill, 2), (Role::Decode, 4), (Role::Hybrid, 2)];
/// What the workers are, compiled in so that the demo runs from anywhere.
const PROFILE: &str = include_str!("../../../configs/profiles/demo.toml");
/// From the start of the processes until all of them answer.
const READY_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks at a process that is not ready.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Other programs may take a port between its choice and its use.
const ATTEMPTS: usize = 3;

/// Why a cluster did not come up or went down.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClusterError {
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: std::io::Error },
    /// A child ended on its own.
    #[error("{name} ended ({status}); its last lines:\n{}", lines.join("\n"))]
    Ended { name: String, status: std::process::ExitStatus, lines: Vec<String> },
    /// A child runs but does not answer.
    #[error("{name} was not ready within {READY_WITHIN:?}; its last lines:\n{}", lines.join("\n"))]
    NotReady { name: String, lines: Vec<String> },
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> ClusterError {
    move |source| ClusterError::System { what, source }
}

/// The engines that the workers stand for.
pub(crate) fn profile() -> Profile {
    toml::from_str(PROFILE).expect("the profile that is compiled in was tested")
}

#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub roles: Vec<Role>,
    /// What each of them is, as a file says it.
    pub profile: &'static str,
    /// What `serve` is set to.
    pub policy: Policy,
    /// And what else, as `--set` takes it.
    pub settings: &'static [&'static str],
    /// How many times faster than the modelled engines the simulated ones run.
    pub speed_up: f64,
}

impl Shape {
    pub(crate) fn demo(policy: Policy, speed_up: f64) -> Self {
        let roles = ROLES.iter().flat_map(|(role, count)| std::iter::repeat_n(*role, *count)).collect();
        Self { roles, profile: PROFILE, policy, settings: &[], speed_up }
    }
}

pub(crate) struct Worker {
    pub role: Role,
    /// Its OpenAI endpoint and `/metrics`.
    pub address: SocketAddr,
    process: Process,
}

pub(crate) struct Cluster {
    pub workers: Vec<Worker>,
    /// Where clients talk to.
    pub proxy: SocketAddr,
    /// Operator API and `/metrics`.
    pub operator: SocketAddr,
    serve: Process,
    client: Client,
    _data: tempfile::TempDir,
}

impl Cluster {
    /// Starts everything and waits until every process answers.
    pub(crate) async fn start(shape: Shape) -> Result<Cluster, ClusterError> {
        let mut attempt = 1;
        loop {
            match Cluster::start_once(&shape).await {
                Err(ClusterError::Ended { lines, .. }) if attempt < ATTEMPTS && lost_a_port(&lines) => attempt += 1,
                result => return result,
            }
        }
    }

    async fn start_once(shape: &Shape) -> Result<Cluster, ClusterError> {
        let ports = free_ports(shape.roles.len() + 2)?;
        let (own, workers) = ports.split_at(2);
        let data = tempfile::tempdir().map_err(system("make a folder for the ledger"))?;
        let profile = data.path().join("profile.toml");
        std::fs::write(&profile, shape.profile).map_err(system("write the workers' profile"))?;
        let mut started = Vec::new();
        for (number, (role, address)) in shape.roles.iter().copied().zip(workers).enumerate() {
            let name = format!("{} worker {number}", role.as_str());
            let args = worker_args((role, *address), shape, &profile);
            let process = Process::spawn(name, &args).map_err(system("start a worker"))?;
            started.push(Worker { role, address: *address, process });
        }
        let args = serve_args(shape, own, &started, data.path());
        let serve = Process::spawn("serve".into(), &args).map_err(system("start serve"))?;
        let (proxy, operator, client) = (own[0], own[1], Client::new());
        let mut cluster = Cluster { workers: started, proxy, operator, serve, client, _data: data };
        match cluster.wait_until_ready().await {
            Ok(()) => Ok(cluster),
            Err(error) => {
                cluster.stop().await;
                Err(error)
            }
        }
    }

    async fn wait_until_ready(&mut self) -> Result<(), ClusterError> {
        let deadline = Instant::now() + READY_WITHIN;
        for worker in &mut self.workers {
            answers(&self.client, &mut worker.process, (worker.address, "/health"), deadline).await?;
        }
        answers(&self.client, &mut self.serve, (self.operator, "/readyz"), deadline).await
    }

    /// The error of the first child that has ended, if any has.
    pub(crate) fn failed(&mut self) -> Option<ClusterError> {
        let processes = self.workers.iter_mut().map(|worker| &mut worker.process).chain([&mut self.serve]);
        processes.into_iter().find_map(|process| process.ended().map(|status| ended(process, status)))
    }

    /// The workers by their addresses.
    pub(crate) fn roles(&self) -> Vec<(String, Role)> {
        self.workers.iter().map(|worker| (worker.address.to_string(), worker.role)).collect()
    }

    /// The workers' `/metrics` now; a worker that does not answer gives an empty page.
    pub(crate) async fn worker_pages(&self) -> Vec<Page> {
        let mut pages = Vec::new();
        for worker in &self.workers {
            pages.push(self.page(worker.address).await);
        }
        pages
    }

    /// The router's `/metrics` now.
    pub(crate) async fn router_page(&self) -> Page {
        self.page(self.operator).await
    }

    async fn page(&self, server: SocketAddr) -> Page {
        self.client.page(server, "/metrics").await.map(|text| Page::parse(&text)).unwrap_or_default()
    }

    /// Kills every process and waits until all are gone.
    pub(crate) async fn stop(self) {
        self.serve.stop().await;
        for worker in self.workers {
            worker.process.stop().await;
        }
    }
}

fn worker_args((role, address): (Role, SocketAddr), shape: &Shape, profile: &Path) -> Vec<String> {
    [
        "sim-worker".to_owned(),
        EXIT_WITH_PARENT.to_owned(),
        format!("--listen={address}"),
        format!("--role={}", role.as_str()),
        format!("--profile={}", profile.display()),
        format!("--speed-up={}", shape.speed_up),
    ]
    .into()
}

fn serve_args(shape: &Shape, own: &[SocketAddr], workers: &[Worker], data: &Path) -> Vec<String> {
    let mut args = vec![
        "serve".to_owned(),
        EXIT_WITH_PARENT.to_owned(),
        format!("--listen={}", own[0]),
        format!("--operator-listen={}", own[1]),
        format!("--data-dir={}", data.join("ledger").display()),
        "--set=models.tiny.text=builtin".to_owned(),
    ];
    args.extend(workers.iter().map(|worker| format!("--worker=http://{}#{}", worker.address, worker.role.as_str())));
    args.extend(shape.policy.settings().iter().chain(shape.settings).map(|setting| format!("--set={setting}")));
    args
}

/// Free now; all are held until all are chosen, so that none is chosen twice.
fn free_ports(count: usize) -> Result<Vec<SocketAddr>, ClusterError> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listeners: std::io::Result<Vec<_>> = (0..count).map(bind).collect();
    let addresses: std::io::Result<Vec<_>> =
        listeners.map_err(system("find free ports"))?.iter().map(TcpListener::local_addr).collect();
    addresses.map_err(system("find free ports"))
}

fn lost_a_port(lines: &[String]) -> bool {
    lines.iter().any(|line| line.to_lowercase().contains("in use"))
}

fn ended(process: &Process, status: std::process::ExitStatus) -> ClusterError {
    ClusterError::Ended { name: process.name.clone(), status, lines: process.last_lines() }
}

async fn answers(
    client: &Client,
    process: &mut Process,
    (server, path): (SocketAddr, &str),
    deadline: Instant,
) -> Result<(), ClusterError> {
    while client.page(server, path).await.is_err() {
        if let Some(status) = process.ended() {
            // Its last words may still be in the pipe.
            tokio::time::sleep(LOOK_AGAIN).await;
            return Err(ended(process, status));
        }
        if Instant::now() > deadline {
            return Err(ClusterError::NotReady { name: process.name.clone(), lines: process.last_lines() });
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_ports_are_distinct_and_can_be_taken() {
        let ports = free_ports(18).unwrap();
        let mut distinct = ports.clone();
        distinct.sort();
        distinct.dedup();
        assert_eq!(distinct.len(), 18);
        assert!(ports.iter().all(|port| TcpListener::bind(port).is_ok()));
    }

    #[test]
    fn the_built_in_profile_is_a_sound_engine() {
        profile().check().unwrap();
    }

    #[test]
    fn a_lost_port_is_recognised_by_what_the_child_said() {
        assert!(lost_a_port(&["Error: Address already in use (os error 98)".into()]));
        assert!(!lost_a_port(&["no such file".into()]));
    }

    #[test]
    fn a_child_that_ended_is_reported_with_its_last_lines() {
        let status = std::os::unix::process::ExitStatusExt::from_raw(1 << 8);
        let error = ClusterError::Ended { name: "serve".into(), status, lines: vec!["bad flag".into()] };
        assert_eq!(error.to_string(), "serve ended (exit status: 1); its last lines:\nbad flag");
    }
}
