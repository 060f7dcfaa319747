//! TCP relay between nodes: forwards bytes in order, delayed, in bursts, or not at all, or cuts a connection.
//!
//! To TCP's users a lossy link stalls for a retransmission and is sometimes reset, and that is what the relay
//! simulates.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::caller_pids::CallerPids;
use super::network_backend::NetworkBackend;
use crate::NemesisError;
use crate::fault_rng::FaultRng;
use crate::history::MemberSlot;

/// Maximum pieces in flight in one direction of a connection; with [`PIECE_BYTES`] this bounds memory.
const MAX_PIECES_IN_FLIGHT: usize = 256;
const PIECE_BYTES: usize = 16 << 10;

/// Condition of one direction of a link.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum LinkCondition {
    /// Forwards immediately.
    #[default]
    Healthy,
    /// Every piece arrives later, in order.
    Slow {
        /// Minimum delay.
        delay: Duration,
        /// Maximum additional delay.
        jitter: Duration,
    },
    /// Some pieces wait for a retransmission, some connections are reset.
    Lossy {
        /// Stalled pieces per thousand.
        stalled: u16,
        /// Resets per thousand pieces.
        reset: u16,
    },
    /// Nothing arrives until the condition changes.
    Stalled,
}

/// Delay of a lost segment: the kernel's minimum retransmission timeout.
const RETRANSMISSION: Duration = Duration::from_millis(200);

type LinkConditions = HashMap<(MemberSlot, MemberSlot), LinkCondition>;

/// All relayed links.
pub(super) struct TcpRelay {
    isolation: NetworkBackend,
    conditions: watch::Sender<LinkConditions>,
    callers: Mutex<CallerPids>,
    rng: Mutex<FaultRng>,
    bytes: AtomicU64,
    cut_connections: AtomicU64,
}

impl TcpRelay {
    pub(super) fn new(isolation: NetworkBackend) -> Arc<TcpRelay> {
        let (sky, _) = watch::channel(LinkConditions::new());
        let dice = Mutex::new(FaultRng::new(1));
        let callers = Mutex::new(CallerPids::default());
        Arc::new(TcpRelay {
            isolation,
            conditions: sky,
            callers,
            rng: dice,
            bytes: AtomicU64::new(0),
            cut_connections: AtomicU64::new(0),
        })
    }

