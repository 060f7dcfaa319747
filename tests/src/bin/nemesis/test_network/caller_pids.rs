//! Identifies a connection's owner on loopback, where all have the same address, by the kernel's socket tables.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};

use crate::history::MemberSlot;

/// Number of reads of the kernel's table per socket.
const TABLE_READS: usize = 4;

/// Process ids by slot.
#[derive(Default)]
pub(super) struct CallerPids {
    pids: HashMap<MemberSlot, u32>,
}

impl CallerPids {
    pub(super) fn register(&mut self, slot: MemberSlot, pid: u32) {
        self.pids.insert(slot, pid);
    }

    /// Returns the slot of the process that connected from `address`.
    pub(super) fn owner_of(&self, address: SocketAddr) -> Option<MemberSlot> {
        // The kernel returns the table in pieces: a line may be missing while other sockets come and go.
        let read = || std::fs::read_to_string("/proc/net/tcp").ok();
        let inode = (0..TABLE_READS).find_map(|_| inode_of(&read()?, address))?;
        let link = format!("socket:[{inode}]");
        let holds = |pid: &u32| {
            let files = std::fs::read_dir(format!("/proc/{pid}/fd")).ok();
            let mut open = files.into_iter().flatten().flatten();
            open.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == link.as_str()))
        };
        self.pids.iter().find(|(_, pid)| holds(pid)).map(|(seat, _)| *seat)
    }
}

/// Returns the inode of the socket with this local address in the text of `/proc/net/tcp`. Closed sockets that linger
/// there have inode 0.
fn inode_of(table: &str, address: SocketAddr) -> Option<u64> {
    let SocketAddr::V4(address) = address else { return None };
    let Ipv4Addr { .. } = address.ip();
    // The kernel prints the address as a number in its own byte order.
    let local = format!("{:08X}:{:04X}", u32::from_ne_bytes(address.ip().octets()), address.port());
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let inode = (fields.get(1) == Some(&local.as_str())).then(|| fields.get(9)?.parse().ok())?;
        inode.filter(|inode| *inode != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_socket_table_names_the_calling_process() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let caller = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut callers = CallerPids::default();
        callers.register(MemberSlot(3), std::process::id());
        assert_eq!(callers.owner_of(caller.local_addr().unwrap()), Some(MemberSlot(3)));
        assert_eq!(callers.owner_of("127.0.0.1:1".parse().unwrap()), None);
    }

    #[test]
    fn a_lingering_closed_socket_is_not_mistaken_for_the_open_one() {
        let line = |inode: &str| format!("0: 0100007F:1F90 0200007F:0050 06 0:0 00:0 0 0 0 {inode} 3\n");
        let table = format!("head\n{}{}", line("0"), line("4711"));
        let address = "127.0.0.1:8080".parse().unwrap();
        if cfg!(target_endian = "little") {
            assert_eq!(inode_of(&table, address), Some(4711));
        }
        assert_eq!(inode_of("head\n", address), None);
    }
}
