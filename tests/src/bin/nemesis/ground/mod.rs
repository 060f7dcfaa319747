//! Where nodes live: a network namespace for each, joined through this program's own; or loopback where none can be made.
//!
//! Every node has a *shadow* address on this side. Other nodes know it by that one, so that all traffic between two
//! nodes goes through the relay, and a rule for (node, shadow) drops one direction of one link and nothing else.

mod callers;
mod disk;
mod levers;
mod relay;
mod stage;
mod wires;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

pub(crate) use disk::{ballast, cut, flip_a_byte, mount_small, newest_chunk, tear_the_end, unballast};
pub(crate) use levers::{Lever, Levers};
pub(crate) use relay::Weather;
pub(crate) use stage::{Stage, enter};

use crate::NemesisError;
use crate::history::Seat;
use relay::Relay;

/// Nodes that a run may have at once.
pub(crate) const SEATS: u8 = 9;

/// The network under the nodes.
pub(crate) struct Ground {
    stage: Stage,
    relay: Arc<Relay>,
    ports: Vec<u16>,
}

impl Ground {
    /// Lays the wires and opens the relay for every seat.
    pub(crate) async fn lay() -> Result<Ground, NemesisError> {
        let stage = Stage::current();
        if stage == Stage::Namespaces {
            wires::lay(SEATS).await?;
        }
        let relay = Relay::new(stage);
        let mut ports = Vec::new();
        for seat in (1..=SEATS).map(Seat) {
            ports.push(relay.open(seat, shadow(stage, seat), home(stage, seat)).await?);
        }
        Ok(Ground { stage, relay, ports })
    }

    /// Where this run takes place.
    pub(crate) fn stage(&self) -> Stage {
        self.stage
    }

    /// The address of a node inside its own namespace.
    pub(crate) fn home(&self, seat: Seat) -> IpAddr {
        home(self.stage, seat)
    }

    /// The address of this program, as nodes see it; workers listen there.
    pub(crate) fn hub(&self) -> IpAddr {
        match self.stage {
            Stage::Namespaces => wires::HUB,
            Stage::Loopback => Ipv4Addr::LOCALHOST.into(),
        }
    }

    /// Where other nodes reach a node: through the relay. A node listens for them on the same port at home.
    pub(crate) fn shadow(&self, seat: Seat) -> SocketAddr {
        SocketAddr::new(shadow(self.stage, seat), self.ports[usize::from(seat.0) - 1])
    }

    /// What a program that is to run in a node's place is started with.
    pub(crate) fn launcher(&self, seat: Seat) -> Vec<String> {
        match self.stage {
            Stage::Namespaces => ["ip", "netns", "exec", &wires::namespace(seat)].map(str::to_owned).to_vec(),
            Stage::Loopback => Vec::new(),
        }
    }

    /// Tells the relay whose connections come from this process; without namespaces it cannot tell by address.
    pub(crate) fn settle(&self, seat: Seat, pid: u32) {
        self.relay.settle(seat, pid);
    }

    /// Drops everything that `from` sends to `to`, until [`Ground::mend`].
    pub(crate) async fn sever(&self, from: Seat, to: Seat) -> Result<(), NemesisError> {
        match self.stage {
            Stage::Namespaces => wires::sever(from, shadow(self.stage, to)).await,
            Stage::Loopback => {
                self.relay.change(from, to, Weather::Stalled);
                Ok(())
            }
        }
    }

    /// Ends what [`Ground::sever`] began.
    pub(crate) async fn mend(&self, from: Seat, to: Seat) -> Result<(), NemesisError> {
        match self.stage {
            Stage::Namespaces => wires::mend(from, shadow(self.stage, to)).await,
            Stage::Loopback => {
                self.relay.change(from, to, Weather::Fair);
                Ok(())
            }
        }
    }

    /// Changes how the relay treats what `from` sends to `to`.
    pub(crate) fn weather(&self, from: Seat, to: Seat, weather: Weather) {
        self.relay.change(from, to, weather);
    }

    /// Bytes that the relay carried, and connections that it cut for the sake of a nemesis.
    pub(crate) fn carried(&self) -> (u64, u64) {
        self.relay.carried()
    }
}

fn home(stage: Stage, seat: Seat) -> IpAddr {
    match stage {
        Stage::Namespaces => Ipv4Addr::new(10, 77, seat.0, 2).into(),
        Stage::Loopback => Ipv4Addr::new(127, 77, seat.0, 1).into(),
    }
}

fn shadow(stage: Stage, seat: Seat) -> IpAddr {
    match stage {
        Stage::Namespaces => Ipv4Addr::new(10, 78, seat.0, 1).into(),
        Stage::Loopback => Ipv4Addr::new(127, 78, seat.0, 1).into(),
    }
}
