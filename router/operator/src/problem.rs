//! RFC 9457 problem documents: all errors of the operator API are defined here.
//!
//! A problem never contains a secret, a path of this machine or the text of a panic.

use axum::response::{IntoResponse, Response};
use http::header::{CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use http::{HeaderValue, StatusCode};
use ownership::SubmitError;
use serde::Serialize;
use strum::{AsRefStr, IntoStaticStr, VariantArray};
use utoipa::ToSchema;
use vocabulary::{Epoch, Owner};

use super::schemas::{EpochSchema, OwnerSchema};
use proxy::error::ApiError;
use proxy::host_check::HostRefusal;

/// Kind of problem; the last part of its `type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, AsRefStr, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum ProblemKind {
    /// The body is invalid.
    InvalidBody,
    /// A query parameter is invalid.
    InvalidQuery,
    /// An id in the path is invalid.
    InvalidId,
    /// A header or the request line is invalid.
    InvalidHeader,
    /// The cursor is malformed, or belongs to another list or filter.
    InvalidCursor,
    /// The token is missing or unknown.
    Unauthorized,
    /// The token's role does not allow this.
    Forbidden,
    /// The name in `Host` does not belong to this listener.
    HostNotAllowed,
    /// The request came from a web page of another site.
    OriginNotAllowed,
    /// The path does not exist.
    UnknownPath,
    /// The resource does not exist.
    NotFound,
    /// The path does not support this method.
    #[strum(serialize = "method_not_allowed")]
    WrongMethod,
    /// The body did not arrive in time.
    BodyTimeout,
    /// The ledger's state does not allow it.
    Conflict,
    /// The revision was compacted.
    Compacted,
    /// The resource changed after it was read.
    PreconditionFailed,
    /// The body is too large.
    BodyTooLarge,
    /// Path and query are too long.
    UriTooLong,
    /// The headers are too large.
    HeadersTooLarge,
    /// The headers did not arrive in time.
    HeadersTimeout,
    /// The Content-Type is not JSON.
    UnsupportedMediaType,
    /// The command is well-formed but makes no sense.
    Unprocessable,
    /// `If-Match` is missing from a write that requires it.
    PreconditionRequired,
    /// A limit on their number is reached.
    TooManyRequests,
    /// A bug in this program.
    Internal,
    /// A worker failed while blocks were moved.
    TransferFailed,
    /// The commit queue is full, or the directory is closing.
    CommitQueueFull,
    /// No leader is known.
    NoQuorum,
    /// The node is not ready to serve.
    NotReady,
    /// The requested staleness cannot be met now.
    StalenessExceeded,
    /// The command may or may not have been executed.
    UnknownOutcome,
}

