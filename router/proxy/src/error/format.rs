//! Encodes an error in the format of the client's API: OpenAI's, Anthropic's, or that of `/v1/responses` streams.
//! Decides neither the status nor the message.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};
use vocabulary::RequestId;

use super::{ApiError, OpenAiErrorFields, error_object};

/// Error format that a path's clients understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ErrorFormat {
    /// OpenAI's, for all other paths.
    OpenAi,
    /// Like `OpenAi`, but stream events have numbers and a type: `/v1/responses` and below.
    Responses,
    /// Anthropic's: `/v1/messages` and below.
    Anthropic,
}

impl ErrorFormat {
    /// Returns the format for a path, with or without a query.
    pub fn of(path: &str) -> Self {
        let is_under =
            |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?']));
        match path {
            _ if is_under("/v1/messages") => Self::Anthropic,
            _ if is_under("/v1/responses") => Self::Responses,
            _ => Self::OpenAi,
        }
    }
}

/// Recipient of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ErrorRecipient {
    /// The format that it understands.
    pub format: ErrorFormat,
    /// The request that failed.
    pub request: RequestId,
}

impl ApiError {
    /// Returns the complete response.
    pub fn response(&self, to: ErrorRecipient) -> Response {
        let mut response = Response::new(Body::from(match to.format {
            ErrorFormat::OpenAi | ErrorFormat::Responses => self.openai_body().to_string(),
            ErrorFormat::Anthropic => self.anthropic_body(to.request).to_string(),
        }));
        *response.status_mut() = self.status();
        *response.headers_mut() = self.headers();
        if to.format == ErrorFormat::Anthropic
            && let Ok(id) = HeaderValue::try_from(to.request.to_string())
        {
            // Where Anthropic's clients look for the request id.
            response.headers_mut().insert("request-id", id);
        }
        // For logs and metrics of this request; never sent.
        response.extensions_mut().insert(self.reason());
        response
    }

    /// Returns the event that ends a broken stream, which the path's clients raise as an error. `number` is the next
    /// sequence number, for streams that have them.
    pub fn stream_event(&self, to: ErrorRecipient, number: u64) -> Bytes {
        let json = match to.format {
            ErrorFormat::OpenAi => self.openai_body(),
            ErrorFormat::Anthropic => self.anthropic_body(to.request),
            ErrorFormat::Responses => self.responses_event(number),
        };
        // The empty lines in front end an event that may have been cut in two.
        Bytes::from(format!("\n\nevent: error\ndata: {json}\n\n"))
    }

    /// `{"error": {"message", "type", "param", "code"}}`.
    fn openai_body(&self) -> Value {
        let OpenAiErrorFields { kind, code, .. } = self.openai_fields();
        error_object(&format!("{self}"), kind, (self.param(), code))
    }

    /// Returns OpenAI's event as in its reference, with the error object added: clients raise that, but would pass on
    /// the plain event like any other.
    fn responses_event(&self, number: u64) -> Value {
        let OpenAiErrorFields { code, .. } = self.openai_fields();
        let mut event = self.openai_body();
        event["type"] = "error".into();
        event["code"] = code.into();
        event["message"] = self.to_string().into();
        event["param"] = self.param().into();
        event["sequence_number"] = number.into();
        event
    }

