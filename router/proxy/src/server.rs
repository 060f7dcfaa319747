//! HTTP server: accepts TCP connections, passes HTTP/1.1 requests to a service, and bounds everything that a client can
//! make it hold.
//!
//! It knows no path and no API. `axum::serve` is not used because it gives hyper no timer, and then slow headers have
//! no timeout.

mod answer_phase;
mod body;
mod connection;
pub mod descriptors;
mod head_refusal;
mod minimum_rate_writer;
pub mod tls;
mod unauthenticated;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use ownership::SupervisedTasks;
use prometheus::{IntCounter, IntGauge};
use serde::Deserialize;
use smart_default::SmartDefault;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use vocabulary::{ByteCount, TimeSpan};

pub use body::{BodyLimits, drain_rejected, read_body};
use connection::{ConnectionSetup, UnauthenticatedClient};
pub use tls::{ListenerTls, ListenerTlsConfig, TlsError};
use unauthenticated::UnauthenticatedConnections;
pub use unauthenticated::UnauthenticatedLimits;
pub use unauthenticated::{ClosedConnections, UnauthenticatedPermit};

use crate::error::{ApiError, ErrorFormat, ErrorRecipient};
use crate::request_id::new_request_id;

/// Length of the kernel's accept queue.
const ACCEPT_BACKLOG: u32 = 1024;
/// Maximum size of a request's head, in bytes.
const MAX_HEAD_BYTES: usize = 64 << 10;
/// Maximum number of a request's headers.
const MAX_HEADERS: usize = 256;
/// Maximum length of path and query, in bytes.
const LONGEST_URI: usize = 32 << 10;
/// TCP keepalive: idle time after which the kernel probes whether the peer is still there.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(60);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// How long a new connection waits for room before idle ones are closed for it, and then before more are; doubled up to
/// the maximum while there is none.
const ROOM_INTERVAL: Duration = Duration::from_millis(250);
const MAX_ROOM_INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of idle connections that are closed at once.
const MAX_CLOSED_AT_ONCE: usize = 64;
/// Minimum time between two logged warnings of the same kind.
const WARN_INTERVAL: Duration = Duration::from_secs(10);

/// Section `[proxy]`: the listener for clients.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct ProxyConfig {
    /// Address to listen on.
    #[default(SocketAddr::from(([127, 0, 0, 1], 8080)))]
    pub listen: SocketAddr,
    /// Largest request body after decompression.
    #[default(ByteCount::mebibytes(64))]
    pub body_limit: ByteCount,
    /// Memory for all requests in progress: bodies, what they inflate to and what is derived from them. With API keys
    /// one tenant gets half of it.
    #[default(ByteCount::mebibytes(2048))]
    pub request_memory_limit: ByteCount,
    /// Timeout for a request's headers, from the opened connection or the end of the previous answer; also how long an
    /// idle connection is kept.
    #[default(TimeSpan::seconds(60))]
    pub header_timeout: TimeSpan,
    /// Maximum pause inside a request's body.
    #[default(TimeSpan::seconds(30))]
    pub body_idle_timeout: TimeSpan,
    /// Timeout for a whole body.
    #[default(TimeSpan::seconds(300))]
    pub body_timeout: TimeSpan,
    /// Period in which a client must take at least 256 bytes a second of what waits for it.
    #[default(TimeSpan::seconds(60))]
    pub write_timeout: TimeSpan,
    /// Maximum number of open connections; beyond it idle ones are closed for new ones, which wait until there is room.
    /// Lowered if the process may not open that many files.
    #[default(16_384)]
    pub max_connections: usize,
    /// Maximum number of unauthenticated connections; beyond it the oldest is closed for a new one.
    #[default(2_048)]
    pub max_unauthenticated_connections: usize,
    /// Maximum number of unauthenticated connections per address (IPv6: per /64).
    #[default(1_024)]
    pub max_unauthenticated_connections_per_address: usize,
    /// How long a connection may stay unauthenticated: TLS handshake and the first request's headers together.
    #[default(TimeSpan::seconds(5))]
    pub authentication_timeout: TimeSpan,
    /// Certificate and key; without them clients speak plain HTTP.
    pub tls: Option<ListenerTlsConfig>,
    /// Maximum time that running requests get at shutdown.
    #[default(TimeSpan::seconds(30))]
    pub drain_timeout: TimeSpan,
}