impl ProblemKind {
    /// HTTP status and title.
    pub fn status_and_title(self) -> (StatusCode, &'static str) {
        match self {
            ProblemKind::InvalidBody => (StatusCode::BAD_REQUEST, "Invalid body"),
            ProblemKind::InvalidQuery => (StatusCode::BAD_REQUEST, "Invalid query"),
            ProblemKind::InvalidId => (StatusCode::BAD_REQUEST, "Invalid id"),
            ProblemKind::InvalidHeader => (StatusCode::BAD_REQUEST, "Invalid header"),
            ProblemKind::InvalidCursor => (StatusCode::BAD_REQUEST, "Invalid cursor"),
            ProblemKind::Unauthorized => (StatusCode::UNAUTHORIZED, "Token needed"),
            ProblemKind::Forbidden => (StatusCode::FORBIDDEN, "Role not sufficient"),
            ProblemKind::HostNotAllowed => (StatusCode::FORBIDDEN, "Host not allowed"),
            ProblemKind::OriginNotAllowed => (StatusCode::FORBIDDEN, "Origin not allowed"),
            ProblemKind::UnknownPath => (StatusCode::NOT_FOUND, "Unknown path"),
            ProblemKind::NotFound => (StatusCode::NOT_FOUND, "Not found"),
            ProblemKind::WrongMethod => (StatusCode::METHOD_NOT_ALLOWED, "Method not allowed"),
            ProblemKind::BodyTimeout => (StatusCode::REQUEST_TIMEOUT, "Body did not arrive"),
            ProblemKind::Conflict => (StatusCode::CONFLICT, "Conflict"),
            ProblemKind::Compacted => (StatusCode::GONE, "Revision compacted"),
            ProblemKind::PreconditionFailed => (StatusCode::PRECONDITION_FAILED, "Precondition failed"),
            ProblemKind::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "Body too large"),
            ProblemKind::UriTooLong => (StatusCode::URI_TOO_LONG, "Path and query too long"),
            ProblemKind::HeadersTooLarge => (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "Headers too large"),
            ProblemKind::HeadersTimeout => (StatusCode::REQUEST_TIMEOUT, "Headers did not arrive"),
            ProblemKind::UnsupportedMediaType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "Unsupported media type"),
            ProblemKind::Unprocessable => (StatusCode::UNPROCESSABLE_ENTITY, "Unprocessable"),
            ProblemKind::PreconditionRequired => (StatusCode::PRECONDITION_REQUIRED, "Precondition required"),
            ProblemKind::TooManyRequests => (StatusCode::TOO_MANY_REQUESTS, "Too many requests"),
            ProblemKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "Internal error"),
            ProblemKind::TransferFailed => (StatusCode::BAD_GATEWAY, "Transfer failed"),
            ProblemKind::CommitQueueFull => (StatusCode::SERVICE_UNAVAILABLE, "Commit queue full"),
            ProblemKind::NoQuorum => (StatusCode::SERVICE_UNAVAILABLE, "No quorum"),
            ProblemKind::NotReady => (StatusCode::SERVICE_UNAVAILABLE, "Not ready"),
            ProblemKind::StalenessExceeded => (StatusCode::SERVICE_UNAVAILABLE, "Staleness exceeded"),
            ProblemKind::UnknownOutcome => (StatusCode::GATEWAY_TIMEOUT, "Outcome unknown"),
        }
    }

    /// Value of `type`.
    pub fn uri(self) -> String {
        format!("urn:ownerserve:problem:{}", self.as_ref())
    }
}

/// Reasons that the operator API itself gives; the ledger and membership changes have their own.
pub(super) const API_REASONS: [&str; 10] = [
    "audit_log_unavailable",
    "idempotency_key_reused",
    "lease_expired",
    "registrations_full",
    "response_not_retained",
    "shared_cache_unavailable",
    "transfer_not_possible",
    "under_way",
    "unknown_rank",
    "worker_reachable",
];

/// A problem document.
#[derive(Clone, PartialEq, Debug)]
pub struct Problem {
    kind: ProblemKind,
    detail: String,
    reason: Option<&'static str>,
    epoch: Option<Epoch>,
    owner: Option<Owner>,
    oldest_revision: Option<u64>,
}

/// As it is sent, in `application/problem+json`.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemDocument {
    /// `urn:ownerserve:problem:` and the kind.
    #[serde(rename = "type")]
    kind: String,
    /// The kind, for people.
    title: &'static str,
    /// The HTTP status.
    status: u16,
    /// What is wrong here, and what to do.
    detail: String,
    /// Why the request was refused, as a word for programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// The current epoch: the fence for a new try.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<EpochSchema>)]
    epoch: Option<Epoch>,
    /// The present owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<OwnerSchema>)]
    owner: Option<Owner>,
    /// The oldest revision that can still be watched from.
    #[serde(skip_serializing_if = "Option::is_none")]
    oldest_revision: Option<u64>,
}

