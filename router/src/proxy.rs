//! The clients' listener: which paths there are, who may call them, and what each request leaves in log and metrics.
//!
//! Only what stands in the table is served. Engines' administration paths are not in it and must never be.

mod counted;
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

use crate::error::{Addressee, ApiError, Cause, Words, shortened};
use crate::forward::{Learn, Where, cleaned, forward};
use crate::gateway::{Gateway, NotServing};
use crate::host_check::HostCheck;
use crate::incoming::{Envelope, Incoming, REQUEST_ID, id_value, new_request_id};
use crate::pipeline::aside::Load;
use crate::pipeline::serve_generation;
use crate::quotas::TenantQuotas;
use crate::resources::serve::{new_response, stored_response};
use crate::server::{Authentication, BodyLimits, read_body, refuse};
use counted::Counted;
use routes::{NOT_OFFERED, ROUTES, Route, Served};

/// The clients' routes.
pub fn routes(gateway: &Arc<Gateway>) -> Router {
    let mut router = Router::new();
    for route in ROUTES {
        let gateway = gateway.clone();
        router = router.route(route.path, any(move |request: Request| serve(gateway.clone(), route, request)));
    }
    let gateway = gateway.clone();
    router.fallback(move |request: Request| serve(gateway.clone(), &routes::UNKNOWN, request))
}

/// One request from arrival to the head of its answer; the body is counted while it runs.
async fn serve(gateway: Arc<Gateway>, route: &'static Route, request: Request) -> Response {
    let arrived = Instant::now();
    let id = new_request_id();
    let named = request.headers().get(REQUEST_ID).cloned();
    let client = Addressee { words: Words::of(request.uri().path()), request: id };
    let mut counted = Counted::begin(gateway.clone(), route.path, arrived);
    let dispatched = dispatch(&gateway, route, request, (client, arrived, &mut counted));
    let served = AssertUnwindSafe(dispatched).catch_unwind().await;
    let result = served.unwrap_or_else(|_| {
        tracing::error!(request = %id, path = route.path, "a panic; please report it");
        Err(ApiError::Internal { request: id.to_string() })
    });
    let mut response = result.unwrap_or_else(|error| error.answer(client));
    if let Some(Cause(cause)) = response.extensions().get() {
        gateway.metrics.requests.errors.with_label_values(&[cause]).inc();
        tracing::debug!(request = %id, path = route.path, status = response.status().as_u16(), cause, "refused");
    }
    let headers = response.headers_mut();
    match named {
        // Its worker repeats the name that it got, which was ours.
        Some(named) if headers.contains_key(REQUEST_ID) => drop(headers.insert(REQUEST_ID, named)),
        _ => drop(headers.entry(REQUEST_ID).or_insert_with(|| id_value(id))),
    }
    counted.wrap(response)
}

/// Method, key and path decide; the body is read only for requests that pass.
async fn dispatch(
    gateway: &Arc<Gateway>,
    route: &'static Route,
    request: Request,
    (client, arrived, running): (Addressee, Instant, &mut Counted),
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let limits = BodyLimits::from(&gateway.config.proxy);
    let admitted = HostCheck::of_clients(&gateway.config).check(&head).map_err(ApiError::from);
    let admitted = admitted.and_then(|()| admit(gateway, route, &head));
    let tenant = match admitted {
        Ok(Admitted::Tenant(tenant)) => tenant,
        Ok(Admitted::Options) => return Ok(options(route)),
        Err(error) => return Err(refuse(&head.headers, body, limits, error)),
    };
    let quotas = gateway.remembered.quotas.of(&tenant).filter(|_| route.served.costs());
    let counted = match &quotas {
        None => None,
        Some(quotas) => match admitted_by((gateway, &tenant, quotas), &head.headers, running).await {
            Ok(counted) => Some((quotas, counted)),
            Err(error) => return Ok(told(quotas, Err(refuse(&head.headers, body, limits, error)), client)),
        },
    };
    let mut memory = gateway.memory.reservation(&tenant);
    let body = match read_body(&head.headers, body, (limits, &mut memory, (&gateway.aside, client.request))).await {
        Ok(body) => body,
        Err(error) => {
            if let Some((quotas, counted)) = counted {
                quotas.unread(counted).await;
            }
            return Err(error);
        }
    };
    let reserved = match counted {
        None => None,
        Some((quotas, counted)) => match quotas.take_tokens(&body, counted).await {
            Ok(reserved) => Some(reserved),
            Err(error) => return Ok(told(quotas, Err(error), client)),
        },
    };
    gateway.metrics.requests.body_bytes.observe(body.len() as f64);
    let mut headers = head.headers;
    headers.remove(http::header::CONTENT_ENCODING);
    let path = head.uri.path_and_query().map_or(head.uri.path(), |path| path.as_str()).to_owned();
    let id = client.request;
    let memory = Some(Arc::new(memory));
    let method = head.method;
    let incoming = Incoming { id, tenant, method, path, headers, body, arrived, reserved, memory, adds: None };
    let answer = answer(gateway, route, incoming).await;
    match quotas {
        None => answer,
        Some(quotas) => Ok(told(&quotas, answer, client)),
    }
}

