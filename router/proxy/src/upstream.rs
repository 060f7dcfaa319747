//! HTTP client for the workers: one connection pool; a request ends when its future or its body is dropped.
//!
//! It changes no body and decompresses nothing. It makes no decisions: the caller chooses the worker.

mod connections;
mod outgoing_body;
mod wake_filter;

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderName};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::CertificateDer;
use serde::Deserialize;
use smart_default::SmartDefault;
use strum::AsRefStr;
use tokio::time::{Instant, Sleep};
use vocabulary::{ByteCount, TimeSpan};
use workers_shim::engine_api::{EventBufferBudget, LegBody};

use crate::error::ApiError;
use connections::{ConnectionBody, ConnectionPool};
use outgoing_body::OutgoingBody;

/// Section `[upstream]`: how workers are reached.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamConfig {
    /// Timeout for opening a connection.
    #[default(TimeSpan::seconds(2))]
    pub connect_timeout: TimeSpan,
    /// Timeout until a worker begins its answer. An answer that is not streamed begins when it is complete.
    #[default(TimeSpan::seconds(3600))]
    pub first_byte_timeout: TimeSpan,
    /// Maximum pause inside an answer.
    #[default(TimeSpan::seconds(600))]
    pub stream_idle_timeout: TimeSpan,
    /// How long an idle connection is kept. Must be below the engines' own limit (uvicorn: 5 s), or requests hit closed
    /// connections.
    #[default(TimeSpan::seconds(4))]
    pub connection_idle_timeout: TimeSpan,
    /// Memory for incomplete events in the streams of all workers. An event without room is passed on unread, and its
    /// answer cannot resume at another worker.
    #[default(ByteCount::mebibytes(256))]
    pub stream_buffer_limit: ByteCount,
    /// Maximum number of idle connections to one worker.
    #[default(512)]
    pub max_idle_connections_per_worker: usize,
}

/// A complete request for a worker.
#[derive(Clone, Debug)]
pub struct WorkerRequest {
    /// The method.
    pub method: Method,
    /// Path and query, from the first slash.
    pub path: String,
    /// End-to-end headers; see [`end_to_end`].
    pub headers: HeaderMap,
    /// The body, sent unchanged.
    pub body: LegBody,
}

/// Why a worker gave no answer. All of these happen before the first byte of it.
#[derive(Debug, thiserror::Error, AsRefStr)]
#[strum(serialize_all = "snake_case")]
pub enum UpstreamError {
    /// No connection could be made; the worker saw nothing of the request.
    #[error("no connection: {0}")]
    #[strum(serialize = "worker_connect")]
    Connect(String),
    /// The connection broke before an answer began.
    #[error("the connection broke before an answer began: {0}")]
    #[strum(serialize = "worker_broken")]
    Broken(String),
    /// The answer did not begin in time.
    #[error("no answer within {0:?}")]
    #[strum(serialize = "worker_timeout")]
    Timeout(Duration),
    /// It answered with a redirect or a protocol change. Neither is followed, because the worker chose the target.
    #[error("it answered {0}, which is not followed")]
    #[strum(serialize = "worker_redirect")]
    Redirect(StatusCode),
    /// The request cannot be sent at all.
    #[error("the request cannot be sent: {0}")]
    Unsendable(String),
}

impl UpstreamError {
    /// Whether another worker may succeed. A timed-out request may still be running, so a retry would double it.
    pub fn retryable(&self) -> bool {
        matches!(self, Self::Connect(_) | Self::Broken(_))
    }

    /// Returns the error for the client, which does not reveal the worker's address.
    pub fn client_error(&self) -> ApiError {
        let failed = |detail: &str| ApiError::WorkerFailed { detail: detail.into() };
        match self {
            Self::Connect(_) => failed("it cannot be reached"),
            Self::Broken(_) => failed("it broke off before its answer began"),
            Self::Timeout(_) => ApiError::WorkerTimeout,
            Self::Redirect(_) => failed("it answered with a redirect, which is not followed"),
            Self::Unsendable(_) => failed("the request cannot be put into HTTP"),
        }
    }
}