    /// `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    fn anthropic_body(&self, request: RequestId) -> Value {
        let error = json!({"type": self.anthropic_type(), "message": self.to_string()});
        json!({"type": "error", "error": error, "request_id": request.to_string()})
    }

    fn anthropic_type(&self) -> &'static str {
        match (self, self.status()) {
            (Self::Overloaded { .. } | Self::NoWorker { .. } | Self::UnsettledResponse { .. }, _) => "overloaded_error",
            (_, StatusCode::UNAUTHORIZED) => "authentication_error",
            (_, StatusCode::FORBIDDEN) => "permission_error",
            (_, StatusCode::NOT_FOUND) => "not_found_error",
            (_, StatusCode::PAYLOAD_TOO_LARGE) => "request_too_large",
            (_, StatusCode::TOO_MANY_REQUESTS) => "rate_limit_error",
            (_, StatusCode::GATEWAY_TIMEOUT) => "timeout_error",
            (_, status) if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::ErrorReason;
    use crate::host_check::HostRefusal;

    const REQUEST: RequestId = RequestId(7);

    #[test]
    fn the_error_format_follows_the_path() {
        for (path, words) in [
            ("/v1/messages", ErrorFormat::Anthropic),
            ("/v1/messages?beta=true", ErrorFormat::Anthropic),
            ("/v1/messages/count_tokens", ErrorFormat::Anthropic),
            ("/v1/messages/batches", ErrorFormat::Anthropic),
            ("/v1/messagesx", ErrorFormat::OpenAi),
            ("/v1/responses", ErrorFormat::Responses),
            ("/v1/responses/resp_1", ErrorFormat::Responses),
            ("/v1/chat/completions", ErrorFormat::OpenAi),
            ("/", ErrorFormat::OpenAi),
        ] {
            assert_eq!(ErrorFormat::of(path), words, "{path}");
        }
    }

    #[test]
    fn anthropic_error_types_match_the_reference() {
        let after = Duration::from_secs(2);
        for (error, kind) in [
            (ApiError::NoKey, "authentication_error"),
            (ApiError::BadKey, "authentication_error"),
            (ApiError::Host(HostRefusal::ForeignOrigin { origin: "null".into() }), "permission_error"),
            (ApiError::Host(HostRefusal::NoHost), "invalid_request_error"),
            (ApiError::invalid_field("messages", "an array is required"), "invalid_request_error"),
            (ApiError::WrongMethod { method: "GET".into(), allow: "POST" }, "invalid_request_error"),
            (ApiError::BodyTimeout, "invalid_request_error"),
            (ApiError::UnknownModel { model: "m".into() }, "not_found_error"),
            (ApiError::UnknownPath { path: "/v1/messages/batches".into() }, "not_found_error"),
            (ApiError::BodyTooLarge { limit: 1 }, "request_too_large"),
            (ApiError::RateLimited { unit: "tokens", limit: 1, asked: 1, after }, "rate_limit_error"),
            (ApiError::Overloaded { what: "connections" }, "overloaded_error"),
            (ApiError::NoWorker { model: "m".into() }, "overloaded_error"),
            (ApiError::WorkerFailed { detail: "x".into() }, "api_error"),
            (ApiError::WorkerTimeout, "timeout_error"),
            (ApiError::Internal { request: "req-1".into() }, "api_error"),
        ] {
            assert_eq!(error.anthropic_type(), kind, "{error}");
        }
    }

    #[test]
    fn one_error_is_formatted_for_each_api() {
        let error = ApiError::WorkerFailed { detail: "it broke off".into() };
        let told = |words| {
            let event = error.stream_event(ErrorRecipient { format: words, request: REQUEST }, 4);
            let text = std::str::from_utf8(&event).unwrap();
            let data = text.strip_prefix("\n\nevent: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
            serde_json::from_str::<Value>(data).unwrap()
        };
        let message = error.to_string();
        let object = json!({"message": message, "type": "server_error", "param": null, "code": "worker_failed"});
        assert_eq!(told(ErrorFormat::OpenAi), json!({"error": object}));
        let inner = json!({"type": "api_error", "message": message});
        let request = REQUEST.to_string();
        assert_eq!(told(ErrorFormat::Anthropic), json!({"type": "error", "error": inner, "request_id": request}));
        let numbered = json!({
            "type": "error", "code": "worker_failed", "message": message, "param": null, "sequence_number": 4,
            "error": object,
        });
        assert_eq!(told(ErrorFormat::Responses), numbered);
    }

    #[test]
    fn anthropic_formatting_keeps_status_and_headers() {
        let error = ApiError::WrongMethod { method: "PUT".into(), allow: "POST, OPTIONS" };
        let answer = error.response(ErrorRecipient { format: ErrorFormat::Anthropic, request: REQUEST });
        assert_eq!((answer.status().as_u16(), answer.headers()["allow"].to_str().unwrap()), (405, "POST, OPTIONS"));
        assert_eq!(answer.headers()["request-id"].to_str().unwrap(), REQUEST.to_string());
        assert_eq!(answer.extensions().get(), Some(&ErrorReason("method_not_allowed")));
    }
}
