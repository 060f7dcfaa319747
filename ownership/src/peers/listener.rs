//! Where other nodes call this one.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::OwnershipError;
use crate::peers::caller::Caller;
use crate::peers::certificate::complaint;
use crate::peers::handshake::{self, Hello};
use crate::peers::registry::Registry;
use crate::peers::serving::{self, Answerer};
use crate::peers::socket::{Directions, GREET_WITHIN, Stream};

/// Connections at once: five voters, a hundred learners, some lanes each.
const MAX_CONNECTIONS: usize = 1_024;

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
    pub(crate) async fn run<A: Answerer>(self, registry: Arc<Registry>, answerer: Arc<A>) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let Ok(place) = room.clone().acquire_owned().await else { return };
            let (socket, from) = match self.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    // Out of file handles, most likely; the next attempt would fail at once, too.
                    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (registry, answerer) = (registry.clone(), answerer.clone());
            connections.spawn(async move {
                let _place = place;
                if let Err(error) = serve(socket, &registry, answerer).await {
                    match complaint(&error) {
                        Some(why) => registry.failures.strangers.note(&from, &why),
                        None => tracing::debug!(%from, %error, "a connection of another node ended"),
                    }
                }
            });
        }
    }
}

async fn serve<A: Answerer>(socket: TcpStream, registry: &Registry, answerer: Arc<A>) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
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
    let greeted = timeout(GREET_WITHIN, greet).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    match greeted {
        Some((stream, caller)) => serving::serve(stream, Arc::new(caller), answerer).await,
        None => Ok(()),
    }
}
