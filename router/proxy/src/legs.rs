//! Legs: one plan's requests to workers. Where each leg goes, with which headers, and how its answer is judged.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use planner::{Leg, Plan};
use vocabulary::{Micros, WorkerId};
use workers_shim::engine_api::{
    AnswerSummary, AnswerTokenIdsMode, Api, ClientRequestBody, EventBufferBudget, EventBufferShare, KvTransfer,
    LegBody, LegOptions,
};
use workers_shim::fleet::InFlightGuard;
use workers_shim::scrape::EngineKind;

use crate::client_request::GenerationEndpoint;
use crate::identified_request::{ParsedRequest, leg_options};
use crate::leg_outcome::{LegError, LegResponse};
use crate::liveness_watch::LivenessWatch;
use crate::memory_budget::MemoryReservation;
use crate::offload_pool::OffloadSpec;
use crate::passthrough::is_event_stream;
use crate::request_id::REQUEST_ID;
use crate::request_states::ClassifiedStep;
use crate::upstream::{UpstreamError, WorkerBody, WorkerRequest, reject_redirects, response_headers};
use crate::worker_client::WorkerClient;

/// Largest whole answer that is buffered.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// Timeout for a leg whose text nobody reads.
pub const SILENT_LEG_TIMEOUT: Duration = Duration::from_secs(120);
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// The requests of one plan. Cheap to clone: the body is shared.
#[derive(Clone)]
pub struct Legs {
    client: WorkerClient,
    path: String,
    client_headers: HeaderMap,
    load: OffloadSpec,
    /// Memory reserved for the body that legs are derived from; `None` for legs that no client asked for.
    pub(crate) reserved: Option<Arc<MemoryReservation>>,
    /// The client's body, scanned.
    pub body: ClientRequestBody,
    /// Options that the bodies of all legs share.
    pub options: LegOptions,
}

impl Legs {
    /// Builds the legs of this step.
    pub fn of(client: &WorkerClient, step: &ClassifiedStep) -> Self {
        let request = &step.located.identified.request;
        // Without token ids an answer could not resume at another worker.
        let ids =
            if step.resume_blocker.is_none() { AnswerTokenIdsMode::Always } else { AnswerTokenIdsMode::AsRequested };
        Self {
            client: client.clone(),
            path: request.incoming.path.clone(),
            client_headers: client_headers(request),
            load: OffloadSpec::of(&request.incoming),
            reserved: request.incoming.memory.clone(),
            body: request.body.clone(),
            options: LegOptions { ids, ..leg_options(request) },
        }
    }

    /// Builds the legs for the rest of an answer, which is a completion of token ids.
    pub fn for_resume(self, body: ClientRequestBody) -> Result<Self, LegError> {
        let options = LegOptions { api: Api::Completions, ..self.options };
        let reserved = match &self.reserved {
            Some(memory) => {
                let mut own = memory.sibling();
                own.grow(body.scanned_json().body().len()).map_err(LegError::OverBudget)?;
                Some(Arc::new(own))
            }
            None => None,
        };
        Ok(Self { path: GenerationEndpoint::Completions.path().into(), body, options, reserved, ..self })
    }

    /// Adapts these legs to the engine of this worker.
    pub fn for_worker(self, target: WorkerId) -> Self {
        match self.client.fleet().engine(target) {
            EngineKind::Vllm => self,
            EngineKind::Sglang | EngineKind::Other => {
                Self { options: LegOptions { ids: AnswerTokenIdsMode::AsRequested, ..self.options }, ..self }
            }
        }
    }

    /// Builds legs that no client asked for.
    pub fn without_client(client: &WorkerClient) -> Self {
        let mut client_headers = HeaderMap::new();
        client_headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let request = crate::request_id::new_request_id();
        client_headers.insert(REQUEST_ID, crate::request_id::id_value(request));
        Self {
            client: client.clone(),
            path: String::new(),
            client_headers,
            load: OffloadSpec::unasked(request),
            reserved: None,
            body: ClientRequestBody::read(Bytes::from_static(b"{}")).expect("an empty object is JSON"),
            options: LegOptions { api: Api::Completions, ..LegOptions::default() },
        }
    }

