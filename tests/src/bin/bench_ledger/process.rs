//! Processes that end with this one.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command};

use crate::LedgerBenchError;

/// A running process; killed when this is dropped.
pub(crate) struct BenchProcess(pub(crate) Child);

impl BenchProcess {
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self, LedgerBenchError> {
        command.spawn().map(Self).map_err(LedgerBenchError::system(format!("start {name}")))
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Addresses that nobody listens on, all different.
pub(crate) fn free_addresses(count: usize) -> Result<Vec<SocketAddr>, LedgerBenchError> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listeners: Result<Vec<TcpListener>, _> = (0..count).map(bind).collect();
    let addresses = listeners.and_then(|all| all.iter().map(TcpListener::local_addr).collect());
    addresses.map_err(LedgerBenchError::system("find free ports"))
}
