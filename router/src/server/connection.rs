//! Serves one client connection from its first byte to its last.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tokio_io_timeout::TimeoutWriter;
use tower::Service as _;

use super::unauthenticated::UnauthenticatedPermit;
use super::{LONGEST_URI, MAX_HEAD_BYTES, RemoteAddr, RouteResult};
use crate::client_request::new_request_id;
use crate::error::{ApiError, ErrorFormat, ErrorRecipient, headers_timeout_response};

/// A client's address, and until when its connection must authenticate.
pub(super) struct ClientConnection {
    pub(super) remote: Option<RemoteAddr>,
    pub(super) authentication: UnauthenticatedPermit,
    /// Receives a message when the connection must make room for another one; closed once it has authenticated.
    pub(super) evicted: oneshot::Receiver<()>,
    pub(super) authenticates_until: Instant,
}

/// How a listener serves its connections.
#[derive(Clone)]
pub(super) struct Protocol {
    pub(super) http: http1::Builder,
    pub(super) routes: Router,
    /// Maximum time for which a write may make no progress.
    pub(super) write_timeout: Duration,
}

/// Why a connection is no longer served.
enum ConnectionEnd {
    /// It was closed, by the server's side or by its peer.
    Closed,
    /// It sent no request in time.
    TimedOut,
}

/// Returns the error of an oversized head that hyper has read completely: hyper reads in steps, so its own limit is not
/// exact.
fn oversized<B>(request: &Request<B>) -> Option<ApiError> {
    let uri = request.uri().path_and_query().map_or(0, |whole| whole.as_str().len());
    if uri > LONGEST_URI {
        return Some(ApiError::UriTooLong { most: LONGEST_URI });
    }
    // Adds colon, space and line ending.
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    (uri + headers.sum::<usize>() > MAX_HEAD_BYTES).then_some(ApiError::HeadTooLarge { most: MAX_HEAD_BYTES })
}

/// Serves `stream` until it ends, `stopping` turns true (a running request still ends), or its sender is dropped (at
/// once).
pub(super) async fn drive(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    client: ClientConnection,
    protocol: Protocol,
    mut stopping: watch::Receiver<bool>,
) {
    let ClientConnection { remote, authentication, evicted: mut closed, authenticates_until } = client;
    let Protocol { http, routes, write_timeout } = protocol;
    let stranger = authentication.clone();
    let is_answering = Arc::new(AtomicBool::new(false));
    let answering = is_answering.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut routes, answering) = (routes.clone(), answering.clone());
        remote.map(|remote| request.extensions_mut().insert(remote));
        request.extensions_mut().insert(authentication.clone());
        answering.store(true, Ordering::Relaxed);
        let refused = oversized(&request);
        // Boxed, because the connection must stay movable: `into_parts` below takes it by value.
        Box::pin(async move {
            let answer = match refused {
                Some(error) => {
                    let words = ErrorFormat::of(request.uri().path());
                    error.response(ErrorRecipient { format: words, request: new_request_id() })
                }
                None => routes.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {}),
            };
            answering.store(false, Ordering::Relaxed);
            RouteResult::Ok(answer)
        })
    });
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(write_timeout));
    let mut connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
    let (mut draining, mut authenticated) = (false, false);
    let end = loop {
        tokio::select! {
            ended = poll_fn(|cx| connection.poll_without_shutdown(cx)) => break match ended {
                Ok(()) => ConnectionEnd::Closed,
                Err(error) => {
                    tracing::debug!(%error, "a client's connection ended");
                    if error.is_timeout() && !authenticated {
                        stranger.timed_out();
                    }
                    if error.is_timeout() { ConnectionEnd::TimedOut } else { ConnectionEnd::Closed }
                }
            },
            gone = stopping.changed() => match gone {
                Ok(()) if !draining => {
                    draining = true;
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
                Ok(()) => {}
                Err(_) => return,
            },
            surplus = &mut closed, if !authenticated => match surplus {
                Err(_) => authenticated = true,
                Ok(()) if !is_answering.load(Ordering::Relaxed) => break ConnectionEnd::Closed,
                Ok(()) => {
                    authenticated = true;
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
            },
            () = sleep_until(authenticates_until), if !authenticated => {
                stranger.timed_out();
                // A running answer still ends, and the connection with it.
                if !is_answering.load(Ordering::Relaxed) {
                    break ConnectionEnd::TimedOut;
                }
                authenticated = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner();
    // An idle connection that timed out is closed silently; a partial request gets an answer.
    if matches!(end, ConnectionEnd::TimedOut) && !parts.read_buf.is_empty() {
        let _ = stream.write_all(&headers_timeout_response()).await;
    }
    let _ = stream.shutdown().await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_that_was_read_whole_is_held_to_its_bounds_exactly() {
        let request = |uri: usize, header: usize| {
            let request = Request::get(format!("/{}", "x".repeat(uri - 1))).header("x", "y".repeat(header));
            oversized(&request.body(()).unwrap()).map(|error| error.status().as_u16())
        };
        assert_eq!(request(LONGEST_URI, MAX_HEAD_BYTES - LONGEST_URI - 5), None);
        assert_eq!(request(LONGEST_URI, MAX_HEAD_BYTES - LONGEST_URI - 4), Some(431));
        assert_eq!(request(LONGEST_URI + 1, 1), Some(414));
    }
}
