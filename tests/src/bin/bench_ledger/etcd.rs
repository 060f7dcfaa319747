//! etcd as packaged by Debian: a cluster of child processes that end with this one.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::LedgerBenchError;
use crate::process::{BenchProcess, free_addresses};
use crate::rpc::{GrpcConnection, ProtobufField, field, message};

const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// Running etcd cluster.
pub(crate) struct EtcdCluster {
    _members: Vec<BenchProcess>,
    /// Client address of the leader.
    pub(crate) leader: SocketAddr,
}

impl EtcdCluster {
    /// Starts `size` members in `folder` and waits for a leader.
    pub(crate) async fn start(folder: &Path, size: usize) -> Result<Self, LedgerBenchError> {
        let (clients, peers) = (free_addresses(size)?, free_addresses(size)?);
        let cluster: Vec<String> = (0..size).map(|n| format!("m{n}=http://{}", peers[n])).collect();
        let mut members = Vec::new();
        for n in 0..size {
            let (client, peer) = (format!("http://{}", clients[n]), format!("http://{}", peers[n]));
            let mut command = Command::new("etcd");
            command.args(["--name", &format!("m{n}"), "--log-level", "error", "--initial-cluster-state", "new"]);
            command.arg("--data-dir").arg(folder.join(format!("etcd-{size}-{n}")));
            command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.args(["--initial-cluster", &cluster.join(",")]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            members.push(BenchProcess::start("etcd", command)?);
        }
        let deadline = Instant::now() + READY_TIMEOUT;
        loop {
            if let Some(leader) = find_leader(&clients).await {
                return Ok(Self { _members: members, leader });
            }
            if Instant::now() > deadline {
                return Err(LedgerBenchError::Answer { target: "etcd".into(), got: "no leader".into() });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

async fn find_leader(clients: &[SocketAddr]) -> Option<SocketAddr> {
    for client in clients {
        let Ok(connection) = GrpcConnection::open(*client).await else { continue };
        let Ok(status) = connection.call("/etcdserverpb.Maintenance/Status", &[]).await else { continue };
        let Some(ProtobufField::Bytes(header)) = field(&status, 1) else { continue };
        let (Some(ProtobufField::Number(own)), Some(ProtobufField::Number(leader))) =
            (field(header, 2), field(&status, 4))
        else {
            continue;
        };
        if own == leader {
            return Some(*client);
        }
    }
    None
}

/// Sends one write.
pub(crate) async fn put(connection: &GrpcConnection, client: u64, count: u64) -> Result<(), LedgerBenchError> {
    let put = message(&[(1, &key(client, count)), (2, &[7; 64])]);
    connection.call("/etcdserverpb.KV/Put", &put).await.map(drop)
}

/// Key of a write in both systems: client and counter.
pub(crate) fn key(client: u64, count: u64) -> [u8; 16] {
    (u128::from(client) << 64 | u128::from(count)).to_be_bytes()
}
