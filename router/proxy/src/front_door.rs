//! The client listener: which paths exist, who may call them, and the log line and metrics of each request.
//!
//! Only the paths in the route table are served. Administration paths of engines are not in it and must never be.

mod request_guard;
mod routes;

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use futures::FutureExt as _;
use http::header::ALLOW;
use http::{HeaderValue, Method, StatusCode};
use vocabulary::TenantId;

use crate::client_request::{ClientRequest, Envelope};
use crate::error::{ApiError, ErrorFormat, ErrorReason, ErrorRecipient};
use crate::forward::{ResponseCapture, UnplannedForwarder, WorkerSelector};
use crate::host_check::{HostCheck, HostRules};
use crate::memory_budget::MemoryBudget;
use crate::model_list::ModelListCache;
use crate::offload_pool::OffloadSpec;
use crate::pipeline::{Pipeline, serve_generation};
use crate::quotas::{Quotas, TenantQuotas};
use crate::request_id::{REQUEST_ID, id_value, new_request_id};
use crate::server::{BodyLimits, UnauthenticatedPermit, drain_rejected, read_body};
use crate::shared_cache::SharedCache;
use crate::stored_responses::serve::ResponsesApi;
use crate::tenant_isolation::NotServingReason;
use request_guard::RequestGuard;
use routes::{ROUTES, Route, RouteHandler, UNSUPPORTED_PREFIXES};
use vocabulary::truncated;

/// What serves the clients' listener.
#[derive(Debug)]
pub struct FrontDoor {
    responses: ResponsesApi,
    forwarder: UnplannedForwarder,
    model_list: ModelListCache,
    quotas: Quotas,
    memory_budget: Arc<MemoryBudget>,
    body_limits: BodyLimits,
    host_rules: HostRules,
}

/// The handles and settings of the front door.
#[derive(Debug)]
pub struct FrontDoorParts {
    /// Serves generation requests.
    pub pipeline: Arc<Pipeline>,
    /// Forwards requests that are not planned.
    pub forwarder: UnplannedForwarder,
    /// The shared cache.
    pub shared_cache: Arc<SharedCache>,
    /// Quotas of tenants.
    pub quotas: Quotas,
    /// Memory budget for requests in progress.
    pub memory_budget: Arc<MemoryBudget>,
    /// Limits of bodies.
    pub body_limits: BodyLimits,
    /// Hosts and origins that are accepted.
    pub host_rules: HostRules,
}

impl FrontDoor {
    /// Returns a front door without a cached model list.
    pub fn new(parts: FrontDoorParts) -> Self {
        let FrontDoorParts { pipeline, forwarder, shared_cache, quotas, memory_budget, body_limits, host_rules } =
            parts;
        let responses = ResponsesApi { pipeline, forwarder: forwarder.clone(), shared_cache };
        Self {
            responses,
            forwarder,
            model_list: ModelListCache::default(),
            quotas,
            memory_budget,
            body_limits,
            host_rules,
        }
    }
}

/// Builds the router for the client listener.
pub fn routes(door: &Arc<FrontDoor>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let door = door.clone();
        router = router.route(route.path, any(move |request: Request| serve(door.clone(), route, request)));
    }
    let door = door.clone();
    router.fallback(move |request: Request| serve(door.clone(), &routes::UNKNOWN, request))
}

/// Serves one request from its arrival to the head of its answer; metrics follow the body until its end.
async fn serve(door: Arc<FrontDoor>, route: &'static Route, request: Request) -> Response {
    let arrived = Instant::now();
    let id = new_request_id();
    let named = request.headers().get(REQUEST_ID).cloned();
    let client = ErrorRecipient { format: ErrorFormat::of(request.uri().path()), request: id };
    let mut counted = RequestGuard::begin(door.forwarder.metrics.clone(), route.path, arrived);
    let dispatched = dispatch(&door, route, request, (client, arrived, &mut counted));
    let served = AssertUnwindSafe(dispatched).catch_unwind().await;
    let result = served.unwrap_or_else(|_| {
        tracing::error!(request = %id, path = route.path, "a panic; please report it");
        Err(ApiError::Internal { request: id.to_string() })
    });
    let mut response = result.unwrap_or_else(|error| error.response(client));
    if let Some(ErrorReason(cause)) = response.extensions().get() {
        door.forwarder.metrics.requests.errors.with_label_values(&[cause]).inc();
        tracing::debug!(request = %id, path = route.path, status = response.status().as_u16(), reason = cause, "refused");
    }
    let headers = response.headers_mut();
    match named {
        // The worker echoes the id that it was sent, which is ours; the client gets its own id back.
        Some(named) if headers.contains_key(REQUEST_ID) => drop(headers.insert(REQUEST_ID, named)),
        _ => drop(headers.entry(REQUEST_ID).or_insert_with(|| id_value(id))),
    }
    counted.wrap(response)
}

