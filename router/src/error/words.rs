//! An error in the words that the client of its path understands: OpenAI's, Anthropic's, or those of a stream of
//! `/v1/responses`. Never decides a status, nor what an error says.

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use serde_json::{Value, json};
use vocabulary::RequestId;

use super::{ApiError, Cause, Shape, error_object};

/// Whose words a path's clients understand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Words {
    /// OpenAI's, of all paths but these.
    OpenAi,
    /// As `OpenAi`, but events of a stream are numbered and say their type: `/v1/responses` and below.
    Responses,
    /// Anthropic's: `/v1/messages` and below.
    Anthropic,
}

impl Words {
    /// Those of a path, with or without a query.
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

/// Who is told an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addressee {
    /// In whose words.
    pub words: Words,
    /// Of which request.
    pub request: RequestId,
}

impl ApiError {
    /// The whole answer.
    pub fn answer(&self, to: Addressee) -> Response {
        let mut response = Response::new(Body::from(match to.words {
            Words::OpenAi | Words::Responses => self.openai().to_string(),
            Words::Anthropic => self.anthropic(to.request).to_string(),
        }));
        *response.status_mut() = self.status();
        *response.headers_mut() = self.headers();
        if to.words == Words::Anthropic
            && let Ok(id) = HeaderValue::try_from(to.request.to_string())
        {
            // Where Anthropic's clients look for it.
            response.headers_mut().insert("request-id", id);
        }
        // For the log and the metrics of this request; never sent.
        response.extensions_mut().insert(Cause(self.into()));
        response
    }

    /// The event that ends a broken stream: one that the clients of its path raise as an error. `number` is the one
    /// that follows those of the stream, where it has numbers.
    pub fn event(&self, to: Addressee, number: u64) -> Bytes {
        let json = match to.words {
            Words::OpenAi => self.openai(),
            Words::Anthropic => self.anthropic(to.request),
            Words::Responses => self.responses(number),
        };
        // The empty lines in front end an event that may have been cut in two.
        Bytes::from(format!("\n\nevent: error\ndata: {json}\n\n"))
    }

    /// `{"error": {"message", "type", "param", "code"}}`.
    fn openai(&self) -> Value {
        let Shape { kind, code, .. } = self.shape();
        error_object(&format!("{self}"), kind, (self.param(), code))
    }

    /// OpenAI's event as its reference has it, and the error's object beside it: clients raise that and would hand on
    /// the first as an event like others.
    fn responses(&self, number: u64) -> Value {
        let Shape { code, .. } = self.shape();
        let mut event = self.openai();
        event["type"] = "error".into();
        event["code"] = code.into();
        event["message"] = self.to_string().into();
        event["param"] = self.param().into();
        event["sequence_number"] = number.into();
        event
    }

    /// `{"type": "error", "error": {"type", "message"}, "request_id"}`.
    fn anthropic(&self, request: RequestId) -> Value {
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
    use crate::host_check::HostRefusal;

    const REQUEST: RequestId = RequestId(7);

    #[test]
    fn a_path_has_the_words_of_the_api_that_it_belongs_to() {
        for (path, words) in [
            ("/v1/messages", Words::Anthropic),
            ("/v1/messages?beta=true", Words::Anthropic),
            ("/v1/messages/count_tokens", Words::Anthropic),
            ("/v1/messages/batches", Words::Anthropic),
            ("/v1/messagesx", Words::OpenAi),
            ("/v1/responses", Words::Responses),
            ("/v1/responses/resp_1", Words::Responses),
            ("/v1/chat/completions", Words::OpenAi),
            ("/", Words::OpenAi),
        ] {
            assert_eq!(Words::of(path), words, "{path}");
        }
    }

    #[test]
    fn anthropics_types_say_what_its_reference_says() {
        let after = Duration::from_secs(2);
        for (error, kind) in [
            (ApiError::NoKey, "authentication_error"),
            (ApiError::BadKey, "authentication_error"),
            (ApiError::Host(HostRefusal::ForeignOrigin { origin: "null".into() }), "permission_error"),
            (ApiError::Host(HostRefusal::NoHost), "invalid_request_error"),
            (ApiError::field("messages", "an array is required"), "invalid_request_error"),
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
    fn one_error_is_told_in_the_words_of_each_path() {
        let error = ApiError::WorkerFailed { detail: "it broke off".into() };
        let told = |words| {
            let event = error.event(Addressee { words, request: REQUEST }, 4);
            let text = std::str::from_utf8(&event).unwrap();
            let data = text.strip_prefix("\n\nevent: error\ndata: ").unwrap().strip_suffix("\n\n").unwrap();
            serde_json::from_str::<Value>(data).unwrap()
        };
        let message = error.to_string();
        let object = json!({"message": message, "type": "server_error", "param": null, "code": "worker_failed"});
        assert_eq!(told(Words::OpenAi), json!({"error": object}));
        let inner = json!({"type": "api_error", "message": message});
        let request = REQUEST.to_string();
        assert_eq!(told(Words::Anthropic), json!({"type": "error", "error": inner, "request_id": request}));
        let numbered = json!({
            "type": "error", "code": "worker_failed", "message": message, "param": null, "sequence_number": 4,
            "error": object,
        });
        assert_eq!(told(Words::Responses), numbered);
    }

    #[test]
    fn an_answer_in_anthropics_words_keeps_its_status_and_headers() {
        let error = ApiError::WrongMethod { method: "PUT".into(), allow: "POST, OPTIONS" };
        let answer = error.answer(Addressee { words: Words::Anthropic, request: REQUEST });
        assert_eq!((answer.status().as_u16(), answer.headers()["allow"].to_str().unwrap()), (405, "POST, OPTIONS"));
        assert_eq!(answer.headers()["request-id"].to_str().unwrap(), REQUEST.to_string());
        assert_eq!(answer.extensions().get(), Some(&Cause("wrong_method")));
    }
}