impl ProxyConfig {
    /// Returns the path of a setting that is out of range, and what is accepted.
    pub fn problem(&self) -> Option<(&'static str, &'static str)> {
        const ACCEPTED: &str = "accepted is 1 to 1000000";
        let counts = [
            ("proxy.max_connections", self.max_connections),
            ("proxy.max_unauthenticated_connections", self.max_unauthenticated_connections),
            ("proxy.max_unauthenticated_connections_per_address", self.max_unauthenticated_connections_per_address),
        ];
        if let Some((path, _)) = counts.into_iter().find(|(_, count)| !(1..=1_000_000).contains(count)) {
            return Some((path, ACCEPTED));
        }
        let is_span = (TimeSpan::millis(100)..=TimeSpan::seconds(300)).contains(&self.authentication_timeout);
        (!is_span).then_some(("proxy.authentication_timeout", "accepted is \"100ms\" to \"5m\""))
    }
}

/// Limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// See [`ProxyConfig::write_timeout`].
    pub write_timeout: Duration,
    /// Limits for unauthenticated connections; `None` for a listener whose peers are known.
    pub unauthenticated: Option<UnauthenticatedLimits>,
    /// See [`ProxyConfig::header_timeout`].
    pub header_timeout: Duration,
    /// See [`ProxyConfig::max_connections`].
    pub connections: usize,
    /// See [`ProxyConfig::drain_timeout`].
    pub drain_timeout: Duration,
}

/// Encodes the error of a head that reaches no route, for a listener's clients. The path is empty where none is known.
pub type HeadErrorEncoder = fn(&ApiError, path: &str) -> Response;

/// Encodes an error in the format of the client's API.
fn api_error_response(error: &ApiError, path: &str) -> Response {
    error.response(ErrorRecipient { format: ErrorFormat::of(path), request: new_request_id() })
}

/// A bound address that is not listening yet: connections are refused.
#[derive(Debug)]
pub struct BoundSocket {
    socket: TcpSocket,
    tls: Option<Arc<rustls::ServerConfig>>,
    encode: HeadErrorEncoder,
}

impl BoundSocket {
    /// Binds `address` (port 0: any free one). Fails where another socket is listening already.
    pub fn bind(address: SocketAddr) -> std::io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // As for every listener of this process: closing connections of an earlier one do not block the address.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { socket, tls: None, encode: api_error_response })
    }

    /// Accepts only TLS on this socket.
    pub fn with_tls(self, tls: &ListenerTls) -> Self {
        Self { tls: Some(tls.server()), ..self }
    }

    /// Encodes errors of heads in this way, not in the format of the client's API.
    pub fn with_head_errors(self, encode: HeadErrorEncoder) -> Self {
        Self { encode, ..self }
    }
}

/// Metrics of a listener's connections.
#[derive(Clone, Debug)]
pub struct ConnectionMetrics {
    /// Number of open connections.
    pub open: IntGauge,
    /// Connections that were closed before they had authenticated.
    pub closed: ClosedConnections,
    /// Idle connections that were closed because a new one waited for room.
    pub idle_closed: IntCounter,
}

impl From<IntGauge> for ConnectionMetrics {
    fn from(open: IntGauge) -> Self {
        let idle_closed = IntCounter::new("idle_closed", "not shown").expect("a valid name");
        Self { open, closed: ClosedConnections::unseen(), idle_closed }
    }
}

/// A running listener. [`HttpServer::stop`] ends it gracefully; dropping it cuts every connection.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    stop: Arc<watch::Sender<bool>>,
    acceptor: JoinHandle<()>,
    connection_permits: Arc<Semaphore>,
    limits: ServerLimits,
}

impl HttpServer {
    /// Serves `routes` on a bound socket; `counts` gets the connection metrics.
    pub fn start(
        bound: BoundSocket,
        routes: Router,
        limits: ServerLimits,
        counts: impl Into<ConnectionMetrics>,
    ) -> std::io::Result<Self> {
        Self::start_supervised(bound, routes, limits, counts, (&Arc::default(), "listener"))
    }

