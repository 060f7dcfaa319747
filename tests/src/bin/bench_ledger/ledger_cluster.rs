//! Cluster of our nodes, each a process of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::load::LoadStats;
use crate::process::{BenchProcess, free_addresses};
use crate::rpc::{GrpcConnection, message};
use crate::{LedgerBenchError, etcd, node};

/// Running cluster.
pub(crate) struct LedgerCluster {
    _nodes: Vec<BenchProcess>,
    /// Client address of the leader.
    pub(crate) leader: SocketAddr,
}

impl LedgerCluster {
    /// Starts `size` nodes in `folder`, makes them voters and prepares them. The first node leads.
    pub(crate) async fn start(folder: &Path, size: usize) -> Result<Self, LedgerBenchError> {
        let peers = free_addresses(size)?;
        let (mut nodes, mut leader) = (Vec::new(), None);
        for n in 0..size {
            let (node, address) = start(&folder.join(format!("ours-{size}-{n}")), &peers[..=n])?;
            nodes.push(node);
            leader.get_or_insert(address);
        }
        let leader = leader.ok_or_else(|| LedgerBenchError::Usage("a cluster of no nodes".into()))?;
        let size = message(&[(1, &etcd::key(size as u64, 0))]);
        GrpcConnection::open(leader).await?.call(node::PREPARE_METHOD, &size).await?;
        Ok(Self { _nodes: nodes, leader })
    }

    /// Runs the writes inside the leader's process.
    pub(crate) async fn run_embedded(&self, clients: u64, window: Duration) -> Result<LoadStats, LedgerBenchError> {
        let asked = message(&[(1, &etcd::key(clients, window.as_millis() as u64))]);
        let answer = GrpcConnection::open(self.leader).await?.call(node::EMBEDDED_METHOD, &asked).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| LedgerBenchError::Answer { target: "a node".into(), got: error.to_string() })
    }
}

/// Starts a node whose peer address is the last of `peers`. It joins the first one, unless it is the first.
fn start(folder: &Path, peers: &[SocketAddr]) -> Result<(BenchProcess, SocketAddr), LedgerBenchError> {
    let own = std::env::current_exe().map_err(LedgerBenchError::system("find this program"))?;
    let mut command = Command::new(own);
    command.arg("node").arg(folder).args(peers.iter().rev().map(ToString::to_string));
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut node = BenchProcess::start("a node", command)?;
    let mut line = String::new();
    let said = node.0.stdout.take().map(|said| BufReader::new(said).read_line(&mut line));
    said.transpose().map_err(LedgerBenchError::system("hear from a node"))?;
    let address = line.trim().strip_prefix("ready ").and_then(|address| address.parse().ok());
    let address = address.ok_or_else(|| LedgerBenchError::Answer { target: "a node".into(), got: line })?;
    Ok((node, address))
}

/// Sends one write by gRPC.
pub(crate) async fn write(connection: &GrpcConnection, client: u64, count: u64) -> Result<(), LedgerBenchError> {
    // The same bytes as in etcd's put.
    let write = message(&[(1, &etcd::key(client, count)), (2, &[7; 64])]);
    connection.call(node::WRITE_METHOD, &write).await.map(drop)
}
