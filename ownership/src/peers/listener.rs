//! Listener for calls from other nodes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::LedgerNodeError;
use crate::peers::caller_identity::CallerIdentity;
use crate::peers::caller_limiter::{CallerPermit, UnprovenCallerLimiter};
use crate::peers::certificate::tls_complaint;
use crate::peers::handshake::{self, Hello};
use crate::peers::log_throttle::RejectionLog;
use crate::peers::registry::PeerRegistry;
use crate::peers::served_connection::{self, ExchangeHandler};
use crate::peers::socket::DialDelegate;
use crate::peers::tls::ByteStream;

/// Maximum number of members' connections: five voters and a hundred learners with a few lanes each.
const MAX_CONNECTIONS: usize = 1_024;

/// Maximum number of callers in the handshake, in total and per address.
const MAX_HANDSHAKING: (usize, usize) = (128, 48);

/// Maximum number of greeted callers that are not members, in total and per address: joining nodes, and whoever claims
/// to be one.
const MAX_NON_MEMBERS: (usize, usize) = (64, 16);

/// Timeout of the handshake, including TLS.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// A bound address that does not accept connections yet.
pub(crate) struct PeerListener {
    socket: TcpListener,
    pub(crate) address: SocketAddr,
}

impl PeerListener {
    pub(crate) async fn bind(address: &str) -> Result<Self, LedgerNodeError> {
        let listen =
            |error: std::io::Error| LedgerNodeError::Listen { address: address.into(), why: error.to_string() };
        let socket = TcpListener::bind(address).await.map_err(listen)?;
        let address = socket.local_addr().map_err(listen)?;
        Ok(Self { socket, address })
    }

    /// Accepts the callers that the registry accepts, until it is dropped; all connections end with it.
    pub(crate) async fn run<A: ExchangeHandler>(self: Arc<Self>, registry: Arc<PeerRegistry>, answerer: Arc<A>) {
        let limits = Arc::new(CallerLimiters {
            handshaking: UnprovenCallerLimiter::new(MAX_HANDSHAKING.0, MAX_HANDSHAKING.1),
            non_members: UnprovenCallerLimiter::new(MAX_NON_MEMBERS.0, MAX_NON_MEMBERS.1),
            members: Semaphore::new(MAX_CONNECTIONS),
        });
        let not_accepted = RejectionLog::new("a connection could not be accepted; out of file handles, most likely");
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            let (socket, from) = match self.socket.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    not_accepted.record(&self.address, &error.to_string());
                    // The next attempt would fail at once, too.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let (registry, answerer, limits) = (registry.clone(), answerer.clone(), limits.clone());
            let place = limits.handshaking.admit(from.ip());
            connections.spawn(async move {
                if let Err(error) = serve((socket, place), &registry, (answerer, &limits)).await {
                    match tls_complaint(&error) {
                        Some(why) => registry.failures.tls_refusals.record(&from, &why),
                        None => tracing::debug!(%from, %error, "a connection of another node ended"),
                    }
                }
            });
        }
    }
}

/// Limiters of callers, by what they have proven.
struct CallerLimiters {
    handshaking: Arc<UnprovenCallerLimiter>,
    non_members: Arc<UnprovenCallerLimiter>,
    members: Semaphore,
}

async fn serve<A: ExchangeHandler>(
    (socket, mut place): (TcpStream, CallerPermit),
    registry: &PeerRegistry,
    (answerer, limits): (Arc<A>, &CallerLimiters),
) -> std::io::Result<()> {
    socket.set_nodelay(true)?;
    let from = socket.peer_addr()?.ip();
    let greet = async {
        let mut stream: Box<dyn ByteStream> = Box::new(socket);
        let mut certificate = None;
        if let Some(tls) = registry.tls() {
            let (protected, shown) = tls.accept(stream).await?;
            (stream, certificate) = (protected, Some(shown));
        }
        let hello: Hello = handshake::receive_message(&mut stream).await?;
        let greeted = registry.check_hello(&hello);
        handshake::send_message(&mut stream, &greeted).await?;
        Ok::<_, std::io::Error>(greeted.ok().map(|_| (stream, CallerIdentity { hello, certificate })))
    };
    let greeted = tokio::select! {
        greeted = timeout(HANDSHAKE_TIMEOUT, greet) => greeted.map_err(|_| std::io::ErrorKind::TimedOut)??,
        () = place.wait_evicted() => return Ok(()),
    };
    let Some((stream, caller)) = greeted else { return Ok(()) };
    drop(place);
    if registry.is_member(&caller) {
        let Ok(_place) = limits.members.try_acquire() else { return Err(std::io::ErrorKind::QuotaExceeded.into()) };
        return served_connection::serve(stream, Arc::new(caller), answerer).await;
    }
    let mut place = limits.non_members.admit(from);
    tokio::select! {
        served = served_connection::serve(stream, Arc::new(caller), answerer) => served,
        () = place.wait_evicted() => Ok(()),
    }
}
