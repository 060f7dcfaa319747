//! Processes that end with this one.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command};

use crate::BenchError;

/// A running process; killed when this is dropped.
pub(crate) struct Running(pub(crate) Child);

impl Running {
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self, BenchError> {
        command.spawn().map(Self).map_err(BenchError::system(format!("start {name}")))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Addresses that nobody listens on, all different.
pub(crate) fn free_addresses(count: usize) -> Result<Vec<SocketAddr>, BenchError> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listeners: Result<Vec<TcpListener>, _> = (0..count).map(bind).collect();
    let addresses = listeners.and_then(|all| all.iter().map(TcpListener::local_addr).collect());
    addresses.map_err(BenchError::system("find free ports"))
}
