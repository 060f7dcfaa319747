//! One client's connection from its first byte to its last.

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

use super::unauthenticated::Authentication;
use super::{Remote, Routed};
use crate::error::headers_timeout_answer;

/// Who connected, and until when it must have authenticated.
pub(super) struct Client {
    pub(super) remote: Option<Remote>,
    pub(super) authentication: Authentication,
    /// A message: its place is needed. Gone: it has authenticated.
    pub(super) closed: oneshot::Receiver<()>,
    pub(super) authenticates_until: Instant,
}

/// How a listener serves its connections.
#[derive(Clone)]
pub(super) struct Protocol {
    pub(super) http: http1::Builder,
    pub(super) routes: Router,
    /// Longest time that a write may make no progress.
    pub(super) write_timeout: Duration,
}

/// Why a connection is served no longer.
enum End {
    /// It ended by itself, or its peer ended it.
    Over,
    /// It sent no request in time.
    TimedOut,
}

/// Serves `stream` until it ends, `stopping` says true (the running request still ends) or its sender is gone (now).
pub(super) async fn drive(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    client: Client,
    protocol: Protocol,
    mut stopping: watch::Receiver<bool>,
) {
    let Client { remote, authentication, mut closed, authenticates_until } = client;
    let Protocol { http, routes, write_timeout } = protocol;
    let is_answering = Arc::new(AtomicBool::new(false));
    let answering = is_answering.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut routes, answering) = (routes.clone(), answering.clone());
        remote.map(|remote| request.extensions_mut().insert(remote));
        request.extensions_mut().insert(authentication.clone());
        answering.store(true, Ordering::Relaxed);
        // Boxed, because the connection must stay movable: `into_parts` below takes it by value.
        Box::pin(async move {
            let answer = routes.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {});
            answering.store(false, Ordering::Relaxed);
            Routed::Ok(answer)
        })
    });
    let mut stream = TimeoutWriter::new(stream);
    stream.set_timeout(Some(write_timeout));
    let mut connection = http.serve_connection(TokioIo::new(Box::pin(stream)), service);
    let (mut draining, mut authenticated) = (false, false);
    let end = loop {
        tokio::select! {
            ended = poll_fn(|cx| connection.poll_without_shutdown(cx)) => break match ended {
                Ok(()) => End::Over,
                Err(error) => {
                    tracing::debug!(%error, "a client's connection ended");
                    if error.is_timeout() { End::TimedOut } else { End::Over }
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
                Ok(()) if !is_answering.load(Ordering::Relaxed) => break End::Over,
                Ok(()) => {
                    authenticated = true;
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
            },
            () = sleep_until(authenticates_until), if !authenticated => {
                // An answer that is on its way still ends, and the connection with it.
                if !is_answering.load(Ordering::Relaxed) {
                    break End::TimedOut;
                }
                authenticated = true;
                std::pin::Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner();
    // An idle connection that timed out is closed without a word, a half-sent request is answered.
    if matches!(end, End::TimedOut) && !parts.read_buf.is_empty() {
        let _ = stream.write_all(&headers_timeout_answer()).await;
    }
    let _ = stream.shutdown().await;
}
