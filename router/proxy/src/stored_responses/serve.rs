//! Serves `/v1/responses`: a request goes to the worker that stores what it needs, or takes its history along.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use http::header::ACCEPT_ENCODING;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use vocabulary::{WorkerHealth, WorkerId};
use workers_shim::engine_api::{LegBody, StrippedFieldCounts};

use super::transcript::ConversationAddition;
use super::{IdSniffer, is_response_id};
use crate::client_request::{ClientRequest, Envelope, GenerationEndpoint};
use crate::error::ApiError;
use crate::forward::{ResponseCapture, UnplannedForwarder, WorkerSelector};
use crate::offload_pool::OffloadSpec;
use crate::pipeline::{Pipeline, serve_generation};
use crate::quotas::TokenReservation;
use crate::shared_cache::SharedCache;
use crate::upstream::WorkerRequest;
use crate::worker_pool::PoolMember;
use vocabulary::truncated;

/// Marks answers to requests into which the router put the history: the engine got the whole conversation as its input.
const RESOLVED_HEADER: HeaderName = HeaderName::from_static("x-ownerserve-history-source");
/// Timeout for asking workers whether they know a response.
const ASK_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum part of a worker's answer that is read for that.
const MAX_PEEK_BYTES: usize = 256 << 10;

/// Serves `/v1/responses`.
#[derive(Debug)]
pub(crate) struct ResponsesApi {
    pub(crate) pipeline: Arc<Pipeline>,
    pub(crate) forwarder: UnplannedForwarder,
    pub(crate) shared_cache: Arc<SharedCache>,
}

impl ResponsesApi {
    /// Serves a new response. One that follows another goes to the worker that created that one; where that worker or its
    /// memory is gone, it goes to any other worker with its history as input.
    pub(crate) async fn create(&self, mut request: ClientRequest) -> Result<Response, ApiError> {
        if request.headers.contains_key(ACCEPT_ENCODING) {
            // The answer is read here as it passes, so it must not be compressed.
            request.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        }
        let (load, keeps) = (OffloadSpec::of(&request), self.shared_cache.transcript_limit() > 0);
        let work = move || {
            let addition = keeps.then(|| ConversationAddition::read(&request.body)).flatten();
            request.addition = addition.map(|adds| adds.charged(|input| request.charge_derived(input))).transpose()?;
            let envelope = Envelope::read(&request.body)?.into_owned();
            Ok::<_, ApiError>((request, envelope))
        };
        let (mut request, envelope) = load.run(&self.forwarder.offload_pool, work).await??;
        if envelope.is_background && request.token_reservation.as_ref().is_some_and(TokenReservation::is_metered) {
            let accepted =
                "false is accepted: your tokens are limited, and nobody is told how many a background response uses";
            return Err(ApiError::invalid_field("background", accepted));
        }
        let Some(previous) = envelope.previous_response_id.as_deref() else {
            return self.serve_anywhere(request, &envelope).await;
        };
        let mut stripped = StrippedFieldCounts::default();
        let followed = match self.find_worker(&request, previous).await {
            Ok(maker) if self.can_answer(maker) => {
                // The history is stored at that worker: the request is forwarded as it is.
                let (request, left_out) = self.forwarder.sanitized(request.clone()).await?;
                stripped = left_out;
                self.forwarder.forward(&request, WorkerSelector::Worker(maker), ResponseCapture::Step).await
            }
            Ok(_) => Err(ApiError::WorkerFailed { detail: "the one that made the response before is gone".into() }),
            Err(error) => Err(error),
        };
        let resolved = match has_forgotten(&followed) {
            false => None,
            true => {
                let resolved =
                    self.forwarder.responses.resolve(&self.forwarder.offload_pool, &request, previous).await?;
                self.forwarder.metrics.shared_cache.count_resolution(resolved.as_ref().map(drop));
                resolved
            }
        };
        let Some(body) = resolved else {
            self.forwarder.metrics.requests.count_stripped(stripped);
            return followed;
        };
        tracing::info!(request = %request.id, "a response is continued away from its maker, with its history as input");
        request.body = body;
        let mut response = self.serve_anywhere(request, &envelope).await?;
        response.headers_mut().insert(RESOLVED_HEADER, HeaderValue::from_static("transcript"));
        Ok(response)
    }

