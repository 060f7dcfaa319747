//! Forwards a request to a worker without a plan: to the least loaded one, and to another one if that fails.

mod end;

use std::sync::Arc;

use axum::response::Response;
use bytes::Bytes;
use http::StatusCode;
use prometheus::{IntCounter, IntCounterVec};
use vocabulary::{ModelId, Tokens, WorkerHealth, WorkerId};
use workers_shim::engine_api::{ClientRequestBody, EventRefusal, LegOptions, StrippedFieldCounts, TokenUsage};

use crate::client_request::ClientRequest;
use crate::error::{ApiError, ErrorRecipient};
use crate::offload_pool::{OffloadPool, OffloadSpec};
use crate::outliers::SharedOutlierDetector;
use crate::passthrough::{PassthroughOutcome, ResponseObserver, is_event_stream, relay};
use crate::quotas::{BYTES_PER_TOKEN, TokenReservation};
use crate::receipt::RequestOutcome;
use crate::request_parser::refuse_media_ids;
use crate::stored_responses::StoredResponses;
use crate::stored_responses::answer_recorder::{ForwardedAnswerReader, ObservedAnswer};
use crate::stored_responses::listener::{BodyFormat, ResponseRecorder};
use crate::telemetry::metrics::Metrics;
use crate::tenant_isolation::TenantIsolation;
use crate::upstream::{UpstreamError, WorkerBody, WorkerRequest, reject_redirects};
use crate::usage_bounds::{UNBOUNDED_ANSWER, max_plausible, max_plausible_answer};
use crate::worker_client::WorkerClient;
use crate::worker_pool::{DispatchGuard, WorkerPool};
pub use end::{ForwardEnd, ForwardEndSinks, ForwardedContinuation};

/// Maximum number of workers tried for one request.
const MAX_ATTEMPTS: usize = 3;

