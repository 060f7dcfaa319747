//! Network of the nodes: a network namespace for each, connected through this program's own; or loopback if
//! namespaces are not available.
//!
//! Every node has a *shadow* address on this side, under which the other nodes know it. So all traffic between two
//! nodes passes the relay, and a rule for (node, shadow) drops exactly one direction of one link.

mod caller_pids;
mod disk;
mod network_backend;
mod relay;
mod syscall_faults;
mod veth;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

pub(crate) use disk::{cut_quarter, cut_tail, fill_disk, flip_byte, free_disk, mount_small, newest_chunk};
pub(crate) use network_backend::{NetworkBackend, enter_namespaces};
pub(crate) use relay::LinkCondition;
pub(crate) use syscall_faults::{SyscallFault, SyscallFaultInjector};

use crate::NemesisError;
use crate::history::MemberSlot;
use relay::TcpRelay;

/// Maximum number of nodes at once.
pub(crate) const MAX_SLOTS: u8 = 9;

/// Network under the nodes.
pub(crate) struct TestNetwork {
    isolation: NetworkBackend,
    relay: Arc<TcpRelay>,
    ports: Vec<u16>,
}

impl TestNetwork {
    /// Creates the links and starts the relay for every slot.
    pub(crate) async fn create() -> Result<TestNetwork, NemesisError> {
        let stage = NetworkBackend::current();
        if stage == NetworkBackend::Namespaces {
            veth::create_all(MAX_SLOTS).await?;
        }
        let relay = TcpRelay::new(stage);
        let mut ports = Vec::new();
        for seat in (1..=MAX_SLOTS).map(MemberSlot) {
            ports.push(relay.open(seat, relay_ip(stage, seat), own_ip(stage, seat)).await?);
        }
        Ok(TestNetwork { isolation: stage, relay, ports })
    }

    /// Namespaces or loopback.
    pub(crate) fn isolation(&self) -> NetworkBackend {
        self.isolation
    }

    /// Address of a node inside its own namespace.
    pub(crate) fn own_address(&self, slot: MemberSlot) -> IpAddr {
        own_ip(self.isolation, slot)
    }

    /// Address of this program as seen by nodes; workers listen there.
    pub(crate) fn host_address(&self) -> IpAddr {
        match self.isolation {
            NetworkBackend::Namespaces => veth::HOST_ADDRESS,
            NetworkBackend::Loopback => Ipv4Addr::LOCALHOST.into(),
        }
    }

    /// Address of a node for other nodes, through the relay. The node listens on the same port in its namespace.
    pub(crate) fn relay_address(&self, slot: MemberSlot) -> SocketAddr {
        SocketAddr::new(relay_ip(self.isolation, slot), self.ports[usize::from(slot.0) - 1])
    }

    /// Command prefix that starts a program in a node's namespace.
    pub(crate) fn launcher(&self, slot: MemberSlot) -> Vec<String> {
        match self.isolation {
            NetworkBackend::Namespaces => ["ip", "netns", "exec", &veth::namespace(slot)].map(str::to_owned).to_vec(),
            NetworkBackend::Loopback => Vec::new(),
        }
    }

    /// Registers a node's process with the relay, which cannot tell callers by address without namespaces.
    pub(crate) fn register_process(&self, slot: MemberSlot, pid: u32) {
        self.relay.register_process(slot, pid);
    }

    /// Drops all traffic from `from` to `to` until [`TestNetwork::restore`].
    pub(crate) async fn sever(&self, from: MemberSlot, to: MemberSlot) -> Result<(), NemesisError> {
        match self.isolation {
            NetworkBackend::Namespaces => veth::sever(from, relay_ip(self.isolation, to)).await,
            NetworkBackend::Loopback => {
                self.relay.set_condition(from, to, LinkCondition::Stalled);
                Ok(())
            }
        }
    }

    /// Undoes [`TestNetwork::sever`].
    pub(crate) async fn restore(&self, from: MemberSlot, to: MemberSlot) -> Result<(), NemesisError> {
        match self.isolation {
            NetworkBackend::Namespaces => veth::restore(from, relay_ip(self.isolation, to)).await,
            NetworkBackend::Loopback => {
                self.relay.set_condition(from, to, LinkCondition::Healthy);
                Ok(())
            }
        }
    }

    /// Sets how the relay treats traffic from `from` to `to`.
    pub(crate) fn set_condition(&self, from: MemberSlot, to: MemberSlot, condition: LinkCondition) {
        self.relay.set_condition(from, to, condition);
    }

    /// Bytes relayed, and connections cut for a nemesis.
    pub(crate) fn relay_counts(&self) -> (u64, u64) {
        self.relay.counts()
    }
}

fn own_ip(isolation: NetworkBackend, slot: MemberSlot) -> IpAddr {
    match isolation {
        NetworkBackend::Namespaces => Ipv4Addr::new(10, 77, slot.0, 2).into(),
        NetworkBackend::Loopback => Ipv4Addr::new(127, 77, slot.0, 1).into(),
    }
}

fn relay_ip(isolation: NetworkBackend, slot: MemberSlot) -> IpAddr {
    match isolation {
        NetworkBackend::Namespaces => Ipv4Addr::new(10, 78, slot.0, 1).into(),
        NetworkBackend::Loopback => Ipv4Addr::new(127, 78, slot.0, 1).into(),
    }
}
