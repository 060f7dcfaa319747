//! Proxies under comparison, as child processes that end with this one, their CPU time and their memory.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::ProxyBenchError;
use crate::client::BenchClient;
use crate::options::Options;
use crate::worker::MODEL;

const READY_TIMEOUT: Duration = Duration::from_secs(20);
/// `/proc/PID/stat` reports CPU time in hundredths of a second (USER_HZ), whatever the kernel's own tick is.
const TICKS_PER_SECOND: f64 = 100.0;

/// Server that requests are sent to.
pub(crate) struct BenchTarget {
    /// Name in the table.
    pub(crate) name: &'static str,
    /// Listening addresses: of the direct connection both workers'.
    addresses: Vec<SocketAddr>,
    process: Option<TargetProcess>,
}

impl BenchTarget {
    /// Returns the address for a client.
    pub(crate) fn address(&self, client: usize) -> SocketAddr {
        self.addresses[client % self.addresses.len()]
    }

    /// CPU seconds used so far by the process and those that it started; `None` if the target runs in this process.
    pub(crate) fn cpu_seconds(&self) -> Option<f64> {
        let pid = self.process.as_ref()?.child.id();
        let ticks: f64 = family(pid).iter().filter_map(|pid| cpu_ticks(*pid)).sum();
        Some(ticks / TICKS_PER_SECOND)
    }

    /// Resident memory in bytes of the process and those that it started.
    pub(crate) fn resident_bytes(&self) -> Option<u64> {
        let pid = self.process.as_ref()?.child.id();
        Some(family(pid).iter().filter_map(|pid| resident_bytes(*pid)).sum())
    }
}

/// Returns a process and all those below it.
fn family(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(pid) = found.get(at) {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
        let children: Vec<u32> = children
            .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
            .collect();
        found.extend(children);
        at += 1;
    }
    found
}

fn cpu_ticks(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name may contain spaces; the fields after its closing parenthesis do not.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    Some([11, 12].iter().filter_map(|at| fields.get(*at)?.parse::<f64>().ok()).sum())
}

fn resident_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

struct TargetProcess {
    child: Child,
}