/// HTTP client for all workers. Clones share one pool.
#[derive(Clone)]
pub struct Upstream {
    connections: ConnectionPool,
    config: UpstreamConfig,
    events: EventBufferBudget,
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Upstream {
    /// Returns a client with its own pool; does not connect.
    pub fn new(config: UpstreamConfig) -> Self {
        Self::with_tls(config, tls())
    }

    /// Returns a client that trusts these authorities instead of the operating system's.
    pub fn with_root_certificates(
        config: UpstreamConfig,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Self, rustls::Error> {
        let mut roots = rustls::RootCertStore::empty();
        authorities.into_iter().try_for_each(|authority| roots.add(authority))?;
        Ok(Self::with_tls(config, tls_builder().with_root_certificates(roots).with_no_client_auth()))
    }

    fn with_tls(config: UpstreamConfig, tls: rustls::ClientConfig) -> Self {
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.enforce_http(false);
        http.set_keepalive(Some(Duration::from_secs(30)));
        http.set_connect_timeout(Some(config.connect_timeout.0));
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().wrap_connector(http);
        let (idle_timeout, max_idle) = (config.connection_idle_timeout.0, config.max_idle_connections_per_worker);
        let connections = ConnectionPool::new(connector, idle_timeout, max_idle);
        let events = EventBufferBudget::of(config.stream_buffer_limit.0);
        Self { connections, config, events }
    }

    /// Returns the memory budget for unfinished events of all workers' streams.
    pub fn events(&self) -> EventBufferBudget {
        self.events.clone()
    }

    /// Sends `request` to the worker at `endpoint` (scheme, host and port) and waits for the head of its answer.
    ///
    /// Dropping the future, or the body of the answer, closes the connection, by which engines cancel the work.
    pub async fn send(&self, endpoint: &str, request: WorkerRequest) -> Result<Response<WorkerBody>, UpstreamError> {
        let uri: Uri = format!("{}{}", endpoint.trim_end_matches('/'), request.path)
            .parse()
            .map_err(|error| UpstreamError::Unsendable(format!("{error}")))?;
        let mut outgoing = Request::new(OutgoingBody::from(request.body));
        *outgoing.method_mut() = request.method;
        *outgoing.uri_mut() = uri;
        *outgoing.headers_mut() = request.headers;
        let limit = self.config.first_byte_timeout.0;
        let answer = tokio::time::timeout(limit, self.connections.send(outgoing)).await;
        let answer = answer.map_err(|_| UpstreamError::Timeout(limit))??;
        Ok(answer.map(|body| WorkerBody::new(body, self.config.stream_idle_timeout.0)))
    }
}

/// Returns the answer, unless it is a redirect or a protocol change.
pub(crate) fn reject_redirects(answer: Response<WorkerBody>) -> Result<Response<WorkerBody>, UpstreamError> {
    let status = answer.status();
    match status.is_redirection() || status.is_informational() {
        true => Err(UpstreamError::Redirect(status)),
        false => Ok(answer),
    }
}

/// TLS with the operating system's trust store, for workers behind `https`.
fn tls() -> rustls::ClientConfig {
    use rustls_platform_verifier::BuilderVerifierExt as _;
    let builder = tls_builder();
    match builder.clone().with_platform_verifier() {
        Ok(builder) => builder.with_no_client_auth(),
        // Without any trust store, https workers fail their handshakes; http workers are not affected.
        Err(_) => builder.with_root_certificates(rustls::RootCertStore::empty()).with_no_client_auth(),
    }
}

fn tls_builder() -> rustls::ConfigBuilder<rustls::ClientConfig, rustls::WantsVerifier> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring supports the default TLS versions")
}

/// Returns an error and its causes in one line.
fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// Why an answer ended before it was complete.
#[derive(Debug, thiserror::Error)]
pub enum WorkerBodyError {
    /// The connection broke.
    #[error("the worker's connection broke inside the answer: {0}")]
    Broken(String),
    /// The worker sent nothing for too long.
    #[error("the worker sent nothing for {0:?}")]
    Silent(Duration),
}

/// A worker's answer as it arrives, with a limit on its pauses.
#[derive(Debug)]
pub struct WorkerBody {
    inner: ConnectionBody,
    idle_timeout: Duration,
    /// Fires at the end of the longest pause that is allowed, or before it: setting a timer for each pause costs more
    /// than looking again.
    idle_timer: Pin<Box<Sleep>>,
    /// When the current pause began.
    silent_since: Option<Instant>,
}

impl WorkerBody {
    fn new(inner: ConnectionBody, idle_timeout: Duration) -> Self {
        Self { inner, idle_timeout, idle_timer: Box::pin(tokio::time::sleep(idle_timeout)), silent_since: None }
    }
}

impl HttpBody for WorkerBody {
    type Data = Bytes;
    type Error = WorkerBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, WorkerBodyError>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) {
            self.silent_since = None;
            return Poll::Ready(frame.map(|frame| frame.map_err(|error| WorkerBodyError::Broken(error_chain(&error)))));
        }
        let deadline = *self.silent_since.get_or_insert_with(Instant::now) + self.idle_timeout;
        loop {
            ready!(self.idle_timer.as_mut().poll(cx));
            if self.idle_timer.deadline() >= deadline {
                return Poll::Ready(Some(Err(WorkerBodyError::Silent(self.idle_timeout))));
            }
            self.idle_timer.as_mut().reset(deadline);
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// Headers for a single connection (RFC 9110, section 7.6.1), and those that the client library sets itself.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Returns `headers` without those for a single connection. Everything else stays unchanged, byte by byte.
pub fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut forwarded = headers.clone();
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    for name in named.flat_map(|list| list.split(',')) {
        if let Ok(name) = HeaderName::from_bytes(name.trim().as_bytes()) {
            forwarded.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        forwarded.remove(name);
    }
    forwarded
}

/// Headers by which an engine would speak for this proxy: redirects, and state that clients keep for this address.
const PROXY_OWNED_HEADERS: [HeaderName; 8] = [
    header::LOCATION,
    header::CONTENT_LOCATION,
    header::REFRESH,
    header::ALT_SVC,
    header::STRICT_TRANSPORT_SECURITY,
    header::SERVER,
    header::SET_COOKIE,
    HeaderName::from_static("clear-site-data"),
];

/// Returns a worker's headers for a client: end-to-end, without those in which it would speak for this proxy.
pub fn response_headers(headers: &HeaderMap) -> HeaderMap {
    let mut forwarded = end_to_end(headers);
    for name in PROXY_OWNED_HEADERS {
        forwarded.remove(name);
    }
    forwarded
}

/// Returns a client's headers for a worker: end-to-end, without host, length and `Expect`, which are set again.
pub fn request_headers(headers: &HeaderMap) -> HeaderMap {
    let mut forwarded = end_to_end(headers);
    for name in [header::HOST, header::CONTENT_LENGTH, header::EXPECT] {
        forwarded.remove(name);
    }
    forwarded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hop_by_hop_headers_are_removed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Hop"),
            ("x-hop", "1"),
            ("keep-alive", "timeout=5"),
            ("transfer-encoding", "chunked"),
            ("x-custom", "a"),
            ("x-custom", "b"),
            ("host", "proxy"),
            ("content-length", "3"),
            ("accept-encoding", "gzip"),
        ] {
            headers.append(HeaderName::from_static(name), value.parse().unwrap());
        }
        headers.append("x-latin", http::HeaderValue::from_bytes(b"caf\xe9").unwrap());
        let kept = request_headers(&headers);
        let values: Vec<_> = kept.get_all("x-custom").iter().map(|v| v.to_str().unwrap()).collect();
        assert_eq!(values, ["a", "b"]);
        assert_eq!(kept["x-latin"].as_bytes(), b"caf\xe9");
        assert_eq!(kept.keys().count(), 3, "{kept:?}");
        assert!(end_to_end(&headers).contains_key("host"));
    }

