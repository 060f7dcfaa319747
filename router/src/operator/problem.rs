//! RFC 9457 problem documents: how the operator API says no.

use axum::response::{IntoResponse, Response};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, StatusCode};
use serde_json::json;

/// One problem.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    status: StatusCode,
    title: &'static str,
    detail: String,
}

impl Problem {
    fn new(status: StatusCode, title: &'static str, detail: impl Into<String>) -> Self {
        Self { status, title, detail: detail.into() }
    }

    pub(super) fn unknown_path() -> Self {
        let detail =
            "Served are /metrics, /livez, /readyz and /ownerserve/v1/{workers,sessions,owners/PREFIX,decisions,mode}.";
        Self::new(StatusCode::NOT_FOUND, "Unknown path", detail)
    }

    pub(super) fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "Method not allowed", "The header Allow lists the allowed ones.")
    }

    pub(super) fn not_ready(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "Not ready", detail)
    }

    pub(super) fn bad_body(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Invalid body", detail)
    }

    pub(super) fn bad_query(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Invalid query", detail)
    }

    pub(super) fn bad_id(error: &vocabulary::ParseIdError) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "Invalid id", error.to_string())
    }

    pub(super) fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "Not found", detail)
    }

    pub(super) fn not_json() -> Self {
        let detail = "Send the body as Content-Type: application/json.";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "Unsupported media type", detail)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let body = json!({
            "type": "about:blank",
            "title": self.title,
            "status": self.status.as_u16(),
            "detail": self.detail,
        });
        let mut response = (self.status, body.to_string()).into_response();
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}
