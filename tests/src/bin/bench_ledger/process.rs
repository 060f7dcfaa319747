//! Child processes that end with this one, and the lines that they print for it.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command};

use crate::LedgerBenchError;

/// Running process; killed on drop.
pub(crate) struct BenchProcess(pub(crate) Child);

impl BenchProcess {
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self, LedgerBenchError> {
        command.spawn().map(Self).map_err(LedgerBenchError::system(format!("start {name}")))
    }
}

impl Drop for BenchProcess {
    fn drop(&mut self) {
        // Both calls fail only if the process is already gone.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns distinct loopback addresses that nobody listens on.
pub(crate) fn free_addresses(count: usize) -> Result<Vec<SocketAddr>, LedgerBenchError> {
    let bind = |_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let listeners: Result<Vec<TcpListener>, _> = (0..count).map(bind).collect();
    let addresses = listeners.and_then(|all| all.iter().map(TcpListener::local_addr).collect());
    addresses.map_err(LedgerBenchError::system("find free ports"))
}

/// Prints a line and flushes.
pub(crate) fn say(line: &str) -> Result<(), LedgerBenchError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(LedgerBenchError::system("print"))
}
