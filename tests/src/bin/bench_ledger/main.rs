//! Cost of a durable write, a lookup and a snapshot, compared with this disk's own fdatasync and with etcd in the
//! same run.
//!
//!     bench_ledger [--quick] [--json FILE] [--dir FOLDER] [--artifacts N] [--only writes|scale] [--rounds N]
//!                  [--nodes 1,3] [--clients 1,16,64,256] [--systems embedded,ours,etcd]
//!
//! The systems alternate in short runs, so that other load on the machine affects all of them. Reports for each goal
//! whether it is met; a missed goal is not a failure.

mod disk;
mod error;
mod etcd;
mod ledger_cluster;
mod load;
mod node;
mod process;
mod report;
mod rpc;
mod scale;

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::str::FromStr;
use std::time::Duration;

pub(crate) use error::LedgerBenchError;
use load::LoadStats;
use process::say;
use report::{LedgerBenchResults, WriteResults};
use rpc::GrpcConnection;
use scale::ScaleResults;

/// Parsed command line.
struct Options {
    json: Option<PathBuf>,
    folder: PathBuf,
    nodes: Vec<usize>,
    clients: Vec<u64>,
    systems: Vec<WriteSystem>,
    rounds: usize,
    window: Duration,
    artifacts: u64,
    only: Option<String>,
}

impl Options {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, LedgerBenchError> {
        let mut options = Self {
            json: None,
            folder: std::env::temp_dir(),
            nodes: vec![1, 3],
            clients: vec![1, 16, 64, 256],
            systems: WriteSystem::ALL.to_vec(),
            rounds: 10,
            window: Duration::from_millis(700),
            artifacts: 10_000_000,
            only: None,
        };
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| LedgerBenchError::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--quick" => {
                    options.clients = vec![1, 64];
                    (options.rounds, options.window, options.artifacts) = (4, Duration::from_millis(250), 200_000);
                }
                "--json" => options.json = Some(value()?.into()),
                "--dir" => options.folder = value()?.into(),
                "--only" => options.only = Some(value()?),
                "--artifacts" => options.artifacts = parsed(&value()?)?,
                "--rounds" => options.rounds = parsed(&value()?)?,
                "--nodes" => options.nodes = list(&value()?)?,
                "--clients" => options.clients = list(&value()?)?,
                "--systems" => options.systems = list(&value()?)?,
                _ => return Err(LedgerBenchError::Usage(format!("unknown option {argument}"))),
            }
        }
        Ok(options)
    }

    fn has(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }
}

fn parsed<T: FromStr>(text: &str) -> Result<T, LedgerBenchError> {
    text.parse().map_err(|_| LedgerBenchError::Usage(format!("{text} is not understood")))
}