    /// Returns the path and query as the client sent them; engines use the same.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Counts a leg that computes for another worker in its own worker's load.
    pub fn dispatch(&self, leg: &Leg) -> InFlightGuard {
        self.client.fleet().dispatch(leg.worker, leg.rank, leg.computed_tokens)
    }

    /// Records the duration of a transfer, from which link speeds are learned.
    pub fn record_transfer(&self, target: WorkerId, moved: vocabulary::Bytes, took: Micros) {
        self.client.fleet().record_transfer(target, moved, took);
    }

    /// Whether this worker can answer prompts that it computed itself.
    pub fn serves_alone(&self, worker: WorkerId) -> bool {
        let workers = self.client.fleet().snapshot();
        let link = workers.iter().find(|view| view.id == worker).and_then(|view| view.link.as_ref());
        link.is_none_or(|link| link.carries.computes_prompts())
    }

    /// Returns how KV moves from the source leg's rank to the target leg's worker; `None` where their connectors do not
    /// match.
    pub fn transfer(&self, source: &Leg, target: &Leg) -> Option<KvTransfer> {
        let room = crate::request_id::new_request_id().0 as u64;
        self.client.fleet().transfer((source.worker, source.rank), target.worker, room)
    }

    /// Returns when `worker` becomes unreachable.
    pub async fn worker_lost(&self, worker: WorkerId) {
        self.client.fleet().wait_lost(worker).await;
    }

    /// Sends `body` to the leg's worker and waits until the answer has begun. Gives up on a worker that becomes
    /// unreachable, even though its connection stays open.
    pub async fn serve(&self, leg: &Leg, body: LegBody) -> Result<LegResponse, LegError> {
        tokio::select! {
            opened = self.open_response(leg, body) => opened,
            () = LivenessWatch::new(self.client.fleet().clone(), leg.worker).given_up() => Err(LegError::Silent),
        }
    }

    async fn open_response(&self, leg: &Leg, body: LegBody) -> Result<LegResponse, LegError> {
        let answer = self.send(leg, &self.path, body).await?;
        if let Some(error) = failure(answer.status()) {
            return Err(error);
        }
        if is_event_stream(answer.headers()) { read_first_chunk(answer).await } else { self.read_whole(answer).await }
    }

    /// Sends a leg whose text nobody reads, and returns what its answer reports.
    pub async fn send_silent(&self, leg: &Leg, path: &str, body: LegBody) -> Result<AnswerSummary, LegError> {
        self.send_whole(leg, path, body).await.map(|(_, answer)| answer)
    }

    /// Sends a leg that no client reads, and returns its text and what it reports.
    pub async fn send_whole(&self, leg: &Leg, path: &str, body: LegBody) -> Result<(Bytes, AnswerSummary), LegError> {
        let sent = async {
            let answer = self.send(leg, path, body).await?;
            match answer.status() {
                status if status.is_success() => self.read_whole(answer).await,
                status => Err(failure(status).unwrap_or(LegError::Failed(status))),
            }
        };
        match tokio::time::timeout(SILENT_LEG_TIMEOUT, sent).await {
            Ok(Ok(LegResponse::Whole(whole, answer))) => Ok((whole.into_body(), answer)),
            Ok(Ok(LegResponse::Stream(..))) => Err(LegError::Broken),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(LegError::Upstream(UpstreamError::Timeout(SILENT_LEG_TIMEOUT))),
        }
    }

    /// Reads a whole answer; a long one is parsed on the offload pool.
    async fn read_whole(&self, answer: Response<WorkerBody>) -> Result<LegResponse, LegError> {
        let (mut head, body) = answer.into_parts();
        let body = collect_body(body, self.client.event_budget()).await?;
        head.headers = response_headers(&head.headers);
        let (load, text) = (self.load.on(body.len()), body.clone());
        let read = move || AnswerSummary::read(&text).unwrap_or_default();
        let answer = load.run(self.client.offload_pool(), read).await.unwrap_or_default();
        Ok(LegResponse::Whole(Response::from_parts(head, body), answer))
    }

