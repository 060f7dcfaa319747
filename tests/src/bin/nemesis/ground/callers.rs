//! Whose connection it is, where all come from one address: the kernel's tables say which process holds the other end.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use crate::history::Seat;

/// Processes by seat.
#[derive(Default)]
pub(super) struct Callers {
    pids: HashMap<Seat, u32>,
}

impl Callers {
    pub(super) fn settle(&mut self, seat: Seat, pid: u32) {
        self.pids.insert(seat, pid);
    }

    /// The seat of the process that connected from `address`.
    pub(super) fn owner_of(&self, address: SocketAddr) -> Option<Seat> {
        let inode = inode_of(&std::fs::read_to_string("/proc/net/tcp").ok()?, address)?;
        let link = format!("socket:[{inode}]");
        let holds = |pid: &u32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).ok();
            let mut open = files.into_iter().flatten().flatten();
            open.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == link.as_str()))
        };
        self.pids.iter().find(|(_, pid)| holds(pid)).map(|(seat, _)| *seat)
    }
}

/// The socket whose local end is `address`, in the text of `/proc/net/tcp`.
fn inode_of(table: &str, address: SocketAddr) -> Option<u64> {
    let SocketAddr::V4(address) = address else { return None };
    let Ipv4Addr { .. } = address.ip();
    // The kernel prints the address as a number of its own byte order.
    let local = format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port());
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        (fields.get(1) == Some(&local.as_str())).then(|| fields.get(9)?.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_names_the_socket_of_this_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut callers = Callers::default();
        callers.settle(Seat(3), std::process::id());
        assert_eq!(callers.owner_of(caller.local_addr().unwrap()), Some(Seat(3)));
        assert_eq!(callers.owner_of("127.0.0.1:1".parse().unwrap()), None);
    }
}
