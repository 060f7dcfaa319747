//! HTTP client of one agent: sends streamed chat completions and measures at the client.
//!
//! Plain HTTP to loopback only. Every wait is bounded.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use http_body_util::{BodyExt as _, Limited};
use reqwest::{Body, Response};
use serde_json::{Value, json};
use tokio_util::codec::{FramedRead, LinesCodec};
use tokio_util::io::StreamReader;
use workers_shim::sim::WORKER_HEADER;

/// Header that carries the agent's session.
const SESSION_HEADER: &str = "x-session-id";
/// Timeout of a step.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of a metrics page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a page or an error body.
const MAX_PAGE_BYTES: usize = 8 << 20;
const MAX_LINE_BYTES: usize = 1 << 20;
/// Maximum characters shown of an error body.
const MAX_SHOWN_CHARS: usize = 300;

/// Failure of a step or a page.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyClientError {
    /// The connection failed or broke.
    #[error("connection: {0}")]
    Connection(String),
    /// HTTP error status.
    #[error("HTTP {status}: {body}")]
    Status { status: u16, body: String },
    /// Error event within the stream.
    #[error("the stream ended with an error: {0}")]
    ErrorEvent(String),
    /// The stream violated the protocol.
    #[error("the stream {0}")]
    BrokenStream(&'static str),
    /// Timeout.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

/// One step to send.
pub(crate) struct ChatRequest<'a> {
    pub model: &'a str,
    pub messages: &'a [Value],
    pub max_tokens: u32,
}

/// Response to a step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ServedAnswer {
    pub text: String,
    pub measurement: StepMeasurement,
}

/// Measurements of a response.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct StepMeasurement {
    /// Time from sending the request to the first text.
    pub first_token: Duration,
    /// Time from sending the request to the last byte.
    pub total: Duration,
    /// Prompt tokens as counted by the engine, and those of them that came from a cache.
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    /// Worker that responded: simulated workers name themselves in a header that the proxy passes on.
    pub worker: Option<String>,
}

/// Pool of keep-alive connections.
#[derive(Clone)]
pub(crate) struct ProxyClient(reqwest::Client);

impl ProxyClient {
    /// Creates an empty pool.
    pub(crate) fn new() -> ProxyClient {
        // Fails only if a provider is already installed, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([]).build();
        ProxyClient(client.expect("a client of plain HTTP needs nothing of the system"))
    }

    /// Sends one step of `session` to `proxy` and reads the whole response.
    pub(crate) async fn send_step(
        &self,
        proxy: SocketAddr,
        session: &str,
        ask: &ChatRequest<'_>,
    ) -> Result<ServedAnswer, ProxyClientError> {
        let body = json!({
            "model": ask.model, "messages": ask.messages, "max_tokens": ask.max_tokens,
            "temperature": 0.0, "stream": true, "stream_options": {"include_usage": true},
        });
        self.send(proxy, "/v1/chat/completions", (session, &body)).await
    }

    /// Sends any streamed request of `session` and reads the whole response.
    pub(crate) async fn send(
        &self,
        proxy: SocketAddr,
        path: &str,
        (session, body): (&str, &Value),
    ) -> Result<ServedAnswer, ProxyClientError> {
        let request = self.0.post(format!("http://{proxy}{path}")).header(SESSION_HEADER, session).json(body);
        let start = Instant::now();
        let answered =
            async { read_answer(success(request.send().await.map_err(connection_error)?).await?, start).await };
        tokio::time::timeout(STEP_TIMEOUT, answered).await.map_err(|_| ProxyClientError::TimedOut(STEP_TIMEOUT))?
    }

    /// Reads a whole page.
    pub(crate) async fn get_page(&self, server: SocketAddr, path: &str) -> Result<String, ProxyClientError> {
        let request = self.0.get(format!("http://{server}{path}"));
        let read = async { read_body(success(request.send().await.map_err(connection_error)?).await?).await };
        let page =
            tokio::time::timeout(PAGE_TIMEOUT, read).await.map_err(|_| ProxyClientError::TimedOut(PAGE_TIMEOUT))??;
        Ok(String::from_utf8_lossy(&page).into_owned())
    }
}

fn connection_error(error: impl std::error::Error) -> ProxyClientError {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    ProxyClientError::Connection(causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")))
}

async fn read_body(response: Response) -> Result<Bytes, ProxyClientError> {
    let body = Limited::new(Body::from(response), MAX_PAGE_BYTES).collect().await;
    body.map(|body| body.to_bytes()).map_err(|error| ProxyClientError::Connection(error.to_string()))
}

async fn success(response: Response) -> Result<Response, ProxyClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = read_body(response).await.unwrap_or_default();
    let body = String::from_utf8_lossy(&body).chars().take(MAX_SHOWN_CHARS).collect();
    Err(ProxyClientError::Status { status: status.as_u16(), body })
}

/// OpenAI servers send every event as one `data:` line, so only lines are parsed.
async fn read_answer(response: Response, sent: Instant) -> Result<ServedAnswer, ProxyClientError> {
    let worker = response.headers().get(WORKER_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let body = StreamReader::new(response.bytes_stream().map_err(std::io::Error::other));
    let mut lines = FramedRead::new(body, LinesCodec::new_with_max_length(MAX_LINE_BYTES));
    let mut reading = CompletionReader::default();
    while let Some(line) = lines.next().await {
        if let Some(event) = line.map_err(connection_error)?.strip_prefix("data:") {
            reading.push_event(event.trim(), sent.elapsed())?;
        }
    }
    reading.finish(sent.elapsed(), worker)
}

/// Completion that is being read.
#[derive(Default)]
struct CompletionReader {
    text: String,
    first_token: Option<Duration>,
    prompt_tokens: u64,
    cached_tokens: u64,
    finished: bool,
    done: bool,
}

impl CompletionReader {
    fn push_event(&mut self, event: &str, elapsed: Duration) -> Result<(), ProxyClientError> {
        if event == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Value = serde_json::from_str(event)
            .map_err(|_| ProxyClientError::BrokenStream("holds an event that is no JSON"))?;
        if !chunk["error"].is_null() {
            return Err(ProxyClientError::ErrorEvent(
                chunk["error"].to_string().chars().take(MAX_SHOWN_CHARS).collect(),
            ));
        }
        for choice in chunk["choices"].as_array().into_iter().flatten() {
            // Completions have `text` where chats have `delta`.
            let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            if !text.is_empty() {
                self.first_token.get_or_insert(elapsed);
                self.text.push_str(text);
            }
            self.finished |= choice["finish_reason"].is_string();
        }
        if let usage @ Value::Object(_) = &chunk["usage"] {
            self.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or_default();
            // Engines omit the field if it is zero.
            self.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default();
        }
        Ok(())
    }

    fn finish(self, whole: Duration, worker: Option<String>) -> Result<ServedAnswer, ProxyClientError> {
        let Self { text, first_token, prompt_tokens, cached_tokens, finished, done } = self;
        if !finished {
            return Err(ProxyClientError::BrokenStream("ended without a finish reason"));
        }
        if !done {
            return Err(ProxyClientError::BrokenStream("ended without [DONE]"));
        }
        let first_token = first_token.unwrap_or(whole);
        Ok(ServedAnswer {
            text,
            measurement: StepMeasurement { first_token, total: whole, prompt_tokens, cached_tokens, worker },
        })
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