/// Checks method, key and path; the body is read only for requests that pass.
async fn dispatch(
    door: &Arc<FrontDoor>,
    route: &'static Route,
    request: Request,
    (client, arrived, running): (ErrorRecipient, Instant, &mut RequestGuard),
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let limits = door.body_limits;
    let admitted = HostCheck::new(&door.host_rules).check(&head).map_err(ApiError::from);
    let admitted = admitted.and_then(|()| admit(door, route, &head));
    let tenant = match admitted {
        Ok(AuthOutcome::Tenant(tenant)) => tenant,
        Ok(AuthOutcome::Answered(response)) => return Ok(response),
        Err(error) => return Err(drain_rejected(&head.headers, body, limits, error)),
    };
    let quotas = door.quotas.of(&tenant).filter(|_| route.handler.is_metered());
    let counted = match &quotas {
        None => None,
        Some(quotas) => match admit_request((door, &tenant, quotas), &head.headers, running).await {
            Ok(counted) => Some((quotas, counted)),
            Err(error) => {
                return Ok(with_quota_headers(quotas, Err(drain_rejected(&head.headers, body, limits, error)), client));
            }
        },
    };
    let mut memory = door.memory_budget.reservation(&tenant);
    let body =
        match read_body(&head.headers, body, (limits, &mut memory, (&door.forwarder.offload_pool, client.request)))
            .await
        {
            Ok(body) => body,
            Err(error) => {
                if let Some((quotas, counted)) = counted {
                    quotas.count_unread_body(counted).await;
                }
                return Err(error);
            }
        };
    let reserved = match counted {
        Some((quotas, counted)) if route.handler.uses_tokens() => match quotas.take_tokens(&body, counted).await {
            Ok(reserved) => Some(reserved),
            Err(error) => return Ok(with_quota_headers(quotas, Err(error), client)),
        },
        _ => None,
    };
    door.forwarder.metrics.requests.body_bytes.observe(body.len() as f64);
    let mut headers = head.headers;
    headers.remove(http::header::CONTENT_ENCODING);
    let path = head.uri.path_and_query().map_or(head.uri.path(), |path| path.as_str()).to_owned();
    let id = client.request;
    let memory = Some(Arc::new(memory));
    let method = head.method;
    let incoming = ClientRequest {
        id,
        tenant,
        method,
        path,
        headers,
        body,
        arrived,
        token_reservation: reserved,
        memory,
        addition: None,
    };
    let answer = handle(door, route, incoming).await;
    match quotas {
        None => answer,
        Some(quotas) => Ok(with_quota_headers(&quotas, answer, client)),
    }
}

/// Counts one request against the quota, and acquires its slot among the tenant's concurrent requests.
async fn admit_request(
    (door, tenant, quotas): (&FrontDoor, &TenantId, &TenantQuotas),
    headers: &http::HeaderMap,
    running: &mut RequestGuard,
) -> Result<crate::quotas::CountedRequest, ApiError> {
    let refused = || &door.forwarder.metrics.shared_cache.quota_refusals;
    let slot = quotas.acquire_slot();
    running.hold_slot(slot.inspect_err(|_| refused().with_label_values(&[&tenant.0, "concurrent_requests"]).inc())?);
    quotas.take_request(headers).await
}

/// Builds the response with headers for the tenant's remaining quotas.
fn with_quota_headers(
    quotas: &TenantQuotas,
    answer: Result<Response, ApiError>,
    recipient: ErrorRecipient,
) -> Response {
    let mut response = answer.unwrap_or_else(|error| error.response(recipient));
    quotas.set_headers(response.headers_mut());
    response
}