/// Counts one request, and holds its place among those that run at once.
async fn admitted_by(
    (gateway, tenant, quotas): (&Gateway, &TenantId, &TenantQuotas),
    headers: &http::HeaderMap,
    running: &mut Counted,
) -> Result<crate::quotas::Counted, ApiError> {
    let refused = || &gateway.metrics.soft_state.quota_refusals;
    let place = quotas.run();
    running.holds(place.inspect_err(|_| refused().with_label_values(&[&tenant.0, "concurrent_requests"]).inc())?);
    quotas.take_request(headers).await
}

/// The answer with what is left of the tenant's quotas.
fn told(quotas: &TenantQuotas, answer: Result<Response, ApiError>, client: Addressee) -> Response {
    let mut response = answer.unwrap_or_else(|error| error.answer(client));
    quotas.tell(response.headers_mut());
    response
}

enum Admitted {
    Tenant(TenantId),
    Options,
}

fn admit(gateway: &Gateway, route: &Route, head: &http::request::Parts) -> Result<Admitted, ApiError> {
    match route.served {
        Served::Unknown => {
            let path = head.uri.path();
            let stateful = NOT_OFFERED.iter().find(|prefix| is_under(path, prefix));
            return Err(match stateful {
                Some(prefix) => ApiError::NotOffered { what: (*prefix).to_owned() },
                None => ApiError::UnknownPath { path: shortened(path) },
            });
        }
        _ if head.method == Method::OPTIONS => return Ok(Admitted::Options),
        _ if !route.allows(&head.method) => {
            let method = shortened(head.method.as_str());
            return Err(ApiError::WrongMethod { method, allow: route.allow });
        }
        Served::Alive | Served::Ready => return Ok(Admitted::Tenant(TenantId::default())),
        _ => {}
    }
    let tenant = gateway.keys.tenant(&head.headers)?;
    head.extensions.get().map(Authentication::done);
    gateway.metrics.requests.by_tenant.with_label_values(&[&tenant.0]).inc();
    Ok(Admitted::Tenant(tenant))
}

fn is_under(path: &str, prefix: &str) -> bool {
    path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn options(route: &Route) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(route.allow));
    response
}

async fn answer(gateway: &Arc<Gateway>, route: &Route, request: Incoming) -> Result<Response, ApiError> {
    match route.served {
        Served::Generation(endpoint) => serve_generation(gateway, endpoint, request).await,
        Served::ByModel => {
            let (request, stripped) = cleaned(gateway, request).await?;
            gateway.metrics.requests.count_stripped(stripped);
            let body = request.body.clone();
            let read = move || Envelope::read(&body).map(Envelope::owned);
            let envelope = Load::of(&request).done(&gateway.aside, read).await??;
            forward(gateway, &request, Where::Model(envelope.model.as_deref()), Learn::Nothing).await
        }
        Served::NewResponse => new_response(gateway, request).await,
        Served::StoredResponse => stored_response(gateway, &request).await,
        Served::Models => crate::models::list(gateway).await,
        Served::OneModel => {
            let path = request.path.split('?').next().unwrap_or_default();
            let id = path.strip_prefix("/v1/models/").unwrap_or_default();
            crate::models::one(gateway, &percent_decoded(id)).await
        }
        Served::Alive => Ok("ok\n".into_response()),
        Served::Ready => match gateway.serving() {
            Ok(()) => Ok("ok\n".into_response()),
            Err(NotServing::NobodyAnswers) => Err(ApiError::NoWorker { model: "any".into() }),
            Err(NotServing::SaltsIgnored) => Err(ApiError::SaltsIgnored { model: "any".into() }),
        },
        Served::Unknown => Err(ApiError::UnknownPath { path: shortened(&request.path) }),
    }
}

/// Model names hold slashes, which careful clients send as `%2F`. What is no valid escape stays as it is.
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
