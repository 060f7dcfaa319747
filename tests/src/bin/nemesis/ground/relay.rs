//! A TCP relay between nodes: it hands bytes on in order, late, in bursts, not at all, or cuts a connection.
//!
//! To TCP's users a lossy link is one that stands still for a retransmission and is sometimes reset; that is what this does.

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

use super::callers::Callers;
use super::stage::Stage;
use crate::NemesisError;
use crate::dice::Dice;
use crate::history::Seat;

/// Pieces that may be on their way in one direction of one connection; with [`PIECE`] this bounds memory.
const IN_FLIGHT: usize = 256;
const PIECE: usize = 16 << 10;

/// How one direction of a link behaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Weather {
    /// As the kernel does it.
    #[default]
    Fair,
    /// Every piece arrives later, in order.
    Slow {
        /// At least by this.
        delay: Duration,
        /// And at most by this more.
        jitter: Duration,
    },
    /// Some pieces wait for a retransmission, some connections are reset.
    Lossy {
        /// Of a thousand pieces.
        stalled: u16,
        /// Of a thousand pieces.
        reset: u16,
    },
    /// Nothing arrives until the weather changes.
    Stalled,
}

/// What a lost segment costs: the kernel's shortest retransmission time-out.
const RETRANSMISSION: Duration = Duration::from_millis(200);

type Sky = HashMap<(Seat, Seat), Weather>;

/// All relayed links.
pub(super) struct Relay {
    stage: Stage,
    sky: watch::Sender<Sky>,
    callers: Mutex<Callers>,
    dice: Mutex<Dice>,
    bytes: AtomicU64,
    cut: AtomicU64,
}

impl Relay {
    pub(super) fn new(stage: Stage) -> Arc<Relay> {
        let (sky, _) = watch::channel(Sky::new());
        let dice = Mutex::new(Dice::new(1));
        let callers = Mutex::new(Callers::default());
        Arc::new(Relay { stage, sky, callers, dice, bytes: AtomicU64::new(0), cut: AtomicU64::new(0) })
    }