/// Selects the workers that can serve a request.
#[derive(Clone, Copy, Debug)]
pub enum WorkerSelector<'a> {
    /// Any worker that serves the model; with `None` any worker at all.
    Model(Option<&'a str>),
    /// Only this worker.
    Worker(WorkerId),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ResponseCapture {
    Nothing,
    /// Learns the id of the response that the worker created, and its output where transcripts are kept.
    Response,
    /// The same for a step that follows a stored response, and records its receipt.
    Step,
}

/// Forwards requests that are not planned.
#[derive(Clone, Debug)]
pub struct UnplannedForwarder {
    /// Client to the workers.
    pub workers: WorkerClient,
    /// The workers, for requests that are not planned.
    pub listed_workers: Arc<WorkerPool>,
    /// What keeps tenants apart.
    pub isolation: TenantIsolation,
    /// Detector of workers whose requests fail.
    pub outliers: SharedOutlierDetector,
    /// Runs long computations off the async threads.
    pub offload_pool: Arc<OffloadPool>,
    /// Responses stored at workers.
    pub responses: Arc<StoredResponses>,
    /// The sinks that take the end of each forwarded request.
    pub ends: Arc<ForwardEndSinks>,
    /// All metrics.
    pub metrics: Arc<Metrics>,
}

impl UnplannedForwarder {
    /// Returns `request` without the fields that only routers may send, and with the tenant's cache salt: paths without
    /// a plan reach the same engines and caches. Also returns the removed fields, to be counted once per request.
    pub async fn sanitized(
        &self,
        mut request: ClientRequest,
    ) -> Result<(ClientRequest, StrippedFieldCounts), ApiError> {
        let options = LegOptions { salt: self.isolation.salt_of(&request.tenant), ..LegOptions::default() };
        let load = OffloadSpec::of(&request);
        let work = move || {
            let body = ClientRequestBody::read(request.body.clone()).map_err(ApiError::invalid_body)?;
            if options.salt.is_some() {
                refuse_media_ids(body.scanned_json())?;
            }
            let stripped = body.stripped(&options);
            request.body = request.charge_derived(body.plain(&options).into_bytes())?;
            Ok((request, stripped))
        };
        load.run(&self.offload_pool, work).await?
    }

    /// Forwards `request` and relays the answer. A worker that cannot be reached, or that fails before its answer
    /// begins, is excluded and another one tried.
    pub(crate) async fn forward(
        &self,
        request: &ClientRequest,
        to: WorkerSelector<'_>,
        learn: ResponseCapture,
    ) -> Result<Response, ApiError> {
        let barred = self.isolation.barred_workers();
        let mut tried = Vec::new();
        let reserved = request.token_reservation.clone();
        loop {
            let sent = self.choose(to, (&tried, &barred))?;
            let worker = sent.member.id;
            reserved.iter().for_each(TokenReservation::begin);
            match self.attempt(request, &sent).await {
                Ok(answer) => {
                    let form = if is_event_stream(answer.headers()) { BodyFormat::Events } else { BodyFormat::Whole };
                    let (listener, filing) =
                        self.response_recorders(request, (learn, worker), (answer.status(), form)).await;
                    let client = request.error_recipient();
                    let budget = self.workers.event_budget();
                    let bounds =
                        MaxPlausibleUsage::most(request, learn, filing.as_ref().and_then(ForwardedAnswerReader::asked));
                    let status = answer.status();
                    let watch = ForwardObserver {
                        ends: self.ends.clone(),
                        interrupted: self.metrics.requests.errors.with_label_values(&["stream_interrupted"]),
                        refused_events: self.metrics.requests.refused_events.clone(),
                        client,
                        dispatch: sent,
                        status,
                        listener,
                        receipt_recorder: filing,
                        offload_pool: self.offload_pool.clone(),
                        reservation: reserved,
                        bounds,
                        is_broken: false,
                    };
                    return Ok(relay(answer, budget, watch));
                }
                Err(error) => {
                    reserved.iter().for_each(TokenReservation::came_to_nothing);
                    tracing::warn!(worker = %sent.member.config.endpoint(), request = %request.id, %error, "try failed");
                    if let UpstreamError::Connect(_) = &error {
                        self.workers.fleet().mark_unreachable(worker);
                    }
                    tried.push(worker);
                    if !error.retryable() || matches!(to, WorkerSelector::Worker(_)) || tried.len() == MAX_ATTEMPTS {
                        return Err(error.client_error());
                    }
                    self.metrics.requests.retries.with_label_values(&[error.as_ref()]).inc();
                }
            }
        }
    }

    fn choose(
        &self,
        to: WorkerSelector<'_>,
        (tried, barred): (&[WorkerId], &[WorkerId]),
    ) -> Result<DispatchGuard, ApiError> {
        let gone = || ApiError::WorkerFailed { detail: "no worker that could serve this is reachable".into() };
        let (listed, fleet) = (&self.listed_workers, self.workers.fleet());
        match to {
            WorkerSelector::Worker(id) if tried.contains(&id) => Err(gone()),
            WorkerSelector::Worker(id) if barred.contains(&id) => Err(ApiError::SaltsIgnored { model: "any".into() }),
            WorkerSelector::Worker(id) => listed.dispatch(fleet, id).ok_or_else(gone),
            WorkerSelector::Model(model) => {
                // Trials of ejected workers are for requests whose end shows whether the worker is healthy.
                let workers = fleet.snapshot();
                let ejected = self.outliers.lock().all_ejected(&workers);
                // Whether a worker that is barred for ignoring salts would serve it.
                let is_barred = workers.iter().any(|worker| {
                    barred.contains(&worker.id)
                        && worker.health != WorkerHealth::Unreachable
                        && model.is_none_or(|model| worker.models.contains(&ModelId::from(model)))
                });
                match listed.pick(fleet, model, (&[tried, barred].concat(), &ejected)) {
                    Err(ApiError::NoWorker { .. }) if !tried.is_empty() => Err(gone()),
                    Err(ApiError::NoWorker { model }) if is_barred => Err(ApiError::SaltsIgnored { model }),
                    picked => picked,
                }
            }
        }
    }

    async fn attempt(
        &self,
        request: &ClientRequest,
        sent: &DispatchGuard,
    ) -> Result<http::Response<WorkerBody>, UpstreamError> {
        let member = &sent.member;
        let outgoing = WorkerRequest {
            method: request.method.clone(),
            path: request.path.clone(),
            headers: self.workers.headers_for(member, &request.headers_with_request_id()),
            body: request.body.clone().into(),
        };
        reject_redirects(self.workers.send(member, outgoing).await?)
    }

    async fn response_recorders(
        &self,
        request: &ClientRequest,
        (learn, worker): (ResponseCapture, WorkerId),
        (status, form): (StatusCode, BodyFormat),
    ) -> (Option<ResponseRecorder>, Option<ForwardedAnswerReader>) {
        let stores = (self.responses.clone(), self.offload_pool.clone());
        let is_wanted = learn != ResponseCapture::Nothing && status.is_success();
        let filed = match learn {
            ResponseCapture::Step => {
                ForwardedAnswerReader::of((&self.offload_pool, &self.responses), request, (status, form)).await
            }
            ResponseCapture::Nothing | ResponseCapture::Response => None,
        };
        let session = filed.as_ref().and_then(ForwardedAnswerReader::session);
        let listener = is_wanted.then(|| ResponseRecorder::new(stores, (request, session), worker, form));
        (listener, filed)
    }
}

/// Largest token counts that a worker can plausibly report.
#[derive(Clone, Copy)]
struct MaxPlausibleUsage {
    prompt: Tokens,
    /// The request's limit for its answer, where it sets one.
    asked: Option<Tokens>,
    /// What an answer without a limit may have, besides what was delivered.
    unlimited: Tokens,
}

impl MaxPlausibleUsage {
    /// Returns the limits for a request whose answer may have `asked` tokens, where it sets a limit. The history of a
    /// step that follows a response is stored at its worker, so its prompt may be larger than the body.
    fn most(request: &ClientRequest, learn: ResponseCapture, asked: Option<Tokens>) -> Self {
        let history = if learn == ResponseCapture::Nothing { Tokens::ZERO } else { UNBOUNDED_ANSWER };
        let prompt = max_plausible(Tokens(request.body.len() as u64 / BYTES_PER_TOKEN)).max(history);
        Self { prompt, asked, unlimited: history }
    }

    fn covers(self, usage: &TokenUsage, delivered: Tokens) -> bool {
        let max_answer = match self.asked {
            None => max_plausible(delivered).max(self.unlimited),
            asked => max_plausible_answer(asked, delivered),
        };
        usage.prompt <= self.prompt && usage.completion <= max_answer
    }
}

/// Counts the request in its worker's load while the answer runs, and learns from the answer.
struct ForwardObserver {
    ends: Arc<ForwardEndSinks>,
    /// Counts answers that break off.
    interrupted: IntCounter,
    refused_events: IntCounterVec,
    client: ErrorRecipient,
    dispatch: DispatchGuard,
    status: StatusCode,
    listener: Option<ResponseRecorder>,
    receipt_recorder: Option<ForwardedAnswerReader>,
    /// Where a long answer is read.
    offload_pool: Arc<OffloadPool>,
    /// Tokens reserved from the tenant's quota.
    reservation: Option<TokenReservation>,
    bounds: MaxPlausibleUsage,
    is_broken: bool,
}

impl ForwardObserver {
    fn end_broken(&mut self, error: ApiError) -> Bytes {
        self.is_broken = true;
        self.interrupted.inc();
        let number = self.listener.as_ref().map_or(0, ResponseRecorder::next_sequence_number);
        error.stream_event(self.client, number)
    }
}

impl ResponseObserver for ForwardObserver {
    fn on_end(&mut self, facts: PassthroughOutcome) {
        let (ends, reservation) = (self.ends.clone(), self.reservation.take());
        let (worker, status, bounds, is_broken) = (self.dispatch.member.id, self.status, self.bounds, self.is_broken);
        let end = move |recorded: Option<ObservedAnswer>| {
            let is_complete = recorded.as_ref().map_or(facts.is_over, |recorded| recorded.is_complete);
            let outcome = match () {
                () if is_broken => RequestOutcome::Interrupted,
                () if !status.is_success() => RequestOutcome::Rejected,
                () if is_complete => RequestOutcome::Complete,
                () => RequestOutcome::ClientDisconnected,
            };
            let (step, first_byte) = recorded.map(|recorded| (recorded.step, recorded.first_byte)).unzip();
            ends.record(ForwardEnd {
                step,
                worker,
                status,
                first_byte: first_byte.flatten(),
                outcome,
                usage: facts.usage,
                delivered: facts.delivered,
                reservation,
                bounds,
            });
        };
        match self.receipt_recorder.take() {
            Some(recorder) => recorder.finish(&self.offload_pool, move |recorded| end(Some(recorded))),
            None => end(None),
        }
    }

    fn on_chunk(&mut self, data: &Bytes) {
        if let Some(listener) = &mut self.listener {
            listener.on_chunk(data);
        }
        if let Some(filing) = &mut self.receipt_recorder {
            filing.on_chunk(data);
        }
    }

    fn on_broken(&mut self) -> Bytes {
        self.end_broken(ApiError::WorkerFailed { detail: "it broke off inside its answer".into() })
    }

    fn on_refused(&mut self, refusal: EventRefusal) -> Bytes {
        let worker = self.dispatch.member.id;
        tracing::warn!(%worker, %refusal, "an event of a worker's answer is not forwarded, which ends the answer");
        self.refused_events.with_label_values(&[refusal.as_ref()]).inc();
        self.end_broken(refusal.into())
    }
}
