//! Test support: a worker that records its requests, a router in front of it, and a client that can misbehave.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures::StreamExt as _;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use vocabulary::TenantId;

use crate::app_state::AppState;
use crate::config::{Config, Overrides};
use crate::serve::RunningServer;
use proxy::request_id::new_request_id;
use proxy::server::{BoundSocket, HttpServer, ServerLimits};

pub(crate) use proxy::pipeline::guardrail_enforcement::tests::slow_down_action;

/// A request that a worker received.
#[derive(Clone, Debug)]
pub(crate) struct ReceivedRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A worker on a port of its own. The request's field `behave` selects its behaviour.
pub(crate) struct StubWorker {
    pub(crate) address: SocketAddr,
    pub(crate) name: String,
    received: Mutex<Vec<ReceivedRequest>>,
    /// Requests in progress; a cancelled one is removed.
    pub(crate) active: Arc<ActiveRequests>,
    /// One permit lets one held stream continue.
    pub(crate) stream_permits: Semaphore,
    /// Start time that its process reports; it reports none while this is 0.
    pub(crate) process_start: AtomicU64,
    server: OnceLock<HttpServer>,
}

#[derive(Default)]
pub(crate) struct ActiveRequests(Mutex<usize>);

impl ActiveRequests {
    pub(crate) fn count(&self) -> usize {
        *self.0.lock()
    }
}

struct ActiveRequestGuard(Arc<ActiveRequests>);

impl ActiveRequestGuard {
    fn begin(at_work: &Arc<ActiveRequests>) -> Self {
        *at_work.0.lock() += 1;
        Self(at_work.clone())
    }
}

impl Drop for ActiveRequestGuard {
    fn drop(&mut self) {
        *self.0.0.lock() -= 1;
    }
}

const LIMITS: ServerLimits = ServerLimits {
    header_timeout: Duration::from_secs(30),
    write_timeout: Duration::from_secs(30),
    unauthenticated: None,
    connections: 1000,
    drain_timeout: Duration::from_secs(1),
};

