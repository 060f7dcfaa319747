//! The accept loop: TCP in, HTTP/1.1 requests to a service, bounds on everything a client can make us hold.
//!
//! It knows no path and no API. `axum::serve` is not used because it gives hyper no timer, without which slow headers
//! are waited for for ever.

mod body;
mod connection;
pub(crate) mod tls;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::TokioTimer;
use prometheus::IntGauge;
use serde::Deserialize;
use smart_default::SmartDefault;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::config::units::{Size, Span};
pub(crate) use body::{BodyLimits, read_body, refuse};
pub use tls::{Tls, TlsConfig, TlsError};

/// Connections that the kernel holds until they are accepted.
const WAITING: u32 = 1024;

/// Section `[proxy]`: the listener for clients.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct ProxyConfig {
    /// Where to listen.
    #[default(SocketAddr::from(([127, 0, 0, 1], 8080)))]
    pub listen: SocketAddr,
    /// Largest body of a request, decompressed.
    #[default(Size::mebibytes(64))]
    pub body_limit: Size,
    /// Longest time for a request's headers, counted from the opened connection or the end of the last answer; also
    /// how long an idle connection is kept.
    #[default(Span::seconds(60))]
    pub header_timeout: Span,
    /// Longest pause inside a request's body.
    #[default(Span::seconds(30))]
    pub body_pause: Span,
    /// Longest time for a whole body.
    #[default(Span::seconds(300))]
    pub body_timeout: Span,
    /// Most open connections; more wait in the kernel's queue.
    #[default(16_384)]
    pub connections: usize,
    /// Longest time that running requests get when the process is asked to end.
    #[default(Span::seconds(30))]
    pub drain_timeout: Span,
}

/// What one listener allows.
#[derive(Clone, Copy, Debug)]
pub struct ServerLimits {
    /// See [`ProxyConfig::header_timeout`].
    pub header_timeout: Duration,
    /// See [`ProxyConfig::connections`].
    pub connections: usize,
    /// See [`ProxyConfig::drain_timeout`].
    pub drain_timeout: Duration,
}

/// An address that is taken and not listened on yet: whoever connects is refused.
#[derive(Debug)]
pub struct Bound {
    socket: TcpSocket,
    tls: Option<Arc<rustls::ServerConfig>>,
}

impl Bound {
    /// Takes `address` (port 0: any free one). Fails where somebody listens already.
    pub fn take(address: SocketAddr) -> std::io::Result<Self> {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        // As every listener of this process: connections of an earlier one that are closing keep no address.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok(Self { socket, tls: None })
    }

    /// Speaks only TLS there.
    pub fn with_tls(self, tls: &Tls) -> Self {
        Self { tls: Some(tls.server()), ..self }
    }
}

/// A listener at work. [`Server::stop`] ends it gently; dropping it cuts every connection.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
    places: Arc<Semaphore>,
    limits: ServerLimits,
}

impl Server {
    /// Serves `routes` at an address that was taken; `open` shows the connections.
    pub fn start(bound: Bound, routes: Router, limits: ServerLimits, open: IntGauge) -> std::io::Result<Self> {
        let listener = bound.socket.listen(WAITING)?;
        let address = listener.local_addr()?;
        let (stop, stopping) = watch::channel(false);
        let places = Arc::new(Semaphore::new(limits.connections));
        let accepting =
            Accepting { places: places.clone(), stopping, limits, open, tls: bound.tls.map(TlsAcceptor::from) };
        let accepting = tokio::spawn(accept(listener, routes, accepting));
        Ok(Self { address, stop, accepting, places, limits })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no new connections, lets running requests end within the drain time-out, then cuts what is left.
    ///
    /// Returns how many connections had to be cut.
    pub async fn stop(self) -> usize {
        let _ = self.stop.send(true);
        let _ = self.accepting.await;
        let all = u32::try_from(self.limits.connections).unwrap_or(u32::MAX);
        let drained = tokio::time::timeout(self.limits.drain_timeout, self.places.acquire_many(all)).await;
        match drained {
            Ok(_) => 0,
            // The connections' tasks see the channel close with `stop` and end.
            Err(_) => self.limits.connections.saturating_sub(self.places.available_permits()),
        }
    }
}

struct Accepting {
    places: Arc<Semaphore>,
    stopping: watch::Receiver<bool>,
    limits: ServerLimits,
    open: IntGauge,
    tls: Option<TlsAcceptor>,
}

async fn accept(listener: TcpListener, routes: Router, mut accepting: Accepting) {
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(accepting.limits.header_timeout).max_headers(256);
    let mut stopping = accepting.stopping.clone();
    loop {
        let place = tokio::select! {
            place = accepting.places.clone().acquire_owned() => place.expect("the semaphore is never closed"),
            _ = stopping.wait_for(|stop| *stop) => return,
        };
        let stream = tokio::select! {
            stream = next_stream(&listener) => stream,
            _ = accepting.stopping.wait_for(|stop| *stop) => return,
        };
        let remote = stream.peer_addr().ok().map(Remote);
        let (serving, stopping) = ((protocol.clone(), routes.clone()), accepting.stopping.clone());
        let (tls, patience) = (accepting.tls.clone(), accepting.limits.header_timeout);
        let open = accepting.open.clone();
        open.inc();
        tokio::spawn(async move {
            match tls {
                None => connection::drive((stream, remote), serving, stopping).await,
                Some(tls) => match timeout(patience, tls.accept(stream)).await {
                    Ok(Ok(stream)) => connection::drive((stream, remote), serving, stopping).await,
                    Ok(Err(error)) => tracing::debug!(%error, "a client did not speak TLS"),
                    Err(_) => tracing::debug!("a client's TLS took too long"),
                },
            }
            open.dec();
            drop(place);
        });
    }
}

/// The next client. Errors of `accept` (a client gone again, no file descriptors left) are waited out.
async fn next_stream(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Streamed answers are many small writes; with Nagle's algorithm each could wait 40 ms for an ACK.
                if stream.set_nodelay(true).is_ok() {
                    return stream;
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Where a request came from; rides on every request as an extension.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote(pub(crate) SocketAddr);

/// The routes as hyper wants a service; axum's never fails.
type Routed = Result<axum::response::Response, Infallible>;

#[cfg(test)]
mod tests;
