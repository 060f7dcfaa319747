//! Serves one client connection from its first byte to its last.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::response::Response;
use http::header::{CONNECTION, CONTENT_LENGTH};
use http::{HeaderValue, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use prometheus::IntCounter;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tower::Service as _;

use super::answer_phase::AnswerPhase;
use super::head_refusal::HyperResponseFilter;
use super::minimum_rate_writer::MinimumRateWriter;
use super::unauthenticated::UnauthenticatedPermit;
use super::{HeadErrorEncoder, LONGEST_URI, MAX_HEAD_BYTES, MAX_HEADERS, RemoteAddr, RouteResult};
use crate::error::ApiError;

/// How long, and for how many bytes, a client is read whose head was refused: closing a connection with unread data
/// resets it, and the client would see the reset instead of the answer.
const LINGER: (Duration, u64) = (Duration::from_secs(1), 1 << 20);

/// Time limit for writing the error answer and closing the stream, for which TLS writes a message of its own.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a connection must be without a request before it is closed to make room: a client that is about to send
/// its next one is spared.
const MIN_IDLE: Duration = Duration::from_secs(1);

/// A client's address, and until when its connection must authenticate.
pub(super) struct UnauthenticatedClient {
    pub(super) remote: Option<RemoteAddr>,
    pub(super) authentication: UnauthenticatedPermit,
    /// Receives a message when the connection must make room for another one; closed once it has authenticated.
    pub(super) evicted: oneshot::Receiver<()>,
    pub(super) authenticates_until: Instant,
}

/// How a listener serves its connections.
#[derive(Clone)]
pub(super) struct ConnectionSetup {
    pub(super) http: http1::Builder,
    pub(super) routes: Router,
    /// Encodes errors of heads that reach no route.
    pub(super) encode: HeadErrorEncoder,
    /// Period in which a client must take a minimum of what waits for it.
    pub(super) write_timeout: Duration,
    /// How many idle connections are to be closed to make room.
    pub(super) room_needed: Arc<AtomicUsize>,
    /// Counts them once they are closed.
    pub(super) idle_closed: IntCounter,
}

/// Why a connection is no longer served.
enum ConnectionEnd {
    /// It was closed, by the server's side or by its peer.
    Closed,
    /// It sent no request in time.
    TimedOut,
}

const TOO_LARGE: ApiError = ApiError::HeadTooLarge { most: MAX_HEAD_BYTES, count: MAX_HEADERS };

/// Returns the error of an oversized head that hyper has read completely: hyper reads in steps, so its own limit is not
/// exact.
fn oversized<B>(request: &Request<B>) -> Option<ApiError> {
    let uri = request.uri().path_and_query().map_or(0, |whole| whole.as_str().len());
    if uri > LONGEST_URI {
        return Some(ApiError::UriTooLong { most: LONGEST_URI });
    }
    // Adds colon, space and line ending.
    let headers = request.headers().iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
    (uri + headers.sum::<usize>() > MAX_HEAD_BYTES).then_some(TOO_LARGE)
}

/// Returns the error of a head that hyper refused with this status.
fn refused(status: StatusCode) -> ApiError {
    match status {
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE => TOO_LARGE,
        StatusCode::URI_TOO_LONG => ApiError::UriTooLong { most: LONGEST_URI },
        _ => ApiError::MalformedHead,
    }
}

/// Returns an answer as HTTP/1.1; the connection ends with it.
async fn http1_message(answer: Response) -> Vec<u8> {
    let (mut head, body) = answer.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    head.headers.insert(CONTENT_LENGTH, HeaderValue::from(body.len()));
    let mut message = format!("HTTP/1.1 {}\r\n", head.status).into_bytes();
    for (name, value) in &head.headers {
        message.extend_from_slice(&[name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
    }
    message.extend_from_slice(b"\r\n");
    message.extend_from_slice(&body);
    message
}

/// Serves `stream` until it ends, `stopping` turns true or its sender asks idle connections to make room (a running
/// request still ends), or that sender is dropped (at once).
pub(super) async fn drive(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    client: UnauthenticatedClient,
    protocol: ConnectionSetup,
    mut stopping: watch::Receiver<bool>,
) {
    let UnauthenticatedClient { remote, authentication, evicted: mut closed, authenticates_until } = client;
    let ConnectionSetup { http, routes, encode, write_timeout, room_needed, idle_closed } = protocol;
    let stranger = authentication.clone();
    let is_answering = Arc::new(AtomicBool::new(false));
    let answering = is_answering.clone();
    let progress = AnswerPhase::new();
    let phase = progress.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut routes, answering, progress) = (routes.clone(), answering.clone(), progress.clone());
        progress.begin();
        remote.map(|remote| request.extensions_mut().insert(remote));
        request.extensions_mut().insert(authentication.clone());
        answering.store(true, Ordering::Relaxed);
        let oversized = oversized(&request);
        // Boxed, because the connection must stay movable: `into_parts` below takes it by value.
        Box::pin(async move {
            let answer = match oversized {
                Some(error) => encode(&error, request.uri().path()),
                None => routes.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {}),
            };
            answering.store(false, Ordering::Relaxed);
            RouteResult::Ok(progress.wrap(answer))
        })
    });
    let stream = MinimumRateWriter::new(Box::pin(stream), write_timeout);
    let stream = HyperResponseFilter::new(Box::pin(stream), phase.clone());
    let mut connection = http.serve_connection(TokioIo::new(stream), service);
    let (mut draining, mut authenticated) = (false, false);
    let end = loop {
        tokio::select! {
            // A request that has arrived is read before its connection is taken for idle.
            biased;
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
            gone = stopping.changed() => {
                let Ok(()) = gone else { return };
                let is_stopping = *stopping.borrow_and_update();
                let makes_room = || {
                    let is_idle = phase.idle_time().is_some_and(|idle| idle >= MIN_IDLE);
                    is_idle && room_needed.fetch_update(Relaxed, Relaxed, |needed| needed.checked_sub(1)).is_ok()
                };
                if !draining && (is_stopping || makes_room()) {
                    draining = true;
                    if !is_stopping {
                        idle_closed.inc();
                    }
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
            }
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
    let (mut stream, status) = parts.io.into_inner().into_parts();
    // An idle connection that timed out is closed silently; a partial request gets an answer.
    let is_late = matches!(end, ConnectionEnd::TimedOut) && !parts.read_buf.is_empty();
    let error = if is_late { Some(ApiError::HeadTimeout) } else { status.map(refused) };
    // A client that does not read must not keep the connection.
    let close = async {
        if let Some(error) = &error {
            stream.write_all(&http1_message(encode(error, "")).await).await?;
        }
        stream.shutdown().await
    };
    let _ = timeout(CLOSE_TIMEOUT, close).await;
    if error.is_some() {
        let (time, bytes) = LINGER;
        let mut surplus = stream.take(bytes);
        let mut sink = tokio::io::sink();
        tokio::select! {
            _ = timeout(time, tokio::io::copy(&mut surplus, &mut sink)) => {}
            // Another connection needs its place.
            _ = &mut closed, if !authenticated => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::ReadBuf;

    use super::*;

    /// A stream on which nothing comes and that never ends, as TLS does while its client reads nothing.
    struct StuckStream;

    impl AsyncRead for StuckStream {
        fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    impl AsyncWrite for StuckStream {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Pending
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_client_that_reads_nothing_keeps_no_connection_after_its_time() {
        let mut http = http1::Builder::new();
        http.timer(hyper_util::rt::TokioTimer::new()).header_read_timeout(Duration::from_secs(60));
        let setup = ConnectionSetup {
            http,
            routes: Router::new(),
            encode: super::super::api_error_response,
            write_timeout: Duration::from_secs(60),
            room_needed: Arc::default(),
            idle_closed: IntCounter::new("idle_closed", "not shown").unwrap(),
        };
        let (_evict, evicted) = oneshot::channel();
        let client = UnauthenticatedClient {
            remote: None,
            authentication: UnauthenticatedPermit::not_required(),
            evicted,
            authenticates_until: Instant::now() + Duration::from_millis(100),
        };
        let (_stop, stopping) = watch::channel(false);
        timeout(Duration::from_secs(30), drive(StuckStream, client, setup, stopping)).await.expect("it ends");
    }

    #[tokio::test]
    async fn an_error_becomes_a_complete_http_message() {
        let answer = super::super::api_error_response(&ApiError::HeadTimeout, "");
        let text = String::from_utf8(http1_message(answer).await).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 408 Request Timeout\r\n"), "{head}");
        assert!(head.contains(&format!("content-length: {}", body.len())) && head.contains("connection: close"));
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }

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