    /// Starts to listen for callers of `slot`; returns the port, which the node uses in its namespace, too.
    pub(super) async fn open(
        self: &Arc<Self>,
        slot: MemberSlot,
        shadow: IpAddr,
        home: IpAddr,
    ) -> Result<u16, NemesisError> {
        let listener = TcpListener::bind((shadow, 0)).await.map_err(NemesisError::system("open the relay"))?;
        let port = listener.local_addr().map_err(NemesisError::system("open the relay"))?.port();
        let relay = self.clone();
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((caller, from)) => {
                        let relay = relay.clone();
                        // Broken links are expected; nobody waits for this task.
                        tokio::spawn(
                            async move { relay.relay_connection(caller, from, (slot, (home, port).into())).await },
                        );
                    }
                    Err(error) => {
                        tracing::warn!(%error, "the relay could not accept");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
        });
        Ok(port)
    }

    pub(super) fn register_process(&self, slot: MemberSlot, pid: u32) {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner).register(slot, pid);
    }

    pub(super) fn set_condition(&self, from: MemberSlot, to: MemberSlot, condition: LinkCondition) {
        self.conditions.send_modify(|sky| {
            sky.insert((from, to), condition);
        });
    }

    pub(super) fn counts(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.cut_connections.load(Relaxed))
    }

    async fn relay_connection(
        self: Arc<Self>,
        caller: TcpStream,
        from: SocketAddr,
        (to, home): (MemberSlot, SocketAddr),
    ) {
        let Some(slot) = self.caller_slot(from) else { return };
        let Ok(callee) = self.connect_as(slot, home).await else { return };
        if caller.set_nodelay(true).is_err() || callee.set_nodelay(true).is_err() {
            return;
        }
        let ((caller_reads, caller_writes), (callee_reads, callee_writes)) = (caller.into_split(), callee.into_split());
        // When either direction ends, both do: half-closed connections have no meaning between nodes.
        tokio::select! {
            () = self.forward((slot, to), caller_reads, callee_writes) => {}
            () = self.forward((to, slot), callee_reads, caller_writes) => {}
        }
    }

    fn caller_slot(&self, from: SocketAddr) -> Option<MemberSlot> {
        match (self.isolation, from.ip()) {
            (NetworkBackend::Namespaces, IpAddr::V4(ip)) => Some(MemberSlot(ip.octets()[2])),
            (NetworkBackend::Loopback, _) => self.callers.lock().unwrap_or_else(PoisonError::into_inner).owner_of(from),
            _ => None,
        }
    }

    /// Connects with the caller's shadow as the source address, so that a rule for the reverse direction applies.
    async fn connect_as(&self, caller: MemberSlot, home: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((super::relay_ip(self.isolation, caller), 0).into())?;
        socket.connect(home).await
    }

    async fn forward(&self, link: (MemberSlot, MemberSlot), mut from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (sender, arrivals) = mpsc::channel(MAX_PIECES_IN_FLIGHT);
        let sending = async {
            let mut buffer = BytesMut::new();
            loop {
                buffer.reserve(PIECE_BYTES);
                match from.read_buf(&mut buffer).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                let Some(due) = self.delivery_time(link) else { return };
                if sender.send((due, buffer.split().freeze())).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = sending => {}
            () = self.deliver(link, arrivals, to) => {}
        }
    }

    /// Returns when a piece sent now arrives, or `None` if the connection is reset instead.
    fn delivery_time(&self, link: (MemberSlot, MemberSlot)) -> Option<Instant> {
        let mut dice = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let late = match self.condition(link) {
            LinkCondition::Healthy | LinkCondition::Stalled => Duration::ZERO,
            LinkCondition::Slow { delay, jitter } => delay + jitter.mul_f64(dice.fraction()),
            LinkCondition::Lossy { stalled, reset } => {
                let drawn = dice.below(1000) as u16;
                if drawn < reset {
                    self.cut_connections.fetch_add(1, Relaxed);
                    return None;
                }
                if drawn < reset + stalled { RETRANSMISSION } else { Duration::ZERO }
            }
        };
        Some(Instant::now() + late)
    }

    async fn deliver(
        &self,
        link: (MemberSlot, MemberSlot),
        mut arrivals: mpsc::Receiver<(Instant, Bytes)>,
        mut to: OwnedWriteHalf,
    ) {
        let mut sky = self.conditions.subscribe();
        while let Some((due, piece)) = arrivals.recv().await {
            tokio::time::sleep_until(due).await;
            let moves = |sky: &LinkConditions| sky.get(&link) != Some(&LinkCondition::Stalled);
            if sky.wait_for(moves).await.is_err() || to.write_all(&piece).await.is_err() {
                return;
            }
            self.bytes.fetch_add(piece.len() as u64, Relaxed);
        }
    }

    fn condition(&self, link: (MemberSlot, MemberSlot)) -> LinkCondition {
        self.conditions.borrow().get(&link).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: MemberSlot = MemberSlot(1);
    const CALLEE: MemberSlot = MemberSlot(2);

    /// Returns a connection through a relay on loopback: the caller's end and the callee's.
    async fn connected_pair(relay: &Arc<TcpRelay>) -> (TcpStream, TcpStream) {
        relay.register_process(CALLER, std::process::id());
        let (shadow, home) = (
            super::super::relay_ip(NetworkBackend::Loopback, CALLEE),
            super::super::own_ip(NetworkBackend::Loopback, CALLEE),
        );
        let port = relay.open(CALLEE, shadow, home).await.unwrap();
        let listener = TcpListener::bind((home, port)).await.unwrap();
        let caller = TcpStream::connect((shadow, port)).await.unwrap();
        let (callee, from) = listener.accept().await.unwrap();
        assert_eq!(
            from.ip(),
            super::super::relay_ip(NetworkBackend::Loopback, CALLER),
            "the caller's shadow is its source"
        );
        (caller, callee)
    }

    async fn assert_passes(from: &mut TcpStream, to: &mut TcpStream, text: &[u8]) {
        from.write_all(text).await.unwrap();
        let mut read = vec![0; text.len()];
        to.read_exact(&mut read).await.unwrap();
        assert_eq!(read, text);
    }

    #[tokio::test]
    async fn a_stalled_direction_withholds_bytes_and_the_other_does_not() {
        let relay = TcpRelay::new(NetworkBackend::Loopback);
        let (mut caller, mut callee) = connected_pair(&relay).await;
        assert_passes(&mut caller, &mut callee, b"one").await;
        assert_passes(&mut callee, &mut caller, b"two").await;
        relay.set_condition(CALLER, CALLEE, LinkCondition::Stalled);
        caller.write_all(b"three").await.unwrap();
        let mut read = [0; 5];
        let early = tokio::time::timeout(Duration::from_millis(200), callee.read_exact(&mut read)).await;
        assert!(early.is_err(), "it arrived");
        assert_passes(&mut callee, &mut caller, b"four").await;
        relay.set_condition(CALLER, CALLEE, LinkCondition::Healthy);
        callee.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"three", "late, and not lost");
    }

    #[tokio::test]
    async fn a_slow_link_delays_by_at_least_the_configured_time() {
        let relay = TcpRelay::new(NetworkBackend::Loopback);
        let (mut caller, mut callee) = connected_pair(&relay).await;
        let delay = Duration::from_millis(60);
        relay.set_condition(CALLER, CALLEE, LinkCondition::Slow { delay, jitter: Duration::ZERO });
        let began = Instant::now();
        caller.write_all(b"late").await.unwrap();
        callee.read_exact(&mut [0; 4]).await.unwrap();
        assert!(began.elapsed() >= delay);
    }

    #[tokio::test]
    async fn a_lossy_link_cuts_connections_at_both_ends() {
        let relay = TcpRelay::new(NetworkBackend::Loopback);
        let (mut caller, mut callee) = connected_pair(&relay).await;
        relay.set_condition(CALLER, CALLEE, LinkCondition::Lossy { stalled: 0, reset: 1000 });
        caller.write_all(b"gone").await.unwrap();
        assert_eq!(callee.read(&mut [0; 4]).await.unwrap_or(0), 0);
        assert_eq!(caller.read(&mut [0; 4]).await.unwrap_or(0), 0);
        assert_eq!(relay.counts().1, 1);
    }
}