    /// Like [`Self::start`], with an accept loop that is supervised under this name.
    pub fn start_supervised(
        bound: BoundSocket,
        routes: Router,
        limits: ServerLimits,
        counts: impl Into<ConnectionMetrics>,
        (tasks, name): (&Arc<SupervisedTasks>, &'static str),
    ) -> std::io::Result<Self> {
        let ConnectionMetrics { open, closed, idle_closed } = counts.into();
        let listener = bound.socket.listen(ACCEPT_BACKLOG)?;
        let address = listener.local_addr()?;
        let (stop, stopping) = watch::channel(false);
        let stop = Arc::new(stop);
        let connection_permits = Arc::new(Semaphore::new(limits.connections));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_headers(MAX_HEADERS);
        http.max_buf_size(MAX_HEAD_BYTES);
        let accepting = ConnectionAcceptor {
            permits: connection_permits.clone(),
            stop: Arc::downgrade(&stop),
            stopping,
            protocol: ConnectionSetup {
                http,
                routes,
                encode: bound.encode,
                write_timeout: limits.write_timeout,
                room_needed: Arc::default(),
                idle_closed,
            },
            first_header_timeout: limits.header_timeout,
            unauthenticated: limits.unauthenticated.map(|limits| UnauthenticatedConnections::new(limits, closed)),
            open,
            tls: bound.tls.map(TlsAcceptor::from),
        };
        let listener = Arc::new(listener);
        let accepting = tasks.supervise(name, move || accept(listener.clone(), accepting.clone()));
        Ok(Self { address, stop, acceptor: accepting, connection_permits, limits })
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts no new connections, lets running requests end within the drain timeout, then cuts what is left.
    ///
    /// Returns how many connections had to be cut.
    pub async fn stop(self) -> usize {
        self.stop.send_replace(true);
        let _ = self.acceptor.await;
        let all = u32::try_from(self.limits.connections).unwrap_or(u32::MAX);
        let drained = tokio::time::timeout(self.limits.drain_timeout, self.connection_permits.acquire_many(all)).await;
        match drained {
            Ok(_) => 0,
            // The channel closes when this returns, which ends the tasks of the remaining connections.
            Err(_) => self.limits.connections.saturating_sub(self.connection_permits.available_permits()),
        }
    }
}

#[derive(Clone)]
struct ConnectionAcceptor {
    permits: Arc<Semaphore>,
    /// Upgrades as long as the listener runs: dropping it cuts every connection.
    stop: Weak<watch::Sender<bool>>,
    stopping: watch::Receiver<bool>,
    protocol: ConnectionSetup,
    /// Timeout for the first request's headers, where connections need not authenticate.
    first_header_timeout: Duration,
    unauthenticated: Option<Arc<UnauthenticatedConnections>>,
    open: IntGauge,
    tls: Option<TlsAcceptor>,
}

impl ConnectionAcceptor {
    fn register_client(&self, stream: &TcpStream) -> UnauthenticatedClient {
        let remote = stream.peer_addr().ok().map(RemoteAddr);
        let now = Instant::now();
        match (&self.unauthenticated, remote) {
            (Some(all), Some(RemoteAddr(address))) => {
                let (authentication, closed) = all.add(address.ip());
                let patience = all.timeout().min(self.first_header_timeout);
                UnauthenticatedClient { remote, authentication, evicted: closed, authenticates_until: now + patience }
            }
            // The sender is dropped, so that the connection is never evicted for another one.
            _ => UnauthenticatedClient {
                remote,
                authentication: UnauthenticatedPermit::not_required(),
                evicted: oneshot::channel().1,
                authenticates_until: now + self.first_header_timeout,
            },
        }
    }
}

impl ConnectionAcceptor {
    /// Waits for room for a connection that was accepted. Idle connections are closed for it: one client could otherwise
    /// hold all.
    async fn acquire_room(&self, warnings: &mut RareWarning) -> OwnedSemaphorePermit {
        let mut interval = ROOM_INTERVAL;
        loop {
            if let Ok(permit) = timeout(interval, self.permits.clone().acquire_owned()).await {
                self.protocol.room_needed.store(0, Ordering::Relaxed);
                return permit.expect("the semaphore is never closed");
            }
            interval = (2 * interval).min(MAX_ROOM_INTERVAL);
            self.protocol.room_needed.store(MAX_CLOSED_AT_ONCE, Ordering::Relaxed);
            if let Some(stop) = self.stop.upgrade() {
                // Wakes every connection; nothing else changes.
                stop.send_modify(|_| {});
            }
            if let Some(times) = warnings.record(Instant::now()) {
                tracing::warn!(
                    times,
                    "all connections of a listener are in use: idle ones are closed for new ones; see proxy.max_connections"
                );
            }
        }
    }
}

/// Counts an open connection, even if its task panics.
struct OpenConnectionGuard(IntGauge);

impl OpenConnectionGuard {
    fn count(open: &IntGauge) -> Self {
        open.inc();
        Self(open.clone())
    }
}

impl Drop for OpenConnectionGuard {
    fn drop(&mut self) {
        self.0.dec();
    }
}

async fn accept(listener: Arc<TcpListener>, accepting: ConnectionAcceptor) {
    let mut stopping = accepting.stopping.clone();
    let (mut warnings, mut room_warnings) = (RareWarning::default(), RareWarning::default());
    loop {
        let accepted = async {
            let stream = next_stream(&listener, &mut warnings).await;
            (stream, accepting.acquire_room(&mut room_warnings).await)
        };
        let (stream, permit) = tokio::select! {
            accepted = accepted => accepted,
            _ = stopping.wait_for(|stop| *stop) => return,
        };
        let client = accepting.register_client(&stream);
        let (protocol, stopping) = (accepting.protocol.clone(), accepting.stopping.clone());
        let tls = accepting.tls.clone();
        let open = OpenConnectionGuard::count(&accepting.open);
        tokio::spawn(async move {
            match tls {
                None => connection::drive(stream, client, protocol, stopping).await,
                Some(tls) => serve_tls(stream, tls, (client, protocol, stopping)).await,
            }
            drop((open, permit));
        });
    }
}

/// Serves a connection after its TLS handshake, which must end within the time that its client may stay
/// unauthenticated.
async fn serve_tls(
    stream: TcpStream,
    tls: TlsAcceptor,
    (mut client, protocol, stopping): (UnauthenticatedClient, ConnectionSetup, watch::Receiver<bool>),
) {
    let handshake = timeout_at(client.authenticates_until, tls.accept(stream));
    tokio::pin!(handshake);
    let mut is_bounded = true;
    let handshake = loop {
        tokio::select! {
            done = &mut handshake => break done,
            surplus = &mut client.evicted, if is_bounded => match surplus {
                Ok(()) => return,
                Err(_) => is_bounded = false,
            },
        }
    };
    match handshake {
        Ok(Ok(stream)) => {
            if !is_bounded {
                client.evicted = oneshot::channel().1;
            }
            connection::drive(stream, client, protocol, stopping).await;
        }
        Ok(Err(error)) => tracing::debug!(%error, "a client did not speak TLS"),
        Err(_) => {
            client.authentication.timed_out();
            tracing::debug!("a client's TLS took too long");
        }
    }
}

/// Accepts the next client. Waits and retries on errors of `accept` (a client gone again, no file descriptors left).
async fn next_stream(listener: &TcpListener, warnings: &mut RareWarning) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Streamed answers are many small writes; with Nagle's algorithm each could wait 40 ms for an ACK.
                let is_set = stream.set_nodelay(true).is_ok();
                let keepalive = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
                if is_set && SockRef::from(&stream).set_tcp_keepalive(&keepalive).is_ok() {
                    return stream;
                }
            }
            Err(error) => {
                if let Some(times) = warnings.record(Instant::now()) {
                    tracing::warn!(%error, times, "connections could not be accepted");
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Rate limit for a warning: once per [`WARN_INTERVAL`], with the number of occurrences since the last one.
#[derive(Debug, Default)]
struct RareWarning {
    last_logged: Option<Instant>,
    suppressed: u64,
}

impl RareWarning {
    /// Counts an occurrence. Returns the number since the last warning if one is due now.
    fn record(&mut self, now: Instant) -> Option<u64> {
        self.suppressed += 1;
        if self.last_logged.is_some_and(|said| now.duration_since(said) < WARN_INTERVAL) {
            return None;
        }
        self.last_logged = Some(now);
        Some(std::mem::take(&mut self.suppressed))
    }
}

/// Address of the client; attached to every request as an extension.
#[derive(Clone, Copy, Debug)]
pub struct RemoteAddr(pub SocketAddr);

/// Result of the routes as a hyper service; axum's never fails.
type RouteResult = Result<Response, Infallible>;

#[cfg(test)]
mod tests;
