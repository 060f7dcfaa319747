//! The gate before every operators' route: bounds, Host and Origin, tokens and roles, known parameters, the audit log.
//!
//! A write goes on to its end when its client leaves, and so does its line in the audit log: what was done is always
//! written down, and what could not be is not begun.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, ETAG, IF_MATCH};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use super::access::{Role, Who};
use super::audit::{Asked, Audit, Room, kept, kept_key, kept_tag};
use super::desk::Desk;
use super::fresh::At;
use super::input::body_of;
use super::problem::{Kind, Problem};
use super::repeats::{Keyed, REPLAYED};
use super::tags;
use crate::gateway::Gateway;
use crate::host_check::HostCheck;
use crate::incoming::new_request_id;
use crate::server::{Authentication, Remote};

/// Longest path and query.
const LONGEST_URI: usize = 8 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// What anybody may see: whether the process lives, and how to talk to it.
pub(super) const OPEN: [&str; 3] = ["/livez", "/readyz", "/ownerserve/v1/openapi.json"];
/// Reads that give everything away.
const GUARDED: [&str; 1] = ["/ownerserve/v1/cluster/snapshot"];

/// Lets a request through, or says why not.
pub(super) async fn gate(State(desk): State<Desk>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let asked_of = request.headers().clone();
    let mut response = admit(&desk, request, (next, &id)).await;
    let known = response.headers().get(ETAG).is_some_and(|tag| tags::is_known(&asked_of, tag));
    if is_read && known && response.status() == StatusCode::OK {
        *response.body_mut() = Body::empty();
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        response.headers_mut().remove(http::header::CONTENT_LENGTH);
        response.headers_mut().remove(CONTENT_TYPE);
    }
    At::of(&desk.gateway.directory().view()).mark(response.headers_mut());
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

/// The client's own id where it is short and plain, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let given = given.filter(|id| (1..=128).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic()));
    given.map_or_else(|| new_request_id().to_string(), str::to_owned)
}

async fn admit(desk: &Desk, request: Request, (next, id): (Next, &str)) -> Response {
    let (parts, body) = request.into_parts();
    if parts.uri.path_and_query().map_or(0, |whole| whole.as_str().len()) > LONGEST_URI {
        let detail = format!("Path and query have more than {LONGEST_URI} bytes.");
        return Problem::new(Kind::UriTooLong, detail).into_response();
    }
    let path = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str).to_owned();
    let writes = desk.document.writes(&parts.method, &path);
    let audited = writes || GUARDED.contains(&&*path);
    let who = if OPEN.contains(&&*path) { None } else { Some(desk.tokens.who(&parts.headers)) };
    let mut asked = asked(&parts, &path, id);
    asked.who = who.as_ref().and_then(|who| who.as_ref().ok().cloned());
    if asked.who.is_some() {
        parts.extensions.get().map(Authentication::done);
    }
    let needed = if audited { Role::Operator } else { Role::Read };
    let allowed = HostCheck::of_operators(&desk.gateway.config).check(&parts).map_err(Problem::from);
    let allowed = allowed.and_then(|()| who.map_or(Ok(()), |who| who.and_then(|who| may(&who, needed))));
    let allowed = allowed.and_then(|()| desk.document.check_query(&parts, &path));
    let allowed = allowed.map(|()| Request::from_parts(parts, body));
    let request = match allowed {
        Ok(request) if writes => whole(&desk.gateway, request, &mut asked).await,
        other => other.map(|request| (request, None)),
    };
    if !audited {
        return match request {
            Err(problem) => problem.into_response(),
            Ok((request, _)) => next.run(request).await,
        };
    }
    let repeats = desk.repeats.clone();
    let running = request.map(|(request, keyed)| async move {
        match keyed {
            None => next.run(request).await,
            Some(keyed) => repeats.once(keyed, (request, async |request| next.run(request).await)).await,
        }
    });
    let written_down = write_down(desk.audit.clone(), asked, running);
    // A task of its own, which goes on when the client leaves.
    tokio::spawn(written_down).await.unwrap_or_else(|_| broken())
}

/// Runs the write to its end and writes it down before the answer is sent.
async fn write_down(
    audit: Arc<Audit>,
    asked: Asked,
    running: Result<impl Future<Output = Response> + Send + 'static, Problem>,
) -> Response {
    let (answer, room) = match running {
        Err(problem) => (problem.into_response(), Room::None),
        Ok(running) => match room_in(&audit).await {
            Err(problem) => (problem.into_response(), Room::None),
            Ok(()) => (tokio::spawn(running).await.unwrap_or_else(|_| broken()), Room::Taken),
        },
    };
    let word = match answer.extensions().get::<Kind>() {
        _ if answer.headers().contains_key(REPLAYED) => "repeated",
        Some(kind) => kind.into(),
        None => "done",
    };
    let status = answer.status().as_u16();
    let written = tokio::task::spawn_blocking(move || audit.write(&asked, (word, status), room));
    if let Err(error) = written.await {
        tracing::error!(%error, "a line of the audit log is missing");
    }
    answer
}

/// What cannot be written down is not done.
async fn room_in(audit: &Arc<Audit>) -> Result<(), Problem> {
    let audit = audit.clone();
    super::apart(move || audit.make_room()).await?.map_err(|error| {
        let detail = format!(
            "Nothing was changed: the audit log of this node takes no line ({}). Free space on the disk of its data \
             directory, or ask another node.",
            error.kind()
        );
        Problem::new(Kind::NotReady, detail).caused("audit")
    })
}

fn broken() -> Response {
    Problem::new(Kind::Internal, "The request ended in an error of ours; the log of this process has it.")
        .into_response()
}

fn may(who: &Who, needed: Role) -> Result<(), Problem> {
    if who.role >= needed {
        return Ok(());
    }
    let detail = "The token may only read. Use one with the role operator.";
    Err(Problem::new(Kind::Forbidden, detail))
}

fn asked(parts: &Parts, path: &str, id: &str) -> Asked {
    Asked {
        who: None,
        what: format!("{} {path}", parts.method),
        key: kept_key(parts.uri.path()),
        body: None,
        if_match: parts.headers.get(IF_MATCH).and_then(|value| value.to_str().ok()).map(kept_tag),
        request: id.to_owned(),
        remote: parts.extensions.get::<Remote>().map(|remote| remote.0),
    }
}

/// The write with its whole body, and the key that it may be sent again under.
async fn whole(gateway: &Gateway, request: Request, asked: &mut Asked) -> Result<(Request, Option<Keyed>), Problem> {
    let (parts, body) = request.into_parts();
    // Browsers send other types across sites without asking, and ask before they send DELETE.
    let kind = parts.headers.get(CONTENT_TYPE).map_or(&b""[..], |value| value.as_bytes());
    if parts.method != Method::DELETE && !kind.to_ascii_lowercase().starts_with(b"application/json") {
        let wanted = "Send a JSON object, {} where there is nothing to say, with Content-Type: application/json.";
        return Err(Problem::new(Kind::NotJson, wanted));
    }
    let body = body_of(gateway, &parts, body).await?;
    asked.body = kept(&body);
    let keyed = Keyed::of(asked.who.as_ref(), &parts, &body)?;
    Ok((Request::from_parts(parts, Body::from(body)), keyed))
}