impl Drop for TargetProcess {
    fn drop(&mut self) {
        // What it started ends first. All calls fail only if a process is already gone.
        let started = family(self.child.id()).into_iter().skip(1).map(|pid| pid.to_string());
        for pid in started {
            let _ = Command::new("kill").args(["-KILL", &pid]).status();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Another project's router.
struct Peer {
    name: &'static str,
    program: &'static str,
    arguments: &'static [&'static str],
}

const PEERS: [Peer; 2] = [
    Peer {
        name: "vllm-router",
        program: "vllm-router",
        arguments: &["--policy", "round_robin", "--log-level", "warning"],
    },
    Peer {
        name: "sglang-router",
        program: "sglang-router",
        arguments: &["launch", "--policy", "cache_aware", "--log-level", "warn"],
    },
];

/// All targets: a direct connection first, then every proxy.
pub(crate) struct BenchTargets {
    /// Targets in the order of the table.
    pub(crate) all: Vec<BenchTarget>,
    folder: PathBuf,
}

impl Drop for BenchTargets {
    fn drop(&mut self) {
        self.all.clear();
        // A leftover folder lies in the system's temporary directory.
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl BenchTargets {
    /// Starts the proxies in front of the workers and waits until each serves.
    pub(crate) async fn start(workers: [SocketAddr; 2], options: &Options) -> Result<BenchTargets, ProxyBenchError> {
        let folder = std::env::temp_dir().join(format!("ownerserve-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(ProxyBenchError::system("make a folder"))?;
        let mut targets = BenchTargets {
            all: vec![BenchTarget { name: "direct", addresses: workers.to_vec(), process: None }],
            folder,
        };
        targets.haproxy(workers)?;
        for peer in PEERS.iter().filter(|peer| options.includes(peer.name)) {
            targets.peer(workers, &options.peers, peer)?;
        }
        let model =
            options.model.canonicalize().map_err(ProxyBenchError::system(options.model.display().to_string()))?;
        let tokens = format!("models.{MODEL}.tokenizer_dir={}", model.display());
        let variants = [
            ("ownerserve", "routing.mode=active", Some(&options.binary)),
            ("ownerserve tokens", tokens.as_str(), Some(&options.binary)),
            ("ownerserve bypass", "routing.mode=bypass", Some(&options.binary)),
            ("ownerserve before", "routing.mode=active", options.before.as_ref()),
        ];
        for (name, setting, binary) in variants {
            if let Some(binary) = binary.filter(|_| options.includes(name)) {
                targets.ownerserve(workers, binary, (name, setting))?;
            }
        }
        for target in &targets.all {
            wait_until_serving(target).await?;
        }
        Ok(targets)
    }

    fn haproxy(&mut self, workers: [SocketAddr; 2]) -> Result<(), ProxyBenchError> {
        let address = free_address()?;
        let config = format!(
            "global\n  nbthread 2\n  maxconn 9000\ndefaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  \
             timeout server 60s\n  http-reuse always\nfrontend f\n  bind {address} backlog 4096\n  default_backend b\nbackend b\n  \
             balance roundrobin\n  server w1 {}\n  server w2 {}\n",
            workers[0], workers[1]
        );
        let path = self.folder.join("haproxy.cfg");
        std::fs::write(&path, config).map_err(ProxyBenchError::system("write haproxy.cfg"))?;
        // Debian installs it in a directory that is only in root's PATH.
        let program =
            ["/usr/sbin/haproxy", "/usr/local/sbin/haproxy"].into_iter().find(|path| Path::new(path).exists());
        let mut command = Command::new(program.unwrap_or("haproxy"));
        command.arg("-db").arg("-f").arg(path);
        self.spawn("haproxy", address, command)
    }

    /// Starts a peer if it is installed.
    fn peer(&mut self, workers: [SocketAddr; 2], folder: &Path, peer: &Peer) -> Result<(), ProxyBenchError> {
        let program = folder.join(peer.program).join("bin").join(peer.program);
        if !program.exists() {
            return Ok(());
        }
        let (address, metrics) = (free_address()?, free_address()?);
        let mut command = Command::new(program);
        command.args(peer.arguments).args(["--host", "127.0.0.1", "--port", &address.port().to_string()]);
        command.arg("--worker-urls").args(workers.map(|worker| format!("http://{worker}")));
        command.args(["--prometheus-host", "127.0.0.1", "--prometheus-port", &metrics.port().to_string()]);
        command.args(["--worker-startup-check-interval", "1"]).stderr(Stdio::null());
        self.spawn(peer.name, address, command)
    }

    fn ownerserve(
        &mut self,
        workers: [SocketAddr; 2],
        binary: &Path,
        (name, setting): (&'static str, &str),
    ) -> Result<(), ProxyBenchError> {
        let (address, operator) = (free_address()?, free_address()?);
        let mut command = Command::new(binary);
        command.args(["serve", "--listen", &address.to_string(), "--operator-listen", &operator.to_string()]);
        command.arg("--data-dir").arg(self.folder.join(name)).arg("--set").arg(setting);
        command.args(workers.map(|worker| format!("--worker=http://{worker}")));
        command.env_remove("RUST_LOG").stderr(Stdio::null());
        self.spawn(name, address, command)
    }

    fn spawn(&mut self, name: &'static str, address: SocketAddr, mut command: Command) -> Result<(), ProxyBenchError> {
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().map_err(ProxyBenchError::system(format!("start {name}")))?;
        let deadline = Instant::now() + READY_TIMEOUT;
        let mut running = TargetProcess { child };
        while TcpStream::connect(address).is_err() {
            let ended = running.child.try_wait().map_err(ProxyBenchError::system(name))?;
            if ended.is_some() || Instant::now() > deadline {
                return Err(ProxyBenchError::Answer { target: name.into(), got: format!("nothing: {ended:?}") });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        self.all.push(BenchTarget { name, addresses: vec![address], process: Some(running) });
        Ok(())
    }
}

/// Waits until the target answers a request, which includes that it found its workers.
async fn wait_until_serving(target: &BenchTarget) -> Result<(), ProxyBenchError> {
    let deadline = Instant::now() + READY_TIMEOUT;
    let body = br#"{"max_tokens":1,"model":"bench","stream":true,"messages":[{"role":"user","content":"hi"}]}"#;
    loop {
        let mut client = BenchClient::connect(target.name, target.address(0)).await?;
        match client.chat("bench-warm", body).await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn free_address() -> Result<SocketAddr, ProxyBenchError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(ProxyBenchError::system("find a free port"))?;
    listener.local_addr().map_err(ProxyBenchError::system("find a free port"))
}
