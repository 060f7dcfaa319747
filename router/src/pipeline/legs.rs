//! One plan's requests to workers: where each leg goes, with which headers, and what its answer is worth.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use planner::{Leg, Plan};
use vocabulary::{Micros, WorkerId};
use workers_shim::dialect::{Answer, Api, LegOptions, RequestBody, TokenIds, Transfer, UsageEvent};
use workers_shim::fleet::InFlight;
use workers_shim::scrape::Engine;

use super::aside::Load;
use super::parse::{Delivery, Request};
use super::plan::Classified;
use super::receipt::Remark;
use super::vigil::Vigil;
use crate::error::ApiError;
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, REQUEST_ID};
use crate::relay::is_event_stream;
use crate::upstream::{Outgoing, UpstreamError, WorkerBody, answer_headers, direct};

/// Largest whole answer that is kept until its end.
const LARGEST_ANSWER: usize = 64 << 20;
/// Longest wait for a leg whose text nobody reads.
pub const SILENT_LEG_LIMIT: Duration = Duration::from_secs(120);
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Why a leg gave no answer that could be delivered.
#[derive(Debug, thiserror::Error)]
pub enum LegError {
    /// The worker left the configuration's view; nothing was sent.
    #[error("the worker is not configured any more")]
    Unknown,
    /// No head of an answer came.
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    /// The worker broke off before the first byte of the body, or inside an answer that is delivered whole.
    #[error("the answer broke off")]
    Broken,
    /// The worker cannot be reached any more, and nothing came of its answer for a while.
    #[error("the worker cannot be reached any more")]
    Silent,
    /// The worker has no room, or is not ready.
    #[error("the worker answered {0}")]
    Busy(StatusCode),
    /// The worker failed.
    #[error("the worker answered {0}")]
    Failed(StatusCode),
    /// The prefill leg came to nothing, and its target computes no prompts or waits for one that is gone.
    #[error("there is no prompt's KV to go on with")]
    NoSource,
}

impl LegError {
    /// What the receipt says of it.
    pub fn remark(&self) -> Remark {
        match self {
            LegError::Unknown | LegError::Upstream(UpstreamError::Connect(_)) => Remark::DecodeUnreachable,
            LegError::Upstream(UpstreamError::Timeout(_)) => Remark::DecodeTimeout,
            LegError::Silent => Remark::DecodeSilent,
            LegError::Upstream(_) | LegError::Broken | LegError::Failed(_) | LegError::NoSource => Remark::DecodeFailed,
            LegError::Busy(_) => Remark::DecodeBusy,
        }
    }

    /// Whether another worker may do better. A timed-out request may still run; trying again would double it.
    pub fn retryable(&self) -> bool {
        match self {
            LegError::Upstream(error) => error.retryable(),
            LegError::Unknown
            | LegError::Broken
            | LegError::Silent
            | LegError::Busy(_)
            | LegError::Failed(_)
            | LegError::NoSource => true,
        }
    }

    /// What a client is told: not where the worker is.
    pub fn for_client(&self) -> ApiError {
        match self {
            LegError::Upstream(error) => crate::forward::client_error(error),
            LegError::Busy(_) => ApiError::Overloaded { what: "the workers take no more requests" },
            LegError::Unknown | LegError::Broken | LegError::Silent | LegError::Failed(_) | LegError::NoSource => {
                ApiError::WorkerFailed { detail: "it failed before its answer began".into() }
            }
        }
    }
}

/// An answer whose first byte is here.
pub enum Opened {
    /// All of it.
    Whole(Response<Bytes>, Answer),
    /// Its head and first piece; the rest comes.
    Stream(Response<WorkerBody>, Bytes),
}

impl Opened {
    /// The answer's status.
    pub fn status(&self) -> StatusCode {
        match self {
            Opened::Whole(answer, _) => answer.status(),
            Opened::Stream(answer, _) => answer.status(),
        }
    }
}

/// The requests of one plan. Cheap to clone: the body is shared.
#[derive(Clone)]
pub struct Legs {
    gateway: Arc<Gateway>,
    path: String,
    client: HeaderMap,
    load: Load,
    /// The client's body, scanned.
    pub body: RequestBody,
    /// What every leg's body has in common.
    pub options: LegOptions,
}

