//! One client's connection from its first byte to its last.

use std::future::poll_fn;

use axum::Router;
use axum::body::Body;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::watch;
use tower::Service as _;

use super::{Remote, Routed};
use crate::error::headers_timeout_answer;

/// Serves `stream` until it ends, `stopping` says true (the running request still ends) or its sender is gone (now).
pub(super) async fn drive(
    (stream, remote): (impl AsyncRead + AsyncWrite + Unpin + Send + 'static, Option<Remote>),
    (protocol, routes): (http1::Builder, Router),
    mut stopping: watch::Receiver<bool>,
) {
    let service = service_fn(move |mut request: Request<Incoming>| {
        let mut routes = routes.clone();
        remote.map(|remote| request.extensions_mut().insert(remote));
        // Boxed, because the connection must stay movable: `into_parts` below takes it by value.
        Box::pin(
            async move { Routed::Ok(routes.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {})) },
        )
    });
    let mut connection = protocol.serve_connection(TokioIo::new(stream), service);
    let mut draining = false;
    let ended = loop {
        tokio::select! {
            ended = poll_fn(|cx| connection.poll_without_shutdown(cx)) => break ended,
            gone = stopping.changed() => match gone {
                Ok(()) if !draining => {
                    draining = true;
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                }
                Ok(()) => {}
                Err(_) => return,
            },
        }
    };
    let timed_out = match ended {
        Ok(()) => false,
        Err(error) => {
            tracing::debug!(%error, "a client's connection ended");
            error.is_timeout()
        }
    };
    let parts = connection.into_parts();
    let mut stream = parts.io.into_inner();
    // An idle connection that timed out is closed without a word, a half-sent request is answered.
    if timed_out && !parts.read_buf.is_empty() {
        let _ = stream.write_all(&headers_timeout_answer()).await;
    }
    let _ = stream.shutdown().await;
}