    /// Serves the request at the best worker, like any other step.
    async fn serve_anywhere(&self, request: ClientRequest, envelope: &Envelope<'_>) -> Result<Response, ApiError> {
        match envelope.model.as_deref() {
            Some(_) if !envelope.is_detached => {
                serve_generation(&self.pipeline, GenerationEndpoint::Responses, request).await
            }
            model => {
                let (request, stripped) = self.forwarder.sanitized(request).await?;
                self.forwarder.metrics.requests.count_stripped(stripped);
                self.forwarder.forward(&request, WorkerSelector::Model(model), ResponseCapture::Response).await
            }
        }
    }

    /// Serves `GET`, `DELETE` and the sub-resources of `/v1/responses/{id}`.
    pub(crate) async fn serve_stored(&self, request: &ClientRequest) -> Result<Response, ApiError> {
        let path = request.path.split('?').next().unwrap_or_default();
        let rest = path.strip_prefix("/v1/responses/").unwrap_or_default();
        let id = rest.split('/').next().unwrap_or_default();
        let worker = self.find_worker(request, id).await?;
        let response =
            self.forwarder.forward(request, WorkerSelector::Worker(worker), ResponseCapture::Nothing).await?;
        if request.method == Method::DELETE && response.status().is_success() {
            self.forwarder.responses.forget(&request.tenant, id);
        }
        Ok(response)
    }

    /// Returns the worker that created `id`. A record of another router may be on its way, or Redis may have lost it: then
    /// the workers themselves are asked. They do not know tenants, so only where there is a single one.
    async fn find_worker(&self, request: &ClientRequest, id: &str) -> Result<WorkerId, ApiError> {
        if let Some(worker) = self.forwarder.responses.worker_of(&request.tenant, id).await {
            return Ok(worker);
        }
        let unknown = ApiError::UnknownResponse { id: truncated(id) };
        let Some(lag) = self.shared_cache.max_propagation_delay().filter(|_| is_response_id(id)) else {
            return Err(unknown);
        };
        if self.forwarder.isolation.keys().required() {
            if self.shared_cache.degraded_health().is_some() {
                return Err(ApiError::UnsettledResponse { id: truncated(id) });
            }
            tokio::time::sleep(lag).await;
            return self.forwarder.responses.worker_of(&request.tenant, id).await.ok_or(unknown);
        }
        let worker = self.ask_workers(&request.headers, id).await.ok_or(unknown)?;
        self.forwarder.responses.register(&request.tenant, id, worker);
        Ok(worker)
    }

    /// Returns the first worker that knows `id`.
    async fn ask_workers(&self, client: &HeaderMap, id: &str) -> Option<WorkerId> {
        let answering = self.forwarder.listed_workers.answering(self.forwarder.workers.fleet());
        let mut answers: FuturesUnordered<_> =
            answering.iter().map(|member| self.ask_worker(member, (client, id))).collect();
        let first = async {
            loop {
                if let Some(worker) = answers.next().await? {
                    return Some(worker);
                }
            }
        };
        tokio::time::timeout(ASK_TIMEOUT, first).await.ok().flatten()
    }

    async fn ask_worker(&self, member: &PoolMember, (client, id): (&HeaderMap, &str)) -> Option<WorkerId> {
        let mut headers = self.forwarder.workers.headers_for(member, client);
        headers.remove(ACCEPT_ENCODING);
        let path = format!("/v1/responses/{id}");
        let outgoing = WorkerRequest { method: Method::GET, path, headers, body: LegBody::default() };
        let answer = self.forwarder.workers.send(member, outgoing).await.ok()?;
        if !answer.status().is_success() {
            return None;
        }
        let body = Limited::new(answer.into_body(), MAX_PEEK_BYTES).collect().await.ok()?.to_bytes();
        (IdSniffer::default().feed(&body).as_deref() == Some(id)).then_some(member.id)
    }

    /// Whether it makes sense to try the worker.
    fn can_answer(&self, worker: WorkerId) -> bool {
        self.forwarder
            .workers
            .fleet()
            .snapshot()
            .iter()
            .any(|view| view.id == worker && view.health != WorkerHealth::Unreachable)
    }
}

/// Whether the answer or the error means that the worker of the previous response, or its memory of it, is gone.
fn has_forgotten(followed: &Result<Response, ApiError>) -> bool {
    match followed {
        Ok(response) => response.status() == StatusCode::NOT_FOUND,
        Err(ApiError::UnknownResponse { .. } | ApiError::UnsettledResponse { .. } | ApiError::WorkerFailed { .. }) => {
            true
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests;
