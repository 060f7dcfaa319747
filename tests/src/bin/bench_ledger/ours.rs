//! A cluster of our nodes, each a process of its own.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::load::Measured;
use crate::process::Running;
use crate::rpc::{Connection, message};
use crate::{BenchError, etcd, node};

/// A running cluster.
pub(crate) struct Ours {
    _nodes: Vec<Running>,
    /// Where the leader serves clients.
    pub(crate) leader: SocketAddr,
}

impl Ours {
    /// Starts one node in `folder` and prepares it.
    pub(crate) async fn start(folder: &Path) -> Result<Self, BenchError> {
        let own = std::env::current_exe().map_err(BenchError::system("find this program"))?;
        let mut command = Command::new(own);
        command.arg("node").arg(folder.join("ours-1-0"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut node = Running::start("a node", command)?;
        let said = node.0.stdout.take().map(BufReader::new);
        let mut line = String::new();
        said.map(|mut said| said.read_line(&mut line)).transpose().map_err(BenchError::system("hear from a node"))?;
        let address = line.trim().strip_prefix("ready ").and_then(|address| address.parse().ok());
        let leader = address.ok_or_else(|| BenchError::Answer { target: "a node".into(), got: line })?;
        Connection::open(leader).await?.call(node::PREPARE, &[]).await?;
        Ok(Self { _nodes: vec![node], leader })
    }

    /// Runs the writes inside the leader's process.
    pub(crate) async fn embedded(&self, clients: u64, window: Duration) -> Result<Measured, BenchError> {
        let asked = message(&[(1, &etcd::key(clients, window.as_millis() as u64))]);
        let answer = Connection::open(self.leader).await?.call(node::EMBEDDED, &asked).await?;
        serde_json::from_slice(&answer)
            .map_err(|error| BenchError::Answer { target: "a node".into(), got: error.to_string() })
    }
}

/// One write through the door.
pub(crate) async fn write(connection: &Connection, client: u64, count: u64) -> Result<(), BenchError> {
    // The same bytes as etcd's put.
    let write = message(&[(1, &etcd::key(client, count)), (2, &[7; 64])]);
    connection.call(node::WRITE, &write).await.map(drop)
}