enum AuthOutcome {
    Tenant(TenantId),
    /// Answered for anybody, whatever body follows: it is not read.
    Answered(Response),
}

fn admit(door: &FrontDoor, route: &Route, head: &http::request::Parts) -> Result<AuthOutcome, ApiError> {
    match route.handler {
        RouteHandler::Unknown => {
            let path = head.uri.path();
            let stateful = UNSUPPORTED_PREFIXES.iter().find(|prefix| is_under(path, prefix));
            return Err(match stateful {
                Some(prefix) => ApiError::NotOffered { what: (*prefix).to_owned() },
                None => ApiError::UnknownPath { path: truncated(path) },
            });
        }
        _ if head.method == Method::OPTIONS => return Ok(AuthOutcome::Answered(options_response(route))),
        _ if !route.allows(&head.method) => {
            let method = truncated(head.method.as_str());
            return Err(ApiError::WrongMethod { method, allow: route.allow });
        }
        RouteHandler::Alive => return Ok(AuthOutcome::Answered("ok\n".into_response())),
        RouteHandler::Ready => return readiness(door).map(AuthOutcome::Answered),
        _ => {}
    }
    let tenant = door.forwarder.isolation.keys().tenant(&head.headers)?;
    head.extensions.get().map(UnauthenticatedPermit::mark_authenticated);
    door.forwarder.metrics.requests.by_tenant.with_label_values(&[&tenant.0]).inc();
    Ok(AuthOutcome::Tenant(tenant))
}

fn readiness(door: &FrontDoor) -> Result<Response, ApiError> {
    match door.forwarder.isolation.serving(&door.forwarder.workers) {
        Ok(()) => Ok("ok\n".into_response()),
        Err(NotServingReason::NobodyAnswers) => Err(ApiError::NoWorker { model: "any".into() }),
        Err(NotServingReason::SaltsIgnored) => Err(ApiError::SaltsIgnored { model: "any".into() }),
    }
}

fn is_under(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn options_response(route: &Route) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(route.allow));
    response
}

async fn handle(door: &Arc<FrontDoor>, route: &Route, request: ClientRequest) -> Result<Response, ApiError> {
    match route.handler {
        RouteHandler::Generation(endpoint) => serve_generation(&door.responses.pipeline, endpoint, request).await,
        RouteHandler::ByModel => {
            let (request, stripped) = door.forwarder.sanitized(request).await?;
            door.forwarder.metrics.requests.count_stripped(stripped);
            let body = request.body.clone();
            let read = move || Envelope::read(&body).map(Envelope::into_owned);
            let envelope = OffloadSpec::of(&request).run(&door.forwarder.offload_pool, read).await??;
            door.forwarder
                .forward(&request, WorkerSelector::Model(envelope.model.as_deref()), ResponseCapture::Nothing)
                .await
        }
        // Boxed, so that the future of every request does not have room for the one of these.
        RouteHandler::NewResponse => Box::pin(door.responses.create(request)).await,
        RouteHandler::StoredResponse => Box::pin(door.responses.serve_stored(&request)).await,
        RouteHandler::Models => door.model_list.list(&door.forwarder).await,
        RouteHandler::OneModel => {
            let path = request.path.split('?').next().unwrap_or_default();
            let id = path.strip_prefix("/v1/models/").unwrap_or_default();
            door.model_list.get_model(&door.forwarder, &percent_decoded(id)).await
        }
        // Answered by `admit`.
        RouteHandler::Alive | RouteHandler::Ready | RouteHandler::Unknown => {
            Err(ApiError::UnknownPath { path: truncated(&request.path) })
        }
    }
}

/// Decodes percent escapes: model names contain slashes, which careful clients send as `%2F`. Invalid escapes stay as
/// they are.
fn percent_decoded(text: &str) -> String {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        let escape = tail.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (first, escape) {
            (b'%', Some(byte)) => {
                decoded.push(byte);
                rest = &tail[2..];
            }
            _ => {
                decoded.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

#[cfg(test)]
mod tests;
