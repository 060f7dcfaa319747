//! Errors that clients get, and the one place where HTTP statuses are decided. The module `format` encodes them for the
//! client's API.
//!
//! Every message says what to do about it. It never contains a secret, a path of this machine or the text of a panic.

mod format;

use std::time::Duration;

use http::header::{ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use strum::{AsRefStr, IntoStaticStr};
use vocabulary::Tokens;
use workers_shim::engine_api::{EventRefusal, JsonError};

use crate::host_check::HostRefusal;

pub use format::{ErrorFormat, ErrorRecipient};

/// Every reason to end a client's request without an engine's answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, AsRefStr, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ApiError {
    /// The body is not UTF-8.
    #[error("The body is not valid UTF-8 (first bad byte at offset {offset}). Send JSON encoded as UTF-8.")]
    NotUtf8 {
        /// Offset of the first bad byte.
        offset: usize,
    },
    /// The body is not JSON.
    #[error("The body is not valid JSON: {detail}. Send one JSON object.")]
    NotJson {
        /// What the parser found, and where.
        detail: String,
    },
    /// A field is missing or of the wrong type or value.
    #[error("Invalid value for '{param}': {expected}.")]
    #[strum(serialize = "invalid_value")]
    BadField {
        /// The field, as a path.
        param: String,
        /// What is accepted.
        expected: String,
    },
    /// No worker serves this model.
    #[error("The model '{model}' does not exist here. GET /v1/models lists the models that are served.")]
    UnknownModel {
        /// The requested model.
        model: String,
    },
    /// The prompt fits no worker; the wording is what clients look for.
    #[error(
        "This model's maximum context length is {longest} tokens. However, your request has {prompt} input tokens. Shorten the {param}, or ask for fewer tokens."
    )]
    #[strum(serialize = "context_length_exceeded")]
    TooLong {
        /// The field that holds the prompt.
        param: &'static str,
        /// Largest context length of a worker, for prompt and answer together.
        longest: Tokens,
        /// The prompt's length.
        prompt: Tokens,
    },
    /// The request has no API key.
    #[error("You didn't provide an API key. Send it as 'Authorization: Bearer KEY'.")]
    #[strum(serialize = "invalid_api_key")]
    NoKey,
    /// The API key is not in the keys file. Clients such as litellm recognise the first words, which are OpenAI's.
    #[error("Incorrect API key provided. Check the key, or ask the operator of this endpoint for one.")]
    #[strum(serialize = "invalid_api_key")]
    BadKey,
    /// A web page of another site may have sent it.
    #[error(transparent)]
    #[strum(serialize = "host_not_allowed")]
    Host(#[from] HostRefusal),
    /// The path is not served.
    #[error("Unknown path '{path}'. Served are the OpenAI API's inference paths; see the documentation.")]
    UnknownPath {
        /// The path, truncated.
        path: String,
    },
    /// The path is served, but not with this method.
    #[error("Method {method} is not allowed on this path; allowed: {allow}.")]
    #[strum(serialize = "method_not_allowed")]
    WrongMethod {
        /// The method that was used.
        method: String,
        /// The allowed methods.
        allow: &'static str,
    },
    /// A stateful resource that this router does not know.
    #[error("No response '{id}' is known here. It may have expired, or the proxy was restarted since; create it anew.")]
    UnknownResponse {
        /// The resource.
        id: String,
    },
    /// A stateful resource whose existence is unknown while the shared cache is degraded.
    #[error("Whether the response '{id}' exists cannot be told at the moment. Try again shortly.")]
    #[strum(serialize = "response_lookup_incomplete")]
    UnsettledResponse {
        /// The resource.
        id: String,
    },
    /// Part of the OpenAI API that has no meaning in front of several workers.
    #[error("'{what}' is not offered by this endpoint: it needs state that engines behind it do not share.")]
    #[strum(serialize = "not_implemented")]
    NotOffered {
        /// The part of the API.
        what: String,
    },
    /// Path and query are longer than any that is served.
    #[error("Path and query are longer than {most} bytes. Send what is long in the body.")]
    UriTooLong {
        /// The limit, in bytes.
        most: usize,
    },
    /// The head is larger than the limit.
    #[error("The request's headers are larger than {most} bytes, or more than {count}. Send fewer or shorter ones.")]
    #[strum(serialize = "headers_too_large")]
    HeadTooLarge {
        /// The limit in bytes, including path and query.
        most: usize,
        /// The limit of their number.
        count: usize,
    },
    /// The head is not HTTP/1.1.
    #[error("The request line or a header is not valid HTTP/1.1. Check the address, and whether it needs https.")]
    MalformedHead,
    /// The head did not arrive in time.
    #[error("The request's headers did not arrive in time. Send them without long pauses.")]
    #[strum(serialize = "headers_timeout")]
    HeadTimeout,
    /// The body is larger than the limit.
    #[error("The body is larger than {limit} bytes. Send less, or raise proxy.body_limit.")]
    BodyTooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// The body needs more memory than all requests of its tenant together may have.
    #[error(
        "The body, and what has to be derived from it, takes more than the {most} bytes that one tenant's requests may. Send less, or raise proxy.request_memory_limit."
    )]
    TooMuchMemory {
        /// The limit, in bytes.
        most: usize,
    },
    /// The body inflates to an implausible multiple of its size.
    #[error("The body inflates to more than {most} times its size. Send it plain, or compress it less.")]
    #[strum(serialize = "body_too_complex")]
    TooDense {
        /// The largest accepted ratio.
        most: usize,
    },
    /// The body did not arrive in time.
    #[error("The body did not arrive in time. Send it without long pauses.")]
    BodyTimeout,
    /// The body ended early.
    #[error("The body ended before it was complete. Send it again.")]
    #[strum(serialize = "body_interrupted")]
    BodyBroken,
    /// The body has an unsupported compression.
    #[error("Content-Encoding '{encoding}' is not supported. Send the body plain, or as gzip or deflate.")]
    #[strum(serialize = "content_encoding")]
    UnknownEncoding {
        /// The header's value, truncated.
        encoding: String,
    },
    /// The body does not match its `Content-Encoding`.
    #[error("The body is not valid {encoding}. Send it plain, or compress it as its Content-Encoding says.")]
    #[strum(serialize = "content_encoding")]
    BrokenEncoding {
        /// The encoding that it claims.
        encoding: &'static str,
    },
    /// No worker that could serve this is up.
    #[error("No worker for the model '{model}' is available now. Try again shortly.")]
    NoWorker {
        /// The requested model.
        model: String,
    },
    /// Every worker that could serve this ignores cache salts, while tenants must be isolated.
    #[error(
        "No worker for the model '{model}' may serve requests: none that could has proved that it honours cache_salt, which keeps tenants' caches apart. The operator of this endpoint finds the cause with `ctl alarms list`; see auth.verify_cache_salt."
    )]
    SaltsIgnored {
        /// The requested model.
        model: String,
    },
    /// The router has reached a limit of its own.
    #[error("This endpoint is at its limit: {what}. Try again shortly.")]
    Overloaded {
        /// The limit.
        what: &'static str,
    },
    /// The tenant has used up its quota.
    #[error(
        "Rate limit reached: {limit} {unit} per minute, {asked} asked for. Please try again in {:.3}s, or ask the operator of this endpoint for more.",
        after.as_secs_f64()
    )]
    RateLimited {
        /// `requests` or `tokens`.
        unit: &'static str,
        /// Limit per minute.
        limit: u64,
        /// Amount of this request; for tokens an estimate from its body's length.
        asked: u64,
        /// Time until there is enough for this request.
        after: Duration,
    },
    /// The tenant has as many concurrent requests as it may have.
    #[error(
        "Rate limit reached: {limit} {} at once. Wait for one to end, or ask the operator of this endpoint for more.",
        if *limit == 1 { "request" } else { "requests" }
    )]
    #[strum(serialize = "concurrency_limit")]
    TooManyAtOnce {
        /// The limit.
        limit: u32,
    },
    /// The worker could not be reached, or failed before it answered.
    #[error("The worker failed: {detail}. Send the request again.")]
    WorkerFailed {
        /// What happened, without addresses.
        detail: String,
    },
    /// The worker took too long.
    #[error("The worker did not answer in time. Send the request again, or ask for fewer tokens.")]
    WorkerTimeout,
    /// A bug in the router.
    #[error("Internal error. The operator's log has the details under request {request}.")]
    Internal {
        /// The request's id in our log.
        request: String,
    },
}