    #[tokio::test]
    async fn a_worker_is_silent_once_one_pause_is_too_long() {
        use http_body_util::BodyExt as _;
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (go_on, may_go_on) = tokio::sync::oneshot::channel();
        let worker = tokio::spawn(async move {
            let mut socket = listener.accept().await.unwrap().0;
            assert_ne!(socket.read(&mut [0; 1024]).await.unwrap(), 0);
            socket.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n").await.unwrap();
            may_go_on.await.unwrap();
            socket.write_all(b"1\r\nb\r\n").await.unwrap();
            socket
        });
        let longest = Duration::from_millis(400);
        let config = UpstreamConfig { stream_idle_timeout: TimeSpan(longest), ..UpstreamConfig::default() };
        let request = WorkerRequest {
            method: Method::GET,
            path: "/".into(),
            headers: HeaderMap::new(),
            body: LegBody::default(),
        };
        let mut body = Upstream::new(config).send(&endpoint, request).await.unwrap().into_body();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
        // A pause that is not too long; the timer fires within the next one.
        let pause = tokio::time::timeout(longest / 2, body.frame()).await;
        assert!(pause.is_err());
        go_on.send(()).unwrap();
        let _socket = worker.await.unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "b");
        let begun = Instant::now();
        let end = body.frame().await.unwrap();
        assert!(matches!(end, Err(WorkerBodyError::Silent(silence)) if silence == longest));
        assert!(begun.elapsed() >= longest, "{:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_dead_worker_is_a_retryable_connect_error() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        drop(listener);
        let request = WorkerRequest {
            method: Method::GET,
            path: "/".into(),
            headers: HeaderMap::new(),
            body: LegBody::default(),
        };
        let error = Upstream::new(UpstreamConfig::default()).send(&endpoint, request).await.unwrap_err();
        assert!(matches!(error, UpstreamError::Connect(_)) && error.retryable(), "{error}");
    }
}