    /// Reserves memory for what a leg's body does not share with the client's, until it was sent.
    pub(crate) fn charge(&self, body: LegBody) -> Result<LegBody, LegError> {
        match &self.reserved {
            Some(memory) => memory.charge_leg(body).map_err(LegError::OverBudget),
            None => Ok(body),
        }
    }

    async fn send(&self, leg: &Leg, path: &str, body: LegBody) -> Result<Response<WorkerBody>, LegError> {
        let body = self.charge(body)?;
        let worker = self.client.worker(leg.worker).ok_or(LegError::UnknownWorker)?;
        let mut headers = self.client.headers_for(&worker, &self.client_headers);
        // Of several ranks, an engine that gets no rank header picks one.
        if self.client.fleet().ranks(leg.worker) > 1 {
            headers.insert(RANK_HEADER, HeaderValue::from(leg.rank.0));
        }
        let request = WorkerRequest { method: Method::POST, path: path.to_owned(), headers, body };
        let sent = self.client.send(&worker, request).await;
        if let Err(UpstreamError::Connect(_)) = &sent {
            self.client.fleet().mark_unreachable(leg.worker);
        }
        Ok(reject_redirects(sent?)?)
    }
}

/// Collects a whole answer, which must fit into what is left of `budget`.
async fn collect_body(body: WorkerBody, budget: EventBufferBudget) -> Result<Bytes, LegError> {
    let mut share = EventBufferShare::of(budget);
    let (mut body, mut chunks, mut length) = (Limited::new(body, MAX_ANSWER_BYTES), Vec::<Bytes>::new(), 0);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| LegError::Broken)?.into_data() else { continue };
        length += data.len();
        if !share.reserve(length) {
            tracing::warn!(
                length,
                "no memory is left for an answer that comes as one body; see upstream.stream_buffer_limit"
            );
            return Err(LegError::AnswerOverBudget);
        }
        chunks.push(data);
    }
    let whole = match &mut chunks[..] {
        [only] => std::mem::take(only),
        _ => {
            let mut whole = BytesMut::with_capacity(length);
            chunks.iter().for_each(|chunk| whole.extend_from_slice(chunk));
            whole.freeze()
        }
    };
    Ok(share.hold(whole))
}

/// Returns the client's headers with the request id that all legs share: engines pair the legs of a transfer by it.
/// Compression is disabled because the answer is read here: a compressed one would look broken.
fn client_headers(request: &ParsedRequest) -> HeaderMap {
    let mut headers = request.incoming.headers_with_request_id();
    headers.remove(RANK_HEADER);
    if headers.contains_key(ACCEPT_ENCODING) {
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    headers
}

/// Returns the error that a status stands for; `None` for answers that are the client's to read.
fn failure(status: StatusCode) -> Option<LegError> {
    match status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some(LegError::Busy(status)),
        StatusCode::NOT_IMPLEMENTED => None,
        status if status.is_server_error() => Some(LegError::Failed(status)),
        _ => None,
    }
}

async fn read_first_chunk(answer: Response<WorkerBody>) -> Result<LegResponse, LegError> {
    let (head, mut body) = answer.into_parts();
    loop {
        let frame = body.frame().await.ok_or(LegError::Broken)?.map_err(|_| LegError::Broken)?;
        if let Ok(piece) = frame.into_data() {
            return Ok(LegResponse::Stream(Response::from_parts(head, body), piece));
        }
    }
}

/// Returns the worker that the next plan excludes: a decode leg that fails after a prefill leg may be the prefill
/// worker's fault just as well, and the next plan must not repeat the pair.
pub fn worker_to_exclude(plan: &Plan, error: &LegError) -> WorkerId {
    let (source, target) = (plan.prompt_leg().worker, plan.target());
    match error {
        LegError::Failed(_) | LegError::NoSource if source != target => source,
        _ => target,
    }
}