impl StubWorker {
    /// Serves one model called `model`; answers carry `name`.
    pub(crate) async fn start(name: &str, model: &'static str) -> Arc<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let worker = Arc::new(Self {
            address,
            name: name.into(),
            received: Mutex::default(),
            active: Arc::default(),
            stream_permits: Semaphore::new(0),
            process_start: AtomicU64::new(0),
            server: OnceLock::new(),
        });
        let shared = worker.clone();
        let routes = Router::new().fallback(move |request: Request| answer(shared.clone(), model, request));
        let server = HttpServer::start(
            BoundSocket::bind(address).unwrap(),
            routes,
            LIMITS,
            prometheus::IntGauge::new("w", "w").unwrap(),
        )
        .unwrap();
        worker.server.set(server).unwrap();
        worker
    }

    /// Returns all requests except probes.
    pub(crate) fn requests(&self) -> Vec<ReceivedRequest> {
        self.received.lock().clone()
    }

    pub(crate) fn last_request(&self) -> ReceivedRequest {
        self.requests().pop().expect("something reached the worker")
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Whether no worker has died of this request yet.
fn dies_at_first_worker(headers: &http::HeaderMap) -> bool {
    static DIED: Mutex<Vec<http::HeaderValue>> = Mutex::new(Vec::new());
    let (id, mut died) = (&headers["x-request-id"], DIED.lock());
    let dies = !died.contains(id);
    died.push(id.clone());
    dies
}

/// Answers probes like a plain OpenAI server, which has none of an engine's own paths.
fn probe_response(worker: &StubWorker, model: &str, path: &str) -> Option<Response> {
    let life = worker.process_start.load(Ordering::Relaxed);
    match path {
        "/v1/models" => {
            let entry = serde_json::json!({"id": model, "object": "model", "owned_by": worker.name, "max_model_len": 50_000, "x_extra": 1});
            Some(axum::Json(serde_json::json!({"object": "list", "data": [entry]})).into_response())
        }
        "/metrics" if life > 0 => Some(format!("process_start_time_seconds {life}\n").into_response()),
        "/health" | "/metrics" | "/version" | "/kv_event_sources" => Some(StatusCode::NOT_FOUND.into_response()),
        _ => None,
    }
}

async fn answer(worker: Arc<StubWorker>, model: &str, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let path = head.uri.to_string();
    if let Some(page) = probe_response(&worker, model, &path) {
        return page;
    }
    let seen = ReceivedRequest {
        method: head.method.to_string(),
        path: path.clone(),
        headers: head.headers.clone(),
        body: body.clone(),
    };
    worker.received.lock().push(seen);
    let parsed: Value = serde_json::from_slice(&body).unwrap_or_default();
    let working = ActiveRequestGuard::begin(&worker.active);
    match parsed["behave"].as_str().unwrap_or("answer") {
        _ if worker.name == "hangs at proofs" => std::future::pending().await,
        "hang" => std::future::pending().await,
        "hang once" if dies_at_first_worker(&head.headers) => std::future::pending().await,
        "stream" => gated_stream(worker, working),
        "flood" => {
            let piece = bytes::Bytes::from(format!("data: {}\n\n", "x".repeat(64 << 10)));
            let pieces = futures::stream::repeat_with(move || Ok::<_, std::convert::Infallible>(piece.clone()));
            let pieces = pieces.map(move |piece| {
                let _ = &working;
                piece
            });
            ([("content-type", "text/event-stream")], Body::from_stream(pieces)).into_response()
        }
        "two writes" => {
            let pieces = futures::stream::iter(["data: a\n\n", "data: b\n\n"]).then(|piece| async move {
                tokio::time::sleep(Duration::from_millis(2)).await;
                Ok::<_, std::io::Error>(piece)
            });
            ([("content-type", "text/event-stream")], Body::from_stream(pieces)).into_response()
        }
        "die in chat" if path.ends_with("/v1/completions") => {
            let then = parsed["then"].as_str().unwrap_or_default().to_owned();
            ([("content-type", "text/event-stream")], then).into_response()
        }
        "die once" if !dies_at_first_worker(&head.headers) => {
            let then = parsed["then"].as_str().unwrap_or_default().to_owned();
            ([("content-type", "text/event-stream")], then).into_response()
        }
        "die" | "die in chat" | "die once" => {
            breaking_stream(parsed["before"].as_str().unwrap_or("data: {\"cut\":").to_owned())
        }
        "finish one" => {
            let event = "data: {\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n";
            ([("content-type", "text/event-stream")], event).into_response()
        }
        "count" => {
            let usage = serde_json::json!({"prompt_tokens": parsed["counted"],
                "completion_tokens": parsed["generated"].as_u64().unwrap_or(1)});
            axum::Json(serde_json::json!({"usage": usage})).into_response()
        }
        "late" => {
            tokio::time::sleep(Duration::from_secs(1)).await;
            axum::Json(serde_json::json!({"usage": null})).into_response()
        }
        "send away" => {
            let there = [("location", "http://127.0.0.1:1/"), ("set-cookie", "a=b")];
            (StatusCode::TEMPORARY_REDIRECT, there, "elsewhere").into_response()
        }
        "speak for the proxy" => overreaching_response(parsed["stream"] == true),
        "store" => stored_response(&parsed, &head.headers),
        "long answer" => {
            let item = serde_json::json!({"type": "message", "role": "assistant", "content": "x".repeat(200_000)});
            let usage = serde_json::json!({"input_tokens": 7, "output_tokens": 5, "total_tokens": 12});
            axum::Json(serde_json::json!({"id": "resp_long", "output": [item], "usage": usage})).into_response()
        }
        "busy" => StatusCode::TOO_MANY_REQUESTS.into_response(),
        "fail or hang" if worker.name == "one" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        "fail or hang" => std::future::pending().await,
        "fail at one" if worker.name == "one" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        "fail" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        "refuse" => (StatusCode::UNPROCESSABLE_ENTITY, [("x-engine", "said no")], "engine's own words").into_response(),
        "forgotten" if parsed["previous_response_id"].is_string() => StatusCode::NOT_FOUND.into_response(),
        _ => {
            let id = format!("resp_{}", worker.name);
            let item = serde_json::json!({"type": "message", "role": "assistant", "content": "an answer"});
            let json = serde_json::json!({"id": id, "served_by": worker.name, "output": [item]});
            ([("x-engine", "yes"), ("connection", "close")], axum::Json(json)).into_response()
        }
    }
}

/// An answer with headers and trailers that an engine must not set.
fn overreaching_response(streams: bool) -> Response {
    let trailers = HeaderMap::from_iter([(http::header::SET_COOKIE, http::HeaderValue::from_static("c=d"))]);
    let text = if streams { "data: {}\n\ndata: [DONE]\n\n" } else { "{\"id\":\"x\"}" };
    let frames = [http_body::Frame::data(Bytes::from(text)), http_body::Frame::trailers(trailers)];
    let frames = futures::stream::iter(frames.map(Ok::<_, std::io::Error>));
    let mut response = Response::new(Body::new(http_body_util::StreamBody::new(frames)));
    let kind = if streams { "text/event-stream" } else { "application/json" };
    for (name, value) in [
        ("content-type", kind),
        ("trailer", "set-cookie"),
        ("x-engine", "yes"),
        ("server", "uvicorn"),
        ("location", "http://127.0.0.1:1/"),
        ("set-cookie", "a=b"),
        ("alt-svc", "h2=\"elsewhere:1\""),
        ("refresh", "0;url=http://127.0.0.1:1/"),
    ] {
        response.headers_mut().append(name, value.parse().unwrap());
    }
    response
}

/// Stores responses like vLLM 0.32.0: under the request's own `request_id`, else under one made of `X-Request-Id`,
/// which it repeats.
fn stored_response(asked: &Value, headers: &HeaderMap) -> Response {
    let header = headers["x-request-id"].to_str().unwrap();
    let id = asked["request_id"].as_str().map_or_else(|| format!("resp_{header}"), str::to_owned);
    let counted = &asked["counted"];
    let usage = serde_json::json!({"input_tokens": counted, "output_tokens": 1, "total_tokens": counted});
    let usage = counted.is_number().then_some(usage);
    let json = serde_json::json!({"id": id, "output": [], "usage": usage});
    ([("x-request-id", header.to_owned())], axum::Json(json)).into_response()
}

/// A stream that breaks off after its first chunk.
fn breaking_stream(before: String) -> Response {
    let pieces = futures::stream::iter([Ok(before), Err(std::io::Error::other("killed"))]);
    let pieces = pieces.then(|piece| async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        piece
    });
    ([("content-type", "text/event-stream; charset=utf-8")], Body::from_stream(pieces)).into_response()
}

