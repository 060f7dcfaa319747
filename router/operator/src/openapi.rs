//! The OpenAPI document: generated from the routes, served, and used to validate query parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse as _, Response};
use http::Method;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use ownership::SubmitError;
use ownership::ledger::Refusal;
use serde_json::{Map, Value, json};
use strum::{VariantArray as _, VariantNames as _};
use utoipa::{PartialSchema as _, ToSchema as _};
use utoipa_axum::router::OpenApiRouter;

use super::access::PUBLIC_PATHS;
use super::idempotency::MAX_KEY_CHARS;
use super::members::MEMBER_REASONS;
use super::problem::{API_REASONS, Problem, ProblemDocument, ProblemKind};
use super::schemas;
use super::watch::{CompactedEvent, ProgressEvent};

const DESCRIPTION: &str = "Owners, leases, sessions, artifacts and decisions of OwnerServe.

Every answer names the `revision` of the ledger that it came from, Raft's `term` and the `leader`, in its headers and,
where it is an object, in its body. Reads take `consistency=local|bounded|linearizable`. Single resources carry an
`ETag`; its part before the dash is the fencing epoch. A write that depends on what was read needs it as `If-Match`:
the ledger itself refuses the write when the tag is out of date (412).

Durations are text with a unit, as `\"1.5s\"`, and times are RFC 3339 in UTC. Sizes in requests have a unit, as
`\"1GiB\"`; counts of bytes in answers are numbers.

A refusal is a problem document (RFC 9457). The last part of its `type` and its `reason` are words for programs.
`unknown_outcome` (504) means that a command may or may not have been executed: read, then repeat it; every command may
be repeated.";

/// Problems of any request.
const COMMON_PROBLEMS: [ProblemKind; 8] = [
    ProblemKind::InvalidHeader,
    ProblemKind::InvalidQuery,
    ProblemKind::HostNotAllowed,
    ProblemKind::OriginNotAllowed,
    ProblemKind::UriTooLong,
    ProblemKind::HeadersTooLarge,
    ProblemKind::HeadersTimeout,
    ProblemKind::Internal,
];
/// Problems of any write.
const WRITE_PROBLEMS: [ProblemKind; 11] = [
    ProblemKind::NotFound,
    ProblemKind::InvalidBody,
    ProblemKind::BodyTimeout,
    ProblemKind::Conflict,
    ProblemKind::PreconditionFailed,
    ProblemKind::BodyTooLarge,
    ProblemKind::UnsupportedMediaType,
    ProblemKind::Unprocessable,
    ProblemKind::TooManyRequests,
    ProblemKind::NoQuorum,
    ProblemKind::UnknownOutcome,
];

/// The document, and the data to validate requests.
#[derive(Debug, Default)]
pub(super) struct OpenApiDocument {
    json: std::sync::OnceLock<String>,
    /// Query parameters by method and path.
    parameters: std::sync::OnceLock<BTreeMap<(String, String), BTreeSet<String>>>,
}

impl OpenApiDocument {
    pub(super) fn json(&self) -> &str {
        self.json.get().map_or("{}", String::as_str)
    }

    /// Returns whether the operation is a write.
    pub(super) fn is_write(&self, method: &Method, path: &str) -> bool {
        let known =
            || self.parameters.get().is_some_and(|all| all.contains_key(&(method.to_string(), path.to_owned())));
        !matches!(*method, Method::GET | Method::HEAD) && known()
    }

