//! `/v1/responses`: each goes to the worker that has what it needs, or takes its history along.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use http::header::ACCEPT_ENCODING;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, Limited};
use vocabulary::{Health, WorkerId};
use workers_shim::dialect::Stripped;

use super::transcript::Addition;
use super::{IdSniffer, is_response_id};
use crate::error::{ApiError, shortened};
use crate::forward::{Learn, Where, cleaned, forward};
use crate::gateway::Gateway;
use crate::incoming::{Endpoint, Envelope, Incoming};
use crate::pipeline::aside::Load;
use crate::pipeline::serve_generation;
use crate::quotas::Reserved;
use crate::roster::Member;
use crate::upstream::Outgoing;

/// On answers to requests whose history was put in here: the engine saw the whole conversation as its input.
const RESOLVED: HeaderName = HeaderName::from_static("x-ownerserve-resolved");
/// Longest time that workers are asked whether they know a response.
const ASKING: Duration = Duration::from_secs(2);
/// Most of a worker's answer that is looked at for that.
const LOOK: usize = 256 << 10;

/// A new response. One that follows another goes to the worker that made that one; where that worker, or its memory, is
/// gone, it goes to any other with its history as input.
pub(crate) async fn new_response(gateway: &Arc<Gateway>, mut request: Incoming) -> Result<Response, ApiError> {
    if request.headers.contains_key(ACCEPT_ENCODING) {
        // The answer is read here as it passes.
        request.headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    let (load, body) = (Load::of(&request), request.body.clone());
    let keeps = gateway.remembered.state.transcript_limit() > 0;
    let work = move || (keeps.then(|| Addition::read(&body)).flatten(), Envelope::read(&body).map(Envelope::owned));
    let (adds, envelope) = load.done(&gateway.aside, work).await?;
    request.adds = adds;
    let envelope = envelope?;
    if envelope.is_background && request.reserved.as_ref().is_some_and(Reserved::is_metered) {
        let accepted =
            "false is accepted: your tokens are limited, and nobody is told how many a background response uses";
        return Err(ApiError::field("background", accepted));
    }
    let Some(previous) = envelope.previous_response_id.as_deref() else {
        return anywhere(gateway, request, &envelope).await;
    };
    let mut stripped = Stripped::default();
    let followed = match maker(gateway, &request, previous).await {
        Ok(maker) if can_answer(gateway, maker) => {
            // What it is prompted with lies there: it is served as it is.
            let (request, left_out) = cleaned(gateway, request.clone()).await?;
            stripped = left_out;
            forward(gateway, &request, Where::Only(maker), Learn::Step).await
        }
        Ok(_) => Err(ApiError::WorkerFailed { detail: "the one that made the response before is gone".into() }),
        Err(error) => Err(error),
    };
    let resolved = match has_forgotten(&followed) {
        false => None,
        true => {
            let (load, of) = (Load::of(&request), (&request.tenant, previous));
            let responses = &gateway.remembered.responses;
            let resolved = responses.resolve((&load, &gateway.aside), of, &request.body).await;
            gateway.metrics.soft_state.resolved(resolved.as_ref().map(drop));
            resolved
        }
    };
    let Some(body) = resolved else {
        gateway.metrics.requests.count_stripped(stripped);
        return followed;
    };
    tracing::info!(request = %request.id, "a response is continued away from its maker, with its history as input");
    request.body = body;
    let mut response = anywhere(gateway, request, &envelope).await?;
    response.headers_mut().insert(RESOLVED, HeaderValue::from_static("transcript"));
    Ok(response)
}

/// Served by whoever does it best, as any other step.
async fn anywhere(gateway: &Arc<Gateway>, request: Incoming, envelope: &Envelope<'_>) -> Result<Response, ApiError> {
    match envelope.model.as_deref() {
        Some(_) if !envelope.is_detached => serve_generation(gateway, Endpoint::Responses, request).await,
        model => {
            let (request, stripped) = cleaned(gateway, request).await?;
            gateway.metrics.requests.count_stripped(stripped);
            forward(gateway, &request, Where::Model(model), Learn::Response).await
        }
    }
}

/// `GET`, `DELETE` and the sub-resources of `/v1/responses/{id}`.
pub(crate) async fn stored_response(gateway: &Arc<Gateway>, request: &Incoming) -> Result<Response, ApiError> {
    let path = request.path.split('?').next().unwrap_or_default();
    let rest = path.strip_prefix("/v1/responses/").unwrap_or_default();
    let id = rest.split('/').next().unwrap_or_default();
    let worker = maker(gateway, request, id).await?;
    let response = forward(gateway, request, Where::Only(worker), Learn::Nothing).await?;
    if request.method == Method::DELETE && response.status().is_success() {
        gateway.remembered.responses.forget(&request.tenant, id);
    }
    Ok(response)
}

/// Who made `id`. What other routers made may be on its way, or Redis may have forgotten it: then workers are asked
/// themselves. They do not know tenants, so only where there is one.
async fn maker(gateway: &Arc<Gateway>, request: &Incoming, id: &str) -> Result<WorkerId, ApiError> {
    if let Some(worker) = gateway.remembered.responses.maker(&request.tenant, id).await {
        return Ok(worker);
    }
    let unknown = ApiError::UnknownResponse { id: shortened(id) };
    let Some(lag) = gateway.remembered.state.lag().filter(|_| is_response_id(id)) else { return Err(unknown) };
    if gateway.keys.required() {
        if gateway.remembered.state.trouble().is_some() {
            return Err(ApiError::UnsettledResponse { id: shortened(id) });
        }
        tokio::time::sleep(lag).await;
        return gateway.remembered.responses.maker(&request.tenant, id).await.ok_or(unknown);
    }
    let worker = ask_workers(gateway, &request.headers, id).await.ok_or(unknown)?;
    gateway.remembered.responses.learn(&request.tenant, id, worker);
    Ok(worker)
}

/// The first worker that knows `id`.
async fn ask_workers(gateway: &Gateway, client: &HeaderMap, id: &str) -> Option<WorkerId> {
    let answering = gateway.roster.answering(gateway.fleet());
    let mut answers: FuturesUnordered<_> =
        answering.iter().map(|member| knows(gateway, member, (client, id))).collect();
    let first = async {
        loop {
            if let Some(worker) = answers.next().await? {
                return Some(worker);
            }
        }
    };
    tokio::time::timeout(ASKING, first).await.ok().flatten()
}

async fn knows(gateway: &Gateway, member: &Member, (client, id): (&HeaderMap, &str)) -> Option<WorkerId> {
    let mut headers = gateway.headers_for(member, client);
    headers.remove(ACCEPT_ENCODING);
    let path = format!("/v1/responses/{id}");
    let outgoing = Outgoing { method: Method::GET, path, headers, body: Bytes::new() };
    let answer = gateway.upstream.send(member.config.endpoint(), outgoing).await.ok()?;
    if !answer.status().is_success() {
        return None;
    }
    let body = Limited::new(answer.into_body(), LOOK).collect().await.ok()?.to_bytes();
    (IdSniffer::default().feed(&body).as_deref() == Some(id)).then_some(member.id)
}

/// Whether trying the worker itself makes sense.
fn can_answer(gateway: &Gateway, worker: WorkerId) -> bool {
    gateway.fleet().snapshot().iter().any(|view| view.id == worker && view.health != Health::Unreachable)
}

/// Whether the answer, or its lack, says that the maker of the response before, or its memory of it, is gone.
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