fn list<T: FromStr>(text: &str) -> Result<Vec<T>, LedgerBenchError> {
    text.split(',').map(parsed).collect()
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = runtime.map_err(LedgerBenchError::system("start a runtime")).and_then(|runtime| {
        let mut arguments = std::env::args().skip(1).peekable();
        // Parts of the benchmark run in processes of their own.
        match arguments.peek().map(String::as_str) {
            Some("node") => runtime.block_on(node::run(&arguments.skip(1).collect::<Vec<_>>())),
            Some("scale") => runtime.block_on(run_scale(&arguments.skip(1).collect::<Vec<_>>())),
            _ => runtime.block_on(run(&Options::parse(arguments)?)),
        }
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Write errors are ignored: there is nobody left to tell if stderr is gone.
            let _ = writeln!(std::io::stderr(), "bench_ledger: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Folder that is deleted on drop.
struct ScratchFolder(PathBuf);

impl ScratchFolder {
    fn new(parent: &Path) -> Result<Self, LedgerBenchError> {
        let folder = parent.join(format!("ownerserve-bench-ledger-{}", std::process::id()));
        std::fs::create_dir_all(&folder).map_err(LedgerBenchError::system("make a folder"))?;
        Ok(Self(folder))
    }
}

impl Drop for ScratchFolder {
    fn drop(&mut self) {
        // A leftover folder lies where temporary files belong.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

async fn run(options: &Options) -> Result<(), LedgerBenchError> {
    let scratch = ScratchFolder::new(&options.folder)?;
    let mut results =
        LedgerBenchResults { fdatasync: disk::fdatasync(&scratch.0, options.window)?, ..LedgerBenchResults::default() };
    if options.has("writes") {
        let mut probes = vec![results.fdatasync];
        for nodes in options.nodes.iter().copied() {
            results.writes.extend(writes(&scratch.0, options, nodes, &mut probes).await?);
        }
        results.fdatasync = load::combine_runs(&probes);
    }
    if options.has("scale") {
        results.scale = Some(measure_scale_in_process(&scratch.0, options)?);
    }
    say(&report::table(&results))?;
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&results).expect("numbers and names make JSON");
        std::fs::write(path, json).map_err(LedgerBenchError::system("write the results"))?;
    }
    Ok(())
}

/// Measures the systems in turn, for each number of clients.
async fn writes(
    folder: &Path,
    options: &Options,
    nodes: usize,
    probes: &mut Vec<LoadStats>,
) -> Result<Vec<WriteResults>, LedgerBenchError> {
    let ours = ledger_cluster::LedgerCluster::start(folder, nodes).await?;
    let etcd = match options.systems.contains(&WriteSystem::Etcd) {
        true => Some(etcd::EtcdCluster::start(folder, nodes).await?),
        false => None,
    };
    let mut all = Vec::new();
    for clients in options.clients.iter().copied() {
        let mut found: [Vec<LoadStats>; 3] = Default::default();
        let mut beside = Vec::new();
        for round in 1..=options.rounds {
            scale::progress(&format!("{nodes} node(s), {clients} clients: round {round} of {}", options.rounds));
            beside.push(disk::fdatasync(folder, options.window)?);
            for system in options.systems.iter().copied() {
                let measured = match (system, &etcd) {
                    (WriteSystem::Embedded, _) => ours.run_embedded(clients, options.window).await?,
                    (WriteSystem::Ours, _) => measure_over_rpc(ours.leader, clients, options.window, system).await?,
                    (WriteSystem::Etcd, Some(etcd)) => {
                        measure_over_rpc(etcd.leader, clients, options.window, system).await?
                    }
                    (WriteSystem::Etcd, None) => continue,
                };
                found[system as usize].push(measured);
            }
        }
        let [embedded, ours, etcd] = found.map(|runs| load::combine_runs(&runs));
        all.push(WriteResults { nodes, clients, fdatasync: load::combine_runs(&beside), embedded, ours, etcd });
        probes.extend(beside);
    }
    scale::progress("");
    Ok(all)
}

/// System and interface that a write goes to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WriteSystem {
    /// Our leader, called inside its process.
    Embedded,
    /// Our leader, over gRPC.
    Ours,
    /// etcd's leader, over gRPC.
    Etcd,
}

impl WriteSystem {
    const ALL: [Self; 3] = [Self::Embedded, Self::Ours, Self::Etcd];
}

impl FromStr for WriteSystem {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        match name {
            "embedded" => Ok(Self::Embedded),
            "ours" => Ok(Self::Ours),
            "etcd" => Ok(Self::Etcd),
            _ => Err(()),
        }
    }
}

async fn measure_over_rpc(
    address: SocketAddr,
    clients: u64,
    window: Duration,
    system: WriteSystem,
) -> Result<LoadStats, LedgerBenchError> {
    let mut connections = Vec::new();
    for _ in 0..clients.div_ceil(16) {
        connections.push(GrpcConnection::open(address).await?);
    }
    load::run(clients, window, move |client, count| {
        let connection = connections[client as usize % connections.len()].clone();
        async move {
            match system {
                WriteSystem::Embedded | WriteSystem::Ours => ledger_cluster::write(&connection, client, count).await,
                WriteSystem::Etcd => etcd::put(&connection, client, count).await,
            }
        }
    })
    .await
}

fn measure_scale_in_process(folder: &Path, options: &Options) -> Result<ScaleResults, LedgerBenchError> {
    let own = std::env::current_exe().map_err(LedgerBenchError::system("find this program"))?;
    let mut command = Command::new(own);
    command.arg("scale").arg(options.artifacts.to_string()).arg(folder.join("scale"));
    command.arg((options.window * 10).as_millis().to_string());
    let done =
        command.stderr(std::process::Stdio::inherit()).output().map_err(LedgerBenchError::system("start a process"))?;
    serde_json::from_slice(&done.stdout).map_err(|error| LedgerBenchError::Answer {
        target: "the process with many artifacts".into(),
        got: format!("{error}: {}", String::from_utf8_lossy(&done.stdout)),
    })
}

async fn run_scale(arguments: &[String]) -> Result<(), LedgerBenchError> {
    let [artifacts, folder, window] = arguments else {
        return Err(LedgerBenchError::Usage("scale N FOLDER MS".into()));
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| LedgerBenchError::Usage(format!("{text} is no number")));
    let window = Duration::from_millis(number(window)?);
    let found = scale::run(number(artifacts)?, folder.into(), window).await?;
    say(&serde_json::to_string(&found).expect("numbers make JSON"))
}