/// Status and fields of OpenAI's error format.
struct OpenAiErrorFields {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
}

const fn error_fields(status: StatusCode, kind: &'static str, code: Option<&'static str>) -> OpenAiErrorFields {
    OpenAiErrorFields { status, kind, code }
}

const INVALID_REQUEST_ERROR: &str = "invalid_request_error";
const SERVER_ERROR: &str = "server_error";

impl From<EventRefusal> for ApiError {
    /// The error with which a stream ends at an event that is not forwarded.
    fn from(refusal: EventRefusal) -> Self {
        match refusal {
            EventRefusal::TooLong => Self::WorkerFailed { detail: refusal.to_string() },
            EventRefusal::NoMemory => Self::Overloaded { what: "answers hold all the memory there is for them" },
        }
    }
}

impl ApiError {
    /// Returns the label of this error in metrics.
    pub(crate) fn reason(&self) -> ErrorReason {
        ErrorReason(match self {
            Self::Host(HostRefusal::NoHost | HostRefusal::BadHost) => "invalid_host",
            Self::Host(HostRefusal::ForeignOrigin { .. }) => "origin_not_allowed",
            other => other.into(),
        })
    }

    /// Returns the HTTP status of this error.
    pub fn status(&self) -> StatusCode {
        self.openai_fields().status
    }

