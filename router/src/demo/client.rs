//! One agent's HTTP client: a streamed chat completion, timed where the client sits.
//!
//! Plain HTTP to loopback only. Every wait is bounded.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::{
    client::legacy::{Client as Pool, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use workers_shim::sim::WORKER_HEADER;

use super::sse::{Event, Lines, Oversized};

/// An agent names its session here.
const SESSION_HEADER: &str = "x-session-id";
/// A step that takes longer has failed.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// A page of figures that takes longer is given up.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest page or error body that is read.
const LARGEST_PAGE: usize = 8 << 20;
/// How much of an error body is shown.
const SHOWN: usize = 300;

/// Why a step or a page failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClientError {
    /// No connection, or it broke.
    #[error("connection: {0}")]
    Connection(String),
    /// An HTTP error.
    #[error("HTTP {status}: {body}")]
    Status {
        /// The code.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// An error event in the middle of the stream.
    #[error("the stream ended with an error: {0}")]
    ErrorEvent(String),
    /// The stream broke the protocol.
    #[error("the stream {0}")]
    BrokenStream(&'static str),
    /// An event is too long.
    #[error(transparent)]
    Oversized(#[from] Oversized),
    /// Too slow.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

/// One step, ready to be sent.
#[derive(Serialize)]
pub(crate) struct Ask<'a> {
    /// The served model.
    pub model: &'a str,
    /// The whole history.
    pub messages: &'a [Value],
    /// How long the answer may be.
    pub max_tokens: u32,
}

#[derive(Serialize)]
struct Body<'a> {
    #[serde(flatten)]
    ask: &'a Ask<'a>,
    temperature: f64,
    stream: bool,
    stream_options: StreamOptions,
}

/// What a streamed answer has besides.
#[derive(Serialize)]
pub(crate) struct StreamOptions {
    /// Whether it ends with the engine's counts.
    pub include_usage: bool,
}

/// What came back for a step.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Answer {
    /// The text.
    pub text: String,
    /// From sending the request to the first piece of text.
    pub first_token: Duration,
    /// From sending the request to the last byte.
    pub whole: Duration,
    /// Tokens, as the engine counted them.
    pub usage: Usage,
    /// Which worker answered: simulated ones say so in a header that passes through the proxy.
    pub worker: Option<String>,
}

/// The engine's count of one step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
pub(crate) struct Usage {
    /// Tokens of the prompt.
    #[serde(default)]
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    #[serde(default)]
    pub completion_tokens: u64,
    #[serde(default)]
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
struct PromptDetails {
    #[serde(default)]
    cached_tokens: Option<u64>,
}

impl Usage {
    /// Tokens of the prompt that came from the cache; engines leave a zero out.
    pub(crate) fn cached_tokens(&self) -> u64 {
        self.prompt_tokens_details.and_then(|details| details.cached_tokens).unwrap_or(0)
    }
}

/// A pool of keep-alive connections.
#[derive(Clone)]
pub(crate) struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
}

impl Client {
    /// A fresh pool.
    pub(crate) fn new() -> Client {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Client { pool: Pool::builder(TokioExecutor::new()).build(connector) }
    }

    /// Sends one step of `session` to `proxy` and reads its answer to the end.
    pub(crate) async fn ask(&self, proxy: SocketAddr, session: &str, ask: &Ask<'_>) -> Result<Answer, ClientError> {
        let stream_options = StreamOptions { include_usage: true };
        let body = serde_json::to_vec(&Body { ask, temperature: 0.0, stream: true, stream_options })
            .expect("messages that were parsed from JSON go back into JSON");
        self.stream(proxy, "/v1/chat/completions", (session, body)).await
    }

    /// Sends any request of `session` for a streamed answer, and reads that to the end.
    pub(crate) async fn stream(
        &self,
        proxy: SocketAddr,
        path: &str,
        (session, body): (&str, Vec<u8>),
    ) -> Result<Answer, ClientError> {
        let request = Request::post(format!("http://{proxy}{path}"))
            .header("content-type", "application/json")
            .header(SESSION_HEADER, session)
            .body(Full::new(Bytes::from(body)))
            .expect("an address and plain words make a request");
        let sent = Instant::now();
        let answered = async {
            let response = self.pool.request(request).await.map_err(connection)?;
            read_answer(success(response).await?, sent).await
        };
        tokio::time::timeout(STEP_TIMEOUT, answered).await.map_err(|_| ClientError::TimedOut(STEP_TIMEOUT))?
    }

    /// Reads a whole page.
    pub(crate) async fn page(&self, server: SocketAddr, path: &str) -> Result<String, ClientError> {
        let request = Request::get(format!("http://{server}{path}"))
            .body(Full::default())
            .expect("an address and a fixed path make a request");
        let read = async {
            let response = self.pool.request(request).await.map_err(connection)?;
            let body = Limited::new(success(response).await?.into_body(), LARGEST_PAGE);
            let bytes = body.collect().await.map_err(|error| ClientError::Connection(error.to_string()))?.to_bytes();
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        tokio::time::timeout(PAGE_TIMEOUT, read).await.map_err(|_| ClientError::TimedOut(PAGE_TIMEOUT))?
    }
}

fn connection(error: impl std::error::Error) -> ClientError {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    ClientError::Connection(causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")))
}

async fn success(response: Response<Incoming>) -> Result<Response<Incoming>, ClientError> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = Limited::new(response.into_body(), LARGEST_PAGE).collect().await;
    let bytes = body.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let body = String::from_utf8_lossy(&bytes).chars().take(SHOWN).collect();
    Err(ClientError::Status { status: status.as_u16(), body })
}

async fn read_answer(response: Response<Incoming>, sent: Instant) -> Result<Answer, ClientError> {
    let worker = response.headers().get(WORKER_HEADER).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let mut body = response.into_body();
    let mut lines = Lines::default();
    let mut reading = Reading::default();
    while let Some(frame) = body.frame().await {
        let Ok(bytes) = frame.map_err(connection)?.into_data() else { continue };
        for event in lines.push(&bytes)? {
            reading.take(event, sent.elapsed())?;
        }
    }
    reading.finish(sent.elapsed(), worker)
}

/// A chat completion while it is being read.
#[derive(Default)]
struct Reading {
    text: String,
    first_token: Option<Duration>,
    usage: Usage,
    finished: bool,
    done: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    #[serde(default)]
    usage: Option<Usage>,
    #[serde(default)]
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    /// Completions have their text here.
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    finish_reason: Option<String>,
}

#[derive(Deserialize, Default)]
struct Delta {
    #[serde(default)]
    content: Option<String>,
}

impl Reading {
    fn take(&mut self, event: Event, elapsed: Duration) -> Result<(), ClientError> {
        let Event::Chunk(json) = event else {
            self.done = true;
            return Ok(());
        };
        let chunk: Chunk =
            serde_json::from_str(&json).map_err(|_| ClientError::BrokenStream("holds an event that is no JSON"))?;
        if let Some(error) = chunk.error {
            return Err(ClientError::ErrorEvent(error.to_string().chars().take(SHOWN).collect()));
        }
        for choice in chunk.choices {
            if let Some(text) = choice.delta.content.or(choice.text).filter(|text| !text.is_empty()) {
                self.first_token.get_or_insert(elapsed);
                self.text.push_str(&text);
            }
            self.finished |= choice.finish_reason.is_some();
        }
        self.usage = chunk.usage.unwrap_or(self.usage);
        Ok(())
    }

    fn finish(self, whole: Duration, worker: Option<String>) -> Result<Answer, ClientError> {
        if !self.finished {
            return Err(ClientError::BrokenStream("ended without a finish reason"));
        }
        if !self.done {
            return Err(ClientError::BrokenStream("ended without [DONE]"));
        }
        let first_token = self.first_token.unwrap_or(whole);
        Ok(Answer { text: self.text, first_token, whole, usage: self.usage, worker })
    }
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;