    /// Refuses unknown query parameters: a misspelt filter would otherwise be ignored silently.
    pub(super) fn check_query(&self, parts: &Parts, path: &str) -> Result<(), Problem> {
        let method = if parts.method == Method::HEAD { &Method::GET } else { &parts.method };
        let known = self.parameters.get().and_then(|all| all.get(&(method.to_string(), path.to_owned())));
        let (Some(known), Some(query)) = (known, parts.uri.query()) else { return Ok(()) };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let name = pair.split_once('=').map_or(pair, |(name, _)| name);
            if !known.contains(name) {
                let accepted = match known.is_empty() {
                    true => "no parameters are accepted here".to_owned(),
                    false => format!("accepted are {}", known.iter().cloned().collect::<Vec<_>>().join(", ")),
                };
                let name = vocabulary::truncated(name);
                return Err(Problem::bad_query(format!("unknown parameter {name:?}: {accepted}")));
            }
        }
        Ok(())
    }

    /// Extracts the document from the routes.
    pub(super) fn attach<S>(&self, routes: OpenApiRouter<S>) -> axum::Router<S>
    where
        S: Clone + Send + Sync + 'static,
    {
        let (routes, document) = routes.split_for_parts();
        let mut document = serde_json::to_value(&document).unwrap_or_default();
        let mut parameters = BTreeMap::new();
        for_each(&mut document["paths"], |path| {
            let (name, operations) = path;
            for_each(operations, |(method, operation)| {
                add_common_responses(name, method, operation);
                if let Ok(method) = method.to_ascii_uppercase().parse::<Method>() {
                    parameters.insert((method.to_string(), name.to_owned()), query_parameter_names(operation));
                }
            });
        });
        set_info(&mut document);
        remove_signed_formats(&mut document);
        // Set once; a second router of the same state would set the same.
        let _ = self.json.set(document.to_string());
        let _ = self.parameters.set(parameters);
        routes
    }
}

fn for_each(value: &mut Value, mut visit: impl FnMut((&str, &mut Value))) {
    for (name, inner) in value.as_object_mut().into_iter().flatten() {
        visit((name, inner));
    }
}

/// Returns the names of the operation's query parameters.
fn query_parameter_names(operation: &Value) -> BTreeSet<String> {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    parameters.filter(|it| it["in"] == "query").filter_map(|it| it["name"].as_str()).map(str::to_owned).collect()
}

/// Removes OpenAPI's signed integer formats from values that begin at 0: ours are unsigned, with twice the range.
fn remove_signed_formats(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            if fields.get("type").is_some_and(|kind| kind.to_string().contains("integer"))
                && fields.contains_key("minimum")
            {
                fields.remove("format");
            }
            fields.values_mut().for_each(remove_signed_formats);
        }
        Value::Array(all) => all.iter_mut().for_each(remove_signed_formats),
        _ => {}
    }
}

/// Sets the document's general information.
fn set_info(document: &mut Value) {
    document["info"] = json!({
        "title": "OwnerServe operator API",
        "version": env!("CARGO_PKG_VERSION"),
        "description": DESCRIPTION,
        "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
    });
    document["security"] = json!([{"bearer": []}, {}]);
    let components = &mut document["components"];
    components["securitySchemes"] = json!({"bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "Needed where operator.tokens_file is set. The role `read` reads, the role `operator` also writes.",
    }});
    let mut schemas = schemas::parameter_schemas();
    schemas.extend([schemas::named_schema::<ProgressEvent>(), schemas::named_schema::<CompactedEvent>()]);
    ProblemDocument::schemas(&mut schemas);
    schemas.push((ProblemDocument::name().into_owned(), ProblemDocument::schema()));
    for (name, schema) in schemas {
        components["schemas"][name] = serde_json::to_value(schema).unwrap_or_default();
    }
    let words: Vec<String> = ProblemKind::VARIANTS.iter().map(|kind| kind.uri()).collect();
    let properties = &mut components["schemas"]["Problem"]["properties"];
    properties["type"]["enum"] = json!(words);
    properties["reason"]["description"] = json!(reason_description());
}

/// Describes the reasons of problems.
fn reason_description() -> String {
    let all = API_REASONS.iter().chain(Refusal::VARIANTS).chain(SubmitError::VARIANTS).chain(&MEMBER_REASONS);
    let words: Vec<String> = all.collect::<BTreeSet<_>>().into_iter().map(|word| format!("`{word}`")).collect();
    format!("Why the request was refused, as a word for programs: {}; or how a transfer failed.", words.join(", "))
}