impl Legs {
    /// The legs of this step.
    pub fn of(gateway: &Arc<Gateway>, step: &Classified) -> Self {
        let request = &step.located.prefixed.request;
        // Without them an answer could not go on elsewhere.
        let ids = if step.unresumable.is_none() { TokenIds::Always } else { TokenIds::AsAsked };
        Self {
            gateway: gateway.clone(),
            path: request.incoming.path.clone(),
            client: client_headers(request),
            load: Load::of(&request.incoming),
            body: request.body.clone(),
            options: LegOptions { ids, ..options(request) },
        }
    }

    /// Those for the rest of an answer, which is a completion of token ids.
    pub fn going_on(self, body: RequestBody) -> Self {
        let options = LegOptions { api: Api::Completions, ..self.options };
        Self { path: Endpoint::Completions.path().into(), body, options, ..self }
    }

    /// These legs, as this worker's engine takes them.
    pub fn to(self, target: WorkerId) -> Self {
        match self.gateway.fleet().engine(target) {
            Engine::Vllm => self,
            Engine::Sglang | Engine::Other => {
                Self { options: LegOptions { ids: TokenIds::AsAsked, ..self.options }, ..self }
            }
        }
    }

    /// Legs that no client asked for.
    pub fn unasked(gateway: &Arc<Gateway>) -> Self {
        let mut client = HeaderMap::new();
        client.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let request = crate::incoming::new_request_id();
        client.insert(REQUEST_ID, crate::incoming::id_value(request));
        Self {
            gateway: gateway.clone(),
            path: String::new(),
            client,
            load: Load::unasked(request),
            body: RequestBody::read(Bytes::from_static(b"{}")).expect("an empty object is JSON"),
            options: LegOptions { api: Api::Completions, ..LegOptions::default() },
        }
    }

    /// Path and query as the client called them, the same at the engines.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Counts a leg that computes for another worker in its own worker's load.
    pub fn dispatch(&self, leg: &Leg) -> InFlight {
        self.gateway.fleet().dispatch(leg.worker, leg.rank, leg.tokens_computed)
    }

    /// Notes what a transfer took, from which links learn.
    pub fn transferred(&self, target: WorkerId, moved: vocabulary::Bytes, took: Micros) {
        self.gateway.fleet().transferred(target, moved, took);
    }

    /// Whether this worker answers prompts that it computed itself.
    pub fn serves_alone(&self, worker: WorkerId) -> bool {
        let workers = self.gateway.fleet().snapshot();
        let link = workers.iter().find(|view| view.id == worker).and_then(|view| view.link.as_ref());
        link.is_none_or(|link| link.carries.serves_alone())
    }

    /// How KV goes from one leg's rank to the other's worker; none where they do not understand each other.
    pub fn transfer(&self, source: &Leg, target: &Leg) -> Option<Transfer> {
        let room = crate::incoming::new_request_id().0 as u64;
        self.gateway.fleet().transfer((source.worker, source.rank), target.worker, room)
    }

    /// Returns when `worker` cannot be reached any more.
    pub async fn lost(&self, worker: WorkerId) {
        self.gateway.fleet().lost(worker).await;
    }

    /// Sends `body` where the answer is to come from, and waits until it has begun; not for a worker that cannot be
    /// reached any more, though its connection stands.
    pub async fn serve(&self, leg: &Leg, body: Bytes) -> Result<Opened, LegError> {
        tokio::select! {
            opened = self.opened(leg, body) => opened,
            () = Vigil::over(self.gateway.clone(), leg.worker).gone() => Err(LegError::Silent),
        }
    }

    async fn opened(&self, leg: &Leg, body: Bytes) -> Result<Opened, LegError> {
        let answer = self.send(leg, &self.path, body).await?;
        if let Some(error) = failure(answer.status()) {
            return Err(error);
        }
        if is_event_stream(answer.headers()) { first_piece(answer).await } else { self.whole(answer).await }
    }

    /// Sends a leg whose text nobody reads, and reads what its answer tells.
    pub async fn silent(&self, leg: &Leg, path: &str, body: Bytes) -> Result<Answer, LegError> {
        self.whole_answer(leg, path, body).await.map(|(_, answer)| answer)
    }

