//! Where other nodes call this one.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::OwnershipError;
use crate::peers::caller::Caller;
use crate::peers::certificate::complaint;
use crate::peers::handshake::{self, Hello};
use crate::peers::kept_out::KeptOut;
use crate::peers::lobby::{Lobby, Place};
use crate::peers::registry::Registry;
use crate::peers::serving::{self, Answerer};
use crate::peers::socket::{Directions, Stream};

/// Connections of members at once: five voters, a hundred learners, some lanes each.
const MAX_CONNECTIONS: usize = 1_024;

/// Callers that have not greeted yet, and those of one address.
const ARRIVING: (usize, usize) = (128, 48);

/// Callers that greeted and are no members, and those of one address: nodes that join, and whoever says that it is one.
const GUESTS: (usize, usize) = (64, 16);

/// How long a caller may take to greet, TLS included.
const ARRIVE_WITHIN: Duration = Duration::from_secs(5);

/// A bound address that nobody is served on yet.
pub(crate) struct Listener {
    socket: TcpListener,
    pub(crate) address: SocketAddr,
}

impl Listener {
    pub(crate) async fn bind(address: &str) -> Result<Self, OwnershipError> {
        let listen = |error: std::io::Error| OwnershipError::Listen { address: address.into(), why: error.to_string() };
        let socket = TcpListener::bind(address).await.map_err(listen)?;
        let address = socket.local_addr().map_err(listen)?;
        Ok(Self { socket, address })
    }

    /// Lets in whom the registry lets in, until it is dropped; every connection ends with it.
    pub(crate) async fn run<A: Answerer>(self: Arc<Self>, registry: Arc<Registry>, answerer: Arc<A>) {
        let rooms = Arc::new(Rooms {
            arriving: Lobby::new(ARRIVING.0, ARRIVING.1),
            guests: Lobby::new(GUESTS.0, GUESTS.1),
            members: Semaphore::new(MAX_CONNECTIONS),
        });
        let not_accepted = KeptOut::new("a connection could not be accepted; out of file handles, most likely");
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let (socket, from) = match self.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    not_accepted.note(&self.address, &error.to_string());
                    // The next attempt would fail at once, too.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (registry, answerer, rooms) = (registry.clone(), answerer.clone(), rooms.clone());
            let place = rooms.arriving.enter(from.ip());
            connections.spawn(async move {
                if let Err(error) = serve((socket, place), &registry, (answerer, &rooms)).await {
                    match complaint(&error) {
                        Some(why) => registry.failures.strangers.note(&from, &why),
                        None => tracing::debug!(%from, %error, "a connection of another node ended"),
                    }
                }
            });
        }
    }
}

/// Where callers are, by what they have shown.
struct Rooms {
    arriving: Arc<Lobby>,
    guests: Arc<Lobby>,
    members: Semaphore,
}

async fn serve<A: Answerer>(
    (socket, mut place): (TcpStream, Place),
    registry: &Registry,
    (answerer, rooms): (Arc<A>, &Rooms),
) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let from = socket.peer_addr()?.ip();
    let greet = async {
        let mut stream: Box<dyn Stream> = Box::new(socket);
        let mut certificate = None;
        if let Some(tls) = registry.tls() {
            let (protected, shown) = tls.accept(stream).await?;
            (stream, certificate) = (protected, Some(shown));
        }
        let hello: Hello = handshake::hear(&mut stream).await?;
        let greeted = registry.judge(&hello);
        handshake::say(&mut stream, &greeted).await?;
        Ok::<_, std::io::Error>(greeted.ok().map(|_| (stream, Caller { hello, certificate })))
    };
    let greeted = tokio::select! {
        greeted = timeout(ARRIVE_WITHIN, greet) => greeted.map_err(|_| std::io::ErrorKind::TimedOut)??,
        () = place.turned_out() => return Ok(()),
    };
    let Some((stream, caller)) = greeted else { return Ok(()) };
    drop(place);
    if registry.lists(&caller) {
        let Ok(_place) = rooms.members.try_acquire() else { return Err(std::io::ErrorKind::QuotaExceeded.into()) };
        return serving::serve(stream, Arc::new(caller), answerer).await;
    }
    let mut place = rooms.guests.enter(from);
    tokio::select! {
        served = serving::serve(stream, Arc::new(caller), answerer) => served,
        () = place.turned_out() => Ok(()),
    }
}