/// An endless stream: one event at once, then one for each permit.
fn gated_stream(worker: Arc<StubWorker>, working: ActiveRequestGuard) -> Response {
    let pieces = futures::stream::unfold((worker, working, 0), |(worker, working, n)| async move {
        if n > 0 {
            worker.stream_permits.acquire().await.unwrap().forget();
        }
        Some((Ok::<_, std::io::Error>(format!("data: {n}\n\n")), (worker, working, n + 1)))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(pieces)).into_response()
}

/// A router with a ledger of its own, which is deleted with it.
pub(crate) struct TestRouter {
    serving: RunningServer,
    _data: tempfile::TempDir,
}

impl std::ops::Deref for TestRouter {
    type Target = RunningServer;

    fn deref(&self) -> &RunningServer {
        &self.serving
    }
}

impl TestRouter {
    pub(crate) async fn stop(self) {
        self.serving.stop().await;
    }
}

/// Starts a router in front of these workers, ready to serve, with `settings` as in `--set`.
pub(crate) async fn start_router(workers: &[&Arc<StubWorker>], settings: &[&str]) -> TestRouter {
    let urls = workers.iter().map(|worker| worker.url()).collect::<Vec<_>>();
    start_router_at(&urls, settings).await
}

pub(crate) async fn start_router_at(urls: &[String], settings: &[&str]) -> TestRouter {
    let data = tempfile::tempdir().unwrap();
    let folder = format!("ledger.data_dir={:?}", data.path());
    let fixed = [
        "proxy.listen=127.0.0.1:0",
        "operator.listen=127.0.0.1:0",
        "proxy.drain_timeout=\"2s\"",
        "server.allowed_hosts=[\"x\"]",
    ];
    let settings =
        fixed.iter().chain([&folder.as_str()]).chain(settings).map(|setting| (*setting).to_owned()).collect();
    let config = Config::load(None, &Overrides { settings, workers: urls.to_vec() }).unwrap();
    let serving = RunningServer::start(config).await.unwrap();
    if !urls.is_empty() {
        wait_until("a worker is ready", || !serving.gateway.worker_pool.ready(serving.gateway.fleet()).is_empty())
            .await;
    }
    TestRouter { serving, _data: data }
}

/// Waits for `happened`, at most 20 seconds.
pub(crate) async fn wait_until(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !happened() {
        assert!(std::time::Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Takes all places of the offload pool until the returned value is dropped.
pub(crate) async fn occupy_offload_pool(app_state: &Arc<AppState>) -> std::sync::mpsc::Sender<()> {
    let places = 2 * std::thread::available_parallelism().unwrap().get();
    let (release, held) = std::sync::mpsc::channel::<()>();
    let held = Arc::new(Mutex::new(held));
    let begun = Arc::new(AtomicUsize::new(0));
    for _ in 0..places {
        let (app_state, held, begun) = (app_state.clone(), held.clone(), begun.clone());
        tokio::spawn(async move {
            let work = move || {
                begun.fetch_add(1, Ordering::Relaxed);
                let _ = held.lock().recv();
            };
            app_state.offload_pool.run((&TenantId::default(), new_request_id()), work).await
        });
    }
    wait_until("every place is taken", || begun.load(Ordering::Relaxed) == places).await;
    release
}

/// A complete answer.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl TestResponse {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("not JSON: {:?}", self.body))
    }

    /// Checks OpenAI's error format; returns the code.
    pub(crate) fn error_code(&self) -> String {
        let json = self.json();
        let error = &json["error"];
        assert!(error["message"].as_str().is_some_and(|text| text.len() > 10), "{json}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{json}");
        error["code"].as_str().unwrap_or_default().to_owned()
    }
}

/// Sends one request and reads its answer.
pub(crate) async fn send(address: SocketAddr, request: http::request::Builder, body: impl Into<Bytes>) -> TestResponse {
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut request = request.body(Full::new(body.into())).unwrap();
    *request.uri_mut() = format!("http://{address}{}", request.uri()).parse().unwrap();
    let answer = client.request(request).await.unwrap();
    let (head, body) = answer.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    TestResponse { status: head.status.as_u16(), headers: head.headers, body }
}

/// `POST` of JSON.
pub(crate) async fn post(address: SocketAddr, path: &str, body: impl Into<Bytes>) -> TestResponse {
    let request = http::Request::post(path).header("content-type", "application/json");
    send(address, request, body).await
}

/// `GET`.
pub(crate) async fn get(address: SocketAddr, path: &str) -> TestResponse {
    send(address, http::Request::get(path), Bytes::new()).await
}

/// Opens a connection and sends exactly these bytes.
pub(crate) async fn raw(address: SocketAddr, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.set_nodelay(true).unwrap();
    stream.write_all(bytes).await.unwrap();
    stream
}

/// Reads everything up to the end of the connection.
pub(crate) async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), stream.read_to_end(&mut bytes)).await;
    read.expect("the connection ends").unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Reads until `wanted` has arrived.
pub(crate) async fn read_until(stream: &mut TcpStream, wanted: &str) -> String {
    let mut text = String::new();
    let mut piece = [0; 4096];
    while !text.contains(wanted) {
        let read = tokio::time::timeout(Duration::from_secs(30), stream.read(&mut piece)).await;
        let count = read.unwrap_or_else(|_| panic!("never came: {wanted:?}; so far {text:?}")).unwrap();
        assert!(count > 0, "ended before {wanted:?}: {text:?}");
        text.push_str(&String::from_utf8_lossy(&piece[..count]));
    }
    text
}

/// Reads up to the end of a chunked answer.
pub(crate) async fn read_chunked_body(stream: &mut TcpStream) -> String {
    read_until(stream, "\r\n0\r\n\r\n").await
}

/// Builds a request with a content length, in bytes.
pub(crate) fn request_bytes(path: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}