    /// Sends a leg that no client reads: its answer's text, and what it tells.
    pub async fn whole_answer(&self, leg: &Leg, path: &str, body: Bytes) -> Result<(Bytes, Answer), LegError> {
        let sent = async {
            let answer = self.send(leg, path, body).await?;
            match answer.status() {
                status if status.is_success() => self.whole(answer).await,
                status => Err(failure(status).unwrap_or(LegError::Failed(status))),
            }
        };
        match tokio::time::timeout(SILENT_LEG_LIMIT, sent).await {
            Ok(Ok(Opened::Whole(whole, answer))) => Ok((whole.into_body(), answer)),
            Ok(Ok(Opened::Stream(..))) => Err(LegError::Broken),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(LegError::Upstream(UpstreamError::Timeout(SILENT_LEG_LIMIT))),
        }
    }

    /// All of an answer; a long one is read aside.
    async fn whole(&self, answer: Response<WorkerBody>) -> Result<Opened, LegError> {
        let (mut head, body) = answer.into_parts();
        let body = Limited::new(body, LARGEST_ANSWER).collect().await.map_err(|_| LegError::Broken)?.to_bytes();
        head.headers = answer_headers(&head.headers);
        let (load, text) = (self.load.on(body.len()), body.clone());
        let read = move || Answer::read(&text).unwrap_or_default();
        let told = load.done(&self.gateway.aside, read).await.unwrap_or_default();
        Ok(Opened::Whole(Response::from_parts(head, body), told))
    }

    /// Data-parallel ranks of a worker. Where there are several, an engine that is told none takes any.
    fn ranks(&self, worker: WorkerId) -> u16 {
        let workers = self.gateway.fleet().snapshot();
        workers.iter().find(|view| view.id == worker).map_or(1, |view| view.ranks)
    }

    async fn send(&self, leg: &Leg, path: &str, body: Bytes) -> Result<Response<WorkerBody>, LegError> {
        let worker = self.gateway.worker(leg.worker).ok_or(LegError::Unknown)?;
        let mut headers = self.gateway.headers_for(&worker, &self.client);
        if self.ranks(leg.worker) > 1 {
            headers.insert(RANK, HeaderValue::from(leg.rank.0));
        }
        let request = Outgoing { method: Method::POST, path: path.to_owned(), headers, body };
        let sent = self.gateway.upstream.send(worker.config.endpoint(), request).await;
        if let Err(UpstreamError::Connect(_)) = &sent {
            self.gateway.fleet().unreachable(leg.worker);
        }
        Ok(direct(sent?)?)
    }
}

/// The client's headers, with a request id that all legs share: engines pair the legs of a transfer by it. The answer
/// must be one that is read here: a packed one would seem to break off.
fn client_headers(request: &Request) -> HeaderMap {
    let mut headers = request.incoming.headers_with_own_id();
    headers.remove(RANK);
    if headers.contains_key(ACCEPT_ENCODING) {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    headers
}

/// What the legs of a request have in common.
pub fn options(request: &Request) -> LegOptions {
    LegOptions {
        api: match request.endpoint {
            Endpoint::ChatCompletions => Api::Chat,
            Endpoint::Completions => Api::Completions,
            Endpoint::Messages => Api::Messages,
            Endpoint::Responses => Api::Responses,
        },
        salt: request.salt.clone(),
        usage: match request.delivery {
            Delivery::Stream { usage_wanted: false } => UsageEvent::Always,
            Delivery::Stream { usage_wanted: true } | Delivery::Whole => UsageEvent::AsAsked,
        },
        ids: TokenIds::AsAsked,
    }
}

/// What a status says about the worker; nothing for answers that are the client's to read.
fn failure(status: StatusCode) -> Option<LegError> {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some(LegError::Busy(status)),
        StatusCode::NOT_IMPLEMENTED => None,
        status if status.is_server_error() => Some(LegError::Failed(status)),
        _ => None,
    }
}

async fn first_piece(answer: Response<WorkerBody>) -> Result<Opened, LegError> {
    let (head, mut body) = answer.into_parts();
    loop {
        let frame = body.frame().await.ok_or(LegError::Broken)?.map_err(|_| LegError::Broken)?;
        if let Ok(piece) = frame.into_data() {
            return Ok(Opened::Stream(Response::from_parts(head, body), piece));
        }
    }
}

/// Who failed, as far as can be told: a decode leg that fails after a prefill leg points at the producer's blocks as
/// often as at itself, and the next plan must not repeat the pair.
pub fn culprit(plan: &Plan, error: &LegError) -> WorkerId {
    let apart = plan.prefill.worker != plan.decode.worker;
    match error {
        LegError::Failed(_) | LegError::NoSource if apart => plan.prefill.worker,
        _ => plan.decode.worker,
    }
}