impl Problem {
    pub(super) fn new(kind: ProblemKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into(), reason: None, epoch: None, owner: None, oldest_revision: None }
    }

    pub(super) fn with_accepted(mut self, accepted: &str) -> Self {
        self.detail.push_str("; ");
        self.detail.push_str(accepted);
        self
    }

    /// Adds why the request was refused.
    pub(super) fn with_reason(self, reason: &'static str) -> Self {
        Self { reason: Some(reason), ..self }
    }

    pub(super) fn with_epoch(self, epoch: Epoch) -> Self {
        Self { epoch: Some(epoch), ..self }
    }

    pub(super) fn with_owner(self, owner: Owner) -> Self {
        Self { owner: Some(owner), ..self }
    }

    /// Adds the oldest revision from which a watch may start.
    pub(super) fn with_oldest_revision(self, revision: u64) -> Self {
        Self { oldest_revision: Some(revision), ..self }
    }

    /// Explanation for people.
    pub(super) fn detail(&self) -> &str {
        &self.detail
    }

    pub(super) fn kind(&self) -> ProblemKind {
        self.kind
    }

    pub(super) fn unknown_path() -> Self {
        let detail = "Served are /metrics, /livez, /readyz and what GET /ownerserve/v1/openapi.json lists.";
        Self::new(ProblemKind::UnknownPath, detail)
    }

    pub(super) fn wrong_method() -> Self {
        Self::new(ProblemKind::WrongMethod, "The header Allow lists the allowed ones.")
    }

    pub(super) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotFound, detail)
    }

    pub(super) fn bad_id(error: &impl std::fmt::Display) -> Self {
        Self::new(ProblemKind::InvalidId, error.to_string())
    }

    pub(super) fn bad_query(detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::InvalidQuery, detail)
    }

    pub(super) fn bad_body(detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::InvalidBody, detail)
    }

    pub(super) fn not_ready(detail: impl Into<String>) -> Self {
        Self::new(ProblemKind::NotReady, detail)
    }

    pub(super) fn unknown_outcome() -> Self {
        let detail = "The command was sent and may or may not have been executed. Read what it was about, and send it \
                      again with what you find; every command may be repeated.";
        Self::new(ProblemKind::UnknownOutcome, detail)
    }

    pub(super) fn no_quorum() -> Self {
        let detail = "No leader is known, so nothing can be changed; serving goes on with the last view. Look at \
                      GET /ownerserve/v1/cluster, and try again when it has a leader.";
        Self::new(ProblemKind::NoQuorum, detail)
    }
}

/// Returns the problem of a request whose head reaches no route. Its connection ends.
pub fn head_problem(error: &ApiError, _path: &str) -> Response {
    let kind = match error {
        ApiError::UriTooLong { .. } => ProblemKind::UriTooLong,
        ApiError::HeadTooLarge { .. } => ProblemKind::HeadersTooLarge,
        ApiError::HeadTimeout => ProblemKind::HeadersTimeout,
        _ => ProblemKind::InvalidHeader,
    };
    let mut response = Problem::new(kind, error.to_string()).into_response();
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

impl From<HostRefusal> for Problem {
    fn from(refusal: HostRefusal) -> Self {
        let kind = match refusal {
            HostRefusal::NoHost | HostRefusal::BadHost => ProblemKind::InvalidHeader,
            HostRefusal::ForeignHost { .. } => ProblemKind::HostNotAllowed,
            HostRefusal::ForeignOrigin { .. } => ProblemKind::OriginNotAllowed,
        };
        Self::new(kind, refusal.to_string())
    }
}

impl From<SubmitError> for Problem {
    fn from(error: SubmitError) -> Self {
        match error {
            SubmitError::UnknownOutcome => Self::unknown_outcome(),
            SubmitError::TooLarge => Self::new(ProblemKind::Unprocessable, format!("Nothing was changed: {error}."))
                .with_reason(error.reason()),
            other => {
                Self::new(ProblemKind::CommitQueueFull, format!("Nothing was changed: {other}. Try again shortly."))
                    .with_reason(other.reason())
            }
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { kind, detail, reason, epoch, owner, oldest_revision } = self;
        let (status, title) = kind.status_and_title();
        let (kind, status_code) = (kind.uri(), status.as_u16());
        let document =
            ProblemDocument { kind, title, status: status_code, detail, reason, epoch, owner, oldest_revision };
        let body = serde_json::to_string(&document).expect("strings and numbers can be written");
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        match status {
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response.extensions_mut().insert(self.kind);
        response
    }
}