/// Adds the responses that all operations of its kind have.
fn add_common_responses(path: &str, method: &str, operation: &mut Value) {
    let has = |operation: &Value, name: &str| {
        let parameters = operation["parameters"].as_array().into_iter().flatten();
        parameters.clone().any(|it| it["name"] == name)
    };
    let mut kinds = COMMON_PROBLEMS.to_vec();
    if !PUBLIC_PATHS.contains(&path) {
        kinds.extend([ProblemKind::Unauthorized, ProblemKind::Forbidden]);
    }
    if has(operation, "consistency") {
        kinds.extend([ProblemKind::StalenessExceeded, ProblemKind::NoQuorum]);
    }
    if method != "get" {
        kinds.extend(WRITE_PROBLEMS);
        add_parameter(operation, idempotency_key_parameter());
    }
    if path.contains('{') {
        kinds.extend([ProblemKind::InvalidId, ProblemKind::NotFound]);
    }
    if let Some(fence) = operation["parameters"].as_array().into_iter().flatten().find(|it| it["name"] == "If-Match") {
        let is_needed = fence["required"] == true;
        kinds.extend(is_needed.then_some(ProblemKind::PreconditionRequired));
    }
    if has(operation, "cursor") {
        kinds.push(ProblemKind::InvalidCursor);
    }
    let tagged = !operation["responses"]["200"]["headers"]["etag"].is_null();
    if tagged && method == "get" {
        let known = json!({"name": "If-None-Match", "in": "header", "required": false,
            "description": "An ETag that the reader has; 304 when it is still the one.", "schema": {"type": "string"}});
        add_parameter(operation, known);
        operation["responses"]["304"] = json!({"description": "It is as the reader has it."});
    }
    add_problems(&mut operation["responses"], &kinds);
}

fn add_parameter(operation: &mut Value, parameter: Value) {
    match operation["parameters"].as_array_mut() {
        Some(parameters) => parameters.push(parameter),
        None => operation["parameters"] = json!([parameter]),
    }
}

/// Header parameter of a write that may be repeated.
fn idempotency_key_parameter() -> Value {
    let description = "Sent again under the same key within an hour, the write is not done again: this router answers \
                       as it did, with Idempotency-Replayed. Of an answer of more than 16 KiB only that the write was done \
                       is kept: sent again, it is refused (409, response_not_retained). Another write under it is refused (422).";
    json!({"name": "Idempotency-Key", "in": "header", "required": false, "description": description,
        "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS, "pattern": "^[!-~]+$"}})
}

/// Adds problems by status, and the headers of every response.
fn add_problems(responses: &mut Value, kinds: &[ProblemKind]) {
    for kind in kinds {
        let (status, title) = kind.status_and_title();
        let response = &mut responses[status.as_str()];
        let described = response["description"].as_str().unwrap_or_default();
        if !described.contains(title) {
            let joined = if described.is_empty() { title.to_owned() } else { format!("{described}; {title}") };
            response["description"] = json!(joined);
        }
    }
    for_each(responses, |(status, response)| {
        let is_problem = status.parse::<u16>().is_ok_and(|status| status >= 400);
        if is_problem && response["content"].is_null() {
            response["content"] =
                json!({"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}});
        }
        let number =
            |description: &str| json!({"description": description, "schema": {"type": "integer", "minimum": 0}});
        let mut headers = Map::new();
        headers.insert("ownerserve-revision".into(), number("Log index of the last entry in the view."));
        headers.insert("ownerserve-term".into(), number("Raft's term."));
        headers.insert(
            "x-request-id".into(),
            json!({"description": "As in the audit log.", "schema": {"type": "string"}}),
        );
        for (name, header) in headers {
            if response["headers"][&name].is_null() {
                response["headers"][name] = header;
            }
        }
    });
}

/// The document itself.
#[utoipa::path(get, path = "/ownerserve/v1/openapi.json", tag = "process",
    responses((status = 200, description = "The OpenAPI 3.1 document.", body = Object)))]
pub(super) async fn document(State(document): State<Arc<OpenApiDocument>>) -> Response {
    ([(CONTENT_TYPE, "application/json")], document.json().to_owned()).into_response()
}
