//! Middleware in front of every operator route: limits, Host and Origin, tokens and roles, known parameters, audit
//! log.
//!
//! A write and its audit line complete even if the client disconnects: everything executed is logged, and what cannot
//! be logged is not started.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, ETAG, IF_MATCH};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use super::access::{PUBLIC_PATHS, Principal, TokenRole};
use super::audit::{AuditLog, AuditedRequest, SpaceReservation, loggable_body, truncate_path, truncate_tag};
use super::blocking::run_blocking;
use super::consistency::ViewStamp;
use super::entity_tags;
use super::extractors::read_write_body;
use super::idempotency::{IdempotentWrite, REPLAYED_HEADER};
use super::problem::{Problem, ProblemKind};
use super::sources::OperatorParts;
use super::state::OperatorState;
use proxy::host_check::HostCheck;
use proxy::request_id::new_request_id;
use proxy::server::{RemoteAddr, UnauthenticatedPermit};

/// Maximum length of path and query.
const MAX_URI_BYTES: usize = 8 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Reads that reveal everything and so require the operator role.
const SENSITIVE_PATHS: [&str; 1] = ["/ownerserve/v1/cluster/snapshot"];

/// Lets a request through, or returns the problem.
pub(super) async fn gate(State(state): State<OperatorState>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let asked_of = request.headers().clone();
    let mut response = handle(&state, request, (next, &id)).await;
    let known = response.headers().get(ETAG).is_some_and(|tag| entity_tags::matches_if_none_match(&asked_of, tag));
    if is_read && known && response.status() == StatusCode::OK {
        *response.body_mut() = Body::empty();
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        response.headers_mut().remove(CONTENT_TYPE);
    }
    ViewStamp::of(&state.parts.ledger.directory().view()).write_headers(response.headers_mut());
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// Returns the client's own id if it is short and plain, otherwise a new one.
fn request_id(headers: &HeaderMap) -> String {
    let request_id = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let request_id =
        request_id.filter(|id| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()));
    request_id.map_or_else(|| new_request_id().to_string(), str::to_owned)
}

async fn handle(state: &OperatorState, request: Request, (next, id): (Next, &str)) -> Response {
    let (parts, body) = request.into_parts();
    if parts.uri.path_and_query().map_or(0, |whole| whole.as_str().len()) > MAX_URI_BYTES {
        let detail = format!("Path and query have more than {MAX_URI_BYTES} bytes.");
        return Problem::new(ProblemKind::UriTooLong, detail).into_response();
    }
    let path = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
    let writes = state.document.is_write(&parts.method, &path);
    let audited = writes || SENSITIVE_PATHS.contains(&&*path);
    let who = if PUBLIC_PATHS.contains(&&*path) { None } else { Some(state.tokens.authenticate(&parts.headers)) };
    let mut record = audited_request(&parts, &path, id);
    record.principal = who.as_ref().and_then(|who| who.as_ref().ok().cloned());
    if record.principal.is_some() {
        parts.extensions.get().map(UnauthenticatedPermit::mark_authenticated);
    }
    let needed = if audited { TokenRole::Operator } else { TokenRole::Read };
    let allowed = HostCheck::new(&state.settings.host_rules).check(&parts).map_err(Problem::from);
    let allowed = allowed.and_then(|()| who.map_or(Ok(()), |who| who.and_then(|who| authorize(&who, needed))));
    let allowed = allowed.and_then(|()| state.document.check_query(&parts, &path));
    let allowed = allowed.map(|()| Request::from_parts(parts, body));
    let request = match allowed {
        Ok(request) if writes => read_write(&state.parts, request, &mut record).await,
        other => other.map(|request| (request, None)),
    };
    if !audited {
        return match request {
            Err(problem) => problem.into_response(),
            Ok((request, _)) => next.run(request).await,
        };
    }
    let repeats = state.idempotency.clone();
    let running = request.map(|(request, keyed)| async move {
        match keyed {
            None => next.run(request).await,
            Some(keyed) => repeats.run_once(keyed, (request, async |request| next.run(request).await)).await,
        }
    });
    let written_down = run_audited(state.audit.clone(), record, running);
    // A separate task, so that it continues if the client disconnects.
    tokio::spawn(written_down).await.unwrap_or_else(|_| internal_error())
}

