//! Error responses in vLLM 0.32's format.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine_model::RequestRejection;
use serde_json::{Value, json};

use crate::sim::codec::TextCodecError;

/// An error response.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct ErrorResponse {
    pub(crate) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<&'static str>,
}

impl ErrorResponse {
    /// An error by the client, with the field that caused it, if any.
    pub(crate) fn bad_request(message: impl Into<String>, param: Option<&'static str>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, kind: "BadRequestError", message: message.into(), param }
    }

    pub(crate) fn not_found(message: impl Into<String>, param: Option<&'static str>) -> Self {
        Self { status: StatusCode::NOT_FOUND, kind: "NotFoundError", message: message.into(), param }
    }

    /// The response to any internal error.
    pub(crate) fn internal() -> Self {
        let message = "Internal server error".to_owned();
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, kind: "InternalServerError", message, param: None }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailableError");
        Self { status, kind, message: message.into(), param: None }
    }

    /// Returns the body in OpenAI's format.
    pub(crate) fn body(&self) -> Value {
        let code = self.status.as_u16();
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": code}})
    }

    /// Returns the body in Anthropic's format.
    pub(crate) fn anthropic(&self) -> Value {
        let kind = match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "api_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }
}

impl IntoResponse for ErrorResponse {
    fn into_response(self) -> Response {
        (self.status, Json(self.body())).into_response()
    }
}

impl From<TextCodecError> for ErrorResponse {
    fn from(error: TextCodecError) -> Self {
        Self::bad_request(error.to_string(), None)
    }
}

impl From<RequestRejection> for ErrorResponse {
    fn from(refused: RequestRejection) -> Self {
        match refused {
            RequestRejection::EmptyPrompt => Self::bad_request("The decoder prompt cannot be empty", Some("prompt")),
            RequestRejection::TooLong { prompt, context } => Self::bad_request(
                format!(
                    "This model's maximum context length is {context} tokens. However, your request has {prompt} \
                     input tokens. Please reduce the length of the input messages."
                ),
                Some("input_tokens"),
            ),
            RequestRejection::QueueFull { .. } => Self::unavailable(refused.to_string()),
            RequestRejection::Dead => Self::internal(),
        }
    }
}