    /// Begins to listen for those who call `seat`; returns the port, which is the node's own at home.
    pub(super) async fn open(self: &Arc<Self>, seat: Seat, shadow: IpAddr, home: IpAddr) -> Result<u16, NemesisError> {
        let listener = TcpListener::bind((shadow, 0)).await.map_err(NemesisError::system("open the relay"))?;
        let port = listener.local_addr().map_err(NemesisError::system("open the relay"))?.port();
        let relay = self.clone();
        tokio::spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((caller, from)) => {
                        let relay = relay.clone();
                        // A link that breaks is what this is for; nobody waits for it.
                        tokio::spawn(async move { relay.carry(caller, from, (seat, (home, port).into())).await });
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

    pub(super) fn settle(&self, seat: Seat, pid: u32) {
        self.callers.lock().unwrap_or_else(PoisonError::into_inner).settle(seat, pid);
    }

    pub(super) fn change(&self, from: Seat, to: Seat, weather: Weather) {
        self.sky.send_modify(|sky| {
            sky.insert((from, to), weather);
        });
    }

    pub(super) fn carried(&self) -> (u64, u64) {
        (self.bytes.load(Relaxed), self.cut.load(Relaxed))
    }

    async fn carry(self: Arc<Self>, caller: TcpStream, from: SocketAddr, (to, home): (Seat, SocketAddr)) {
        let Some(seat) = self.seat_of(from) else { return };
        let Ok(callee) = self.call(seat, home).await else { return };
        if caller.set_nodelay(true).is_err() || callee.set_nodelay(true).is_err() {
            return;
        }
        let ((caller_reads, caller_writes), (callee_reads, callee_writes)) = (caller.into_split(), callee.into_split());
        // When either direction ends, both do: half-closed connections mean nothing between nodes.
        tokio::select! {
            () = self.hand_on((seat, to), caller_reads, callee_writes) => {}
            () = self.hand_on((to, seat), callee_reads, caller_writes) => {}
        }
    }

    fn seat_of(&self, from: SocketAddr) -> Option<Seat> {
        match (self.stage, from.ip()) {
            (Stage::Namespaces, IpAddr::V4(ip)) => Some(Seat(ip.octets()[2])),
            (Stage::Loopback, _) => self.callers.lock().unwrap_or_else(PoisonError::into_inner).owner_of(from),
            _ => None,
        }
    }

    /// Connects with the caller's shadow as the source, so that a rule against the answer finds it.
    async fn call(&self, caller: Seat, home: SocketAddr) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((super::shadow(self.stage, caller), 0).into())?;
        socket.connect(home).await
    }

    async fn hand_on(&self, link: (Seat, Seat), mut from: OwnedReadHalf, to: OwnedWriteHalf) {
        let (sender, arrivals) = mpsc::channel(IN_FLIGHT);
        let sending = async {
            let mut buffer = BytesMut::new();
            loop {
                buffer.reserve(PIECE);
                match from.read_buf(&mut buffer).await {
                    Ok(0) | Err(_) => return,
                    Ok(_) => {}
                }
                let Some(due) = self.due(link) else { return };
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

    /// When a piece that is sent now arrives; none when the connection is reset instead.
    fn due(&self, link: (Seat, Seat)) -> Option<Instant> {
        let mut dice = self.dice.lock().unwrap_or_else(PoisonError::into_inner);
        let late = match self.weather(link) {
            Weather::Fair | Weather::Stalled => Duration::ZERO,
            Weather::Slow { delay, jitter } => delay + jitter.mul_f64(dice.fraction()),
            Weather::Lossy { stalled, reset } => {
                let drawn = dice.below(1000) as u16;
                if drawn < reset {
                    self.cut.fetch_add(1, Relaxed);
                    return None;
                }
                if drawn < reset + stalled { RETRANSMISSION } else { Duration::ZERO }
            }
        };
        Some(Instant::now() + late)
    }

    async fn deliver(
        &self,
        link: (Seat, Seat),
        mut arrivals: mpsc::Receiver<(Instant, Bytes)>,
        mut to: OwnedWriteHalf,
    ) {
        let mut sky = self.sky.subscribe();
        while let Some((due, piece)) = arrivals.recv().await {
            tokio::time::sleep_until(due).await;
            let moves = |sky: &Sky| sky.get(&link) != Some(&Weather::Stalled);
            if sky.wait_for(moves).await.is_err() || to.write_all(&piece).await.is_err() {
                return;
            }
            self.bytes.fetch_add(piece.len() as u64, Relaxed);
        }
    }

    fn weather(&self, link: (Seat, Seat)) -> Weather {
        self.sky.borrow().get(&link).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CALLER: Seat = Seat(1);
    const CALLEE: Seat = Seat(2);

    /// A relay on loopback, a listener behind it, and a connection through it: the caller's end and the callee's.
    async fn linked(relay: &Arc<Relay>) -> (TcpStream, TcpStream) {
        relay.settle(CALLER, std::process::id());
        let (shadow, home) =
            (super::super::shadow(Stage::Loopback, CALLEE), super::super::home(Stage::Loopback, CALLEE));
        let port = relay.open(CALLEE, shadow, home).await.unwrap();
        let listener = TcpListener::bind((home, port)).await.unwrap();
        let caller = TcpStream::connect((shadow, port)).await.unwrap();
        let (callee, from) = listener.accept().await.unwrap();
        assert_eq!(from.ip(), super::super::shadow(Stage::Loopback, CALLER), "the caller's shadow is its source");
        (caller, callee)
    }

    async fn passes(from: &mut TcpStream, to: &mut TcpStream, text: &[u8]) {
        from.write_all(text).await.unwrap();
        let mut read = vec![0; text.len()];
        to.read_exact(&mut read).await.unwrap();
        assert_eq!(read, text);
    }

    #[tokio::test]
    async fn a_stalled_direction_holds_its_bytes_back_and_the_other_does_not() {
        let relay = Relay::new(Stage::Loopback);
        let (mut caller, mut callee) = linked(&relay).await;
        passes(&mut caller, &mut callee, b"one").await;
        passes(&mut callee, &mut caller, b"two").await;
        relay.change(CALLER, CALLEE, Weather::Stalled);
        caller.write_all(b"three").await.unwrap();
        let mut read = [0; 5];
        let early = tokio::time::timeout(Duration::from_millis(200), callee.read_exact(&mut read)).await;
        assert!(early.is_err(), "it arrived");
        passes(&mut callee, &mut caller, b"four").await;
        relay.change(CALLER, CALLEE, Weather::Fair);
        callee.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"three", "late, and not lost");
    }

    #[tokio::test]
    async fn slow_weather_delays_by_at_least_what_it_says() {
        let relay = Relay::new(Stage::Loopback);
        let (mut caller, mut callee) = linked(&relay).await;
        let delay = Duration::from_millis(60);
        relay.change(CALLER, CALLEE, Weather::Slow { delay, jitter: Duration::ZERO });
        let began = Instant::now();
        caller.write_all(b"late").await.unwrap();
        callee.read_exact(&mut [0; 4]).await.unwrap();
        assert!(began.elapsed() >= delay);
    }

    #[tokio::test]
    async fn lossy_weather_cuts_connections_at_both_ends() {
        let relay = Relay::new(Stage::Loopback);
        let (mut caller, mut callee) = linked(&relay).await;
        relay.change(CALLER, CALLEE, Weather::Lossy { stalled: 0, reset: 1000 });
        caller.write_all(b"gone").await.unwrap();
        assert_eq!(callee.read(&mut [0; 4]).await.unwrap_or(0), 0);
        assert_eq!(caller.read(&mut [0; 4]).await.unwrap_or(0), 0);
        assert_eq!(relay.carried().1, 1);
    }
}