/// Runs the write to its end and logs it before the response is sent.
async fn run_audited(
    audit: Arc<AuditLog>,
    request: AuditedRequest,
    running: Result<impl Future<Output = Response> + Send + 'static, Problem>,
) -> Response {
    let (answer, room) = match running {
        Err(problem) => (problem.into_response(), SpaceReservation::None),
        Ok(running) => match reserve_audit_space(&audit).await {
            Err(problem) => (problem.into_response(), SpaceReservation::None),
            Ok(()) => (tokio::spawn(running).await.unwrap_or_else(|_| internal_error()), SpaceReservation::Reserved),
        },
    };
    let word = match answer.extensions().get::<ProblemKind>() {
        _ if answer.headers().contains_key(REPLAYED_HEADER) => "replayed",
        Some(kind) => kind.into(),
        None => "succeeded",
    };
    let status = answer.status().as_u16();
    let written = tokio::task::spawn_blocking(move || audit.write(&request, (word, status), room));
    if let Err(error) = written.await {
        tracing::error!(%error, "a line of the audit log is missing");
    }
    answer
}

/// Fails if the write cannot be logged.
async fn reserve_audit_space(audit: &Arc<AuditLog>) -> Result<(), Problem> {
    let audit = audit.clone();
    run_blocking(move || audit.reserve()).await?.map_err(|error| {
        let detail = format!(
            "Nothing was changed: the audit log of this node takes no line ({}). Free space on the disk of its data \
             directory, or ask another node.",
            error.kind()
        );
        Problem::new(ProblemKind::NotReady, detail).with_reason("audit_log_unavailable")
    })
}

fn internal_error() -> Response {
    Problem::new(ProblemKind::Internal, "The request ended in an error of ours; the log of this process has it.")
        .into_response()
}

fn authorize(who: &Principal, needed: TokenRole) -> Result<(), Problem> {
    if who.role >= needed {
        return Ok(());
    }
    let detail = "The token may only read. Use one with the role operator.";
    Err(Problem::new(ProblemKind::Forbidden, detail))
}

fn audited_request(parts: &Parts, path: &str, id: &str) -> AuditedRequest {
    AuditedRequest {
        principal: None,
        route: format!("{} {path}", parts.method),
        path: truncate_path(parts.uri.path()),
        body: None,
        if_match: parts.headers.get(IF_MATCH).and_then(|value| value.to_str().ok()).map(truncate_tag),
        request_id: id.to_owned(),
        remote_address: parts.extensions.get::<RemoteAddr>().map(|remote| remote.0),
    }
}

/// Reads the write's whole body and its idempotency key.
async fn read_write(
    handles: &OperatorParts,
    request: Request,
    asked: &mut AuditedRequest,
) -> Result<(Request, Option<IdempotentWrite>), Problem> {
    let (parts, body) = request.into_parts();
    // Browsers send other content types across sites without a preflight; DELETE always needs one.
    let kind = parts.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if parts.method != Method::DELETE && !kind.to_ascii_lowercase().starts_with(b"application/json") {
        let advice = "Send a JSON object, {} where there is nothing to say, with Content-Type: application/json.";
        return Err(Problem::new(ProblemKind::UnsupportedMediaType, advice));
    }
    let body = read_write_body((&handles.memory_budget, &handles.offload_pool), &parts, body).await?;
    asked.body = loggable_body(&body);
    let keyed = IdempotentWrite::from_request(asked.principal.as_ref(), &parts, &body)?;
    Ok((Request::from_parts(parts, Body::from(body)), keyed))
}