    /// Returns the error for a field that is missing or invalid.
    pub fn invalid_field(param: &str, expected: impl Into<String>) -> Self {
        Self::BadField { param: param.into(), expected: expected.into() }
    }

    /// Returns the error for a body that is not a JSON object.
    pub fn invalid_body(error: JsonError) -> Self {
        match error {
            JsonError::NotUtf8 { offset } => Self::NotUtf8 { offset },
            other => Self::NotJson { detail: other.to_string() },
        }
    }

    /// Returns when a retry makes sense.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::NoWorker { .. }
            | Self::Overloaded { .. }
            | Self::TooManyAtOnce { .. }
            | Self::UnsettledResponse { .. } => Some(Duration::from_secs(1)),
            Self::RateLimited { after, .. } => Some(Duration::from_secs(after.as_secs_f64().ceil() as u64)),
            _ => None,
        }
    }

    fn openai_fields(&self) -> OpenAiErrorFields {
        match self {
            Self::NotUtf8 { .. } | Self::NotJson { .. } | Self::BodyBroken | Self::BrokenEncoding { .. } => {
                error_fields(StatusCode::BAD_REQUEST, INVALID_REQUEST_ERROR, None)
            }
            Self::BadField { .. } => {
                error_fields(StatusCode::BAD_REQUEST, INVALID_REQUEST_ERROR, Some("invalid_value"))
            }
            Self::TooLong { .. } => {
                error_fields(StatusCode::BAD_REQUEST, INVALID_REQUEST_ERROR, Some("context_length_exceeded"))
            }
            Self::UnknownModel { .. } => {
                error_fields(StatusCode::NOT_FOUND, INVALID_REQUEST_ERROR, Some("model_not_found"))
            }
            // litellm treats every "invalid_request_error" as a 400.
            Self::NoKey | Self::BadKey => {
                error_fields(StatusCode::UNAUTHORIZED, "authentication_error", Some("invalid_api_key"))
            }
            Self::Host(HostRefusal::NoHost | HostRefusal::BadHost) => {
                error_fields(StatusCode::BAD_REQUEST, INVALID_REQUEST_ERROR, Some("invalid_host"))
            }
            Self::Host(HostRefusal::ForeignHost { .. }) => {
                error_fields(StatusCode::FORBIDDEN, "permission_error", Some("host_not_allowed"))
            }
            Self::Host(HostRefusal::ForeignOrigin { .. }) => {
                error_fields(StatusCode::FORBIDDEN, "permission_error", Some("origin_not_allowed"))
            }
            Self::UnknownPath { .. } => error_fields(StatusCode::NOT_FOUND, INVALID_REQUEST_ERROR, Some("unknown_url")),
            Self::UnknownResponse { .. } => {
                error_fields(StatusCode::NOT_FOUND, INVALID_REQUEST_ERROR, Some("not_found"))
            }
            Self::WrongMethod { .. } => {
                error_fields(StatusCode::METHOD_NOT_ALLOWED, INVALID_REQUEST_ERROR, Some("method_not_allowed"))
            }
            Self::NotOffered { .. } => {
                error_fields(StatusCode::NOT_IMPLEMENTED, INVALID_REQUEST_ERROR, Some("not_implemented"))
            }
            Self::BodyTooLarge { .. } | Self::TooMuchMemory { .. } | Self::TooDense { .. } => {
                error_fields(StatusCode::PAYLOAD_TOO_LARGE, INVALID_REQUEST_ERROR, Some("body_too_large"))
            }
            Self::UriTooLong { .. } => {
                error_fields(StatusCode::URI_TOO_LONG, INVALID_REQUEST_ERROR, Some("uri_too_long"))
            }
            Self::HeadTooLarge { .. } => error_fields(
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                INVALID_REQUEST_ERROR,
                Some("headers_too_large"),
            ),
            Self::MalformedHead => error_fields(StatusCode::BAD_REQUEST, INVALID_REQUEST_ERROR, Some("malformed_head")),
            Self::HeadTimeout => {
                error_fields(StatusCode::REQUEST_TIMEOUT, INVALID_REQUEST_ERROR, Some("headers_timeout"))
            }
            Self::BodyTimeout => error_fields(StatusCode::REQUEST_TIMEOUT, INVALID_REQUEST_ERROR, Some("body_timeout")),
            Self::UnknownEncoding { .. } => error_fields(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                INVALID_REQUEST_ERROR,
                Some("unsupported_content_encoding"),
            ),
            Self::RateLimited { unit, .. } => {
                error_fields(StatusCode::TOO_MANY_REQUESTS, unit, Some("rate_limit_exceeded"))
            }
            Self::TooManyAtOnce { .. } => {
                error_fields(StatusCode::TOO_MANY_REQUESTS, "requests", Some("rate_limit_exceeded"))
            }
            Self::Overloaded { .. } => {
                error_fields(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("overloaded"))
            }
            Self::UnsettledResponse { .. } => {
                error_fields(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, Some("response_lookup_incomplete"))
            }
            Self::NoWorker { .. } => error_fields(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, Some("no_worker")),
            Self::SaltsIgnored { .. } => {
                error_fields(StatusCode::SERVICE_UNAVAILABLE, SERVER_ERROR, Some("cache_salt_ignored"))
            }
            Self::WorkerFailed { .. } => error_fields(StatusCode::BAD_GATEWAY, SERVER_ERROR, Some("worker_failed")),
            Self::WorkerTimeout => error_fields(StatusCode::GATEWAY_TIMEOUT, SERVER_ERROR, Some("worker_timeout")),
            Self::Internal { .. } => {
                error_fields(StatusCode::INTERNAL_SERVER_ERROR, SERVER_ERROR, Some("internal_error"))
            }
        }
    }

    /// Returns the field that the error is about.
    fn param(&self) -> Option<&str> {
        match self {
            Self::BadField { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            Self::TooLong { param, .. } => Some(param),
            _ => None,
        }
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(span) = self.retry_after() {
            headers.insert(RETRY_AFTER, HeaderValue::from(span.as_secs().max(1)));
        }
        match self {
            Self::WrongMethod { allow, .. } => {
                headers.insert(ALLOW, HeaderValue::from_static(allow));
            }
            Self::NoKey | Self::BadKey => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The rest of such a body cannot be separated from the next request, and a client that violates HTTP's
            // rules for the head may not know where its message ends.
            Self::BodyTimeout
            | Self::BodyBroken
            | Self::UriTooLong { .. }
            | Self::HeadTooLarge { .. }
            | Self::MalformedHead
            | Self::HeadTimeout
            | Self::Host(HostRefusal::NoHost | HostRefusal::BadHost) => {
                headers.insert(CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        headers
    }
}

/// Returns OpenAI's error object with this message.
fn error_object(message: &str, kind: &str, (param, code): (Option<&str>, Option<&str>)) -> serde_json::Value {
    serde_json::json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
}

/// Attached to an error response as an extension, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorReason(pub &'static str);

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPIENT: ErrorRecipient = ErrorRecipient { format: ErrorFormat::OpenAi, request: vocabulary::RequestId(1) };

    #[tokio::test]
    async fn an_error_has_openais_format() {
        let answer = ApiError::UnknownModel { model: "gpt-9".into() }.response(RECIPIENT);
        assert_eq!(answer.status(), 404);
        let body = axum::body::to_bytes(answer.into_body(), 1000).await.unwrap();
        let value: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert_eq!(value["error"]["type"], "invalid_request_error");
        assert_eq!(value["error"]["code"], "model_not_found");
        assert_eq!(value["error"]["param"], "model");
        assert!(value["error"]["message"].as_str().unwrap().contains("GET /v1/models"));
    }

    #[test]
    fn a_refused_origin_and_a_refused_host_have_labels_of_their_own() {
        let foreign = HostRefusal::ForeignHost { host: "evil.example".into(), setting: "auth.keys_file" };
        for (refusal, label) in [
            (HostRefusal::NoHost, "invalid_host"),
            (HostRefusal::BadHost, "invalid_host"),
            (foreign, "host_not_allowed"),
            (HostRefusal::ForeignOrigin { origin: "http://evil.example".into() }, "origin_not_allowed"),
        ] {
            assert_eq!(ApiError::from(refusal).reason(), ErrorReason(label));
        }
    }

    #[test]
    fn retryable_errors_send_retry_after_and_method_errors_send_allow() {
        let busy = ApiError::Overloaded { what: "connections" }.response(RECIPIENT);
        assert_eq!((busy.status().as_u16(), busy.headers()[RETRY_AFTER].to_str().unwrap()), (429, "1"));
        let wrong = ApiError::WrongMethod { method: "PUT".into(), allow: "GET, HEAD" }.response(RECIPIENT);
        assert_eq!((wrong.status().as_u16(), wrong.headers()[ALLOW].to_str().unwrap()), (405, "GET, HEAD"));
        assert_eq!(wrong.extensions().get(), Some(&ErrorReason("method_not_allowed")));
    }

    #[test]
    fn one_request_at_once_is_no_requests() {
        let told = |limit| ApiError::TooManyAtOnce { limit }.to_string();
        assert!(told(1).contains(": 1 request at once") && told(2).contains(": 2 requests at once"));
    }
}
