//! A client's request after its body has arrived: the starting point for all parts of the router.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{HeaderMap, Method};
use prefix::ChatEndpoint;
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{RequestId, TenantId};

use crate::error::{ApiError, ErrorFormat, ErrorRecipient};
use crate::memory_budget::MemoryReservation;
use crate::quotas::TokenReservation;
use crate::request_id::{REQUEST_ID, id_value};
use crate::stored_responses::transcript::ConversationAddition;

/// A generation endpoint of the API.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum GenerationEndpoint {
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// `/v1/completions`.
    Completions,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`.
    Responses,
}

impl GenerationEndpoint {
    /// Returns its path, which is the same at the engines.
    pub fn path(self) -> &'static str {
        match self {
            Self::ChatCompletions => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Messages => "/v1/messages",
            Self::Responses => "/v1/responses",
        }
    }

    /// Returns the field that holds its conversation or prompt.
    pub fn input(self) -> &'static str {
        match self {
            Self::ChatCompletions | Self::Messages => "messages",
            Self::Completions => "prompt",
            Self::Responses => "input",
        }
    }

    /// Returns the format of its conversation; `None` where it is a prompt.
    pub fn chat_form(self) -> Option<ChatEndpoint> {
        match self {
            Self::ChatCompletions => Some(ChatEndpoint::Chat),
            Self::Completions => None,
            Self::Messages => Some(ChatEndpoint::Messages),
            Self::Responses => Some(ChatEndpoint::Responses),
        }
    }
}

/// A complete request. The body is what the client sent, decompressed, in one allocation that clones share.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    /// The router's id for the request; also the engines' `X-Request-Id`. The client's own id is never forwarded:
    /// engines name stored objects after it, and two tenants could choose the same.
    pub id: RequestId,
    /// The tenant that sent it.
    pub tenant: TenantId,
    /// The method.
    pub method: Method,
    /// Path and query, as the client wrote them.
    pub path: String,
    /// All of the client's headers. Some must not be forwarded: see `WorkerClient::headers_for`.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// When its headers had arrived.
    pub arrived: Instant,
    /// Tokens reserved for it from its tenant's quota, if there is one.
    pub token_reservation: Option<TokenReservation>,
    /// Memory reserved for its body; released with the last clone.
    pub memory: Option<Arc<MemoryReservation>>,
    /// For `/v1/responses`: what it adds to the stored transcript of its conversation.
    pub(crate) addition: Option<ConversationAddition>,
}

impl ClientRequest {
    /// Returns the recipient of its errors.
    pub fn error_recipient(&self) -> ErrorRecipient {
        ErrorRecipient { format: ErrorFormat::of(&self.path), request: self.id }
    }

    /// Reserves memory for a copy that was derived from the body, until the copy is dropped.
    pub(crate) fn charge_derived(&self, derived: Bytes) -> Result<Bytes, ApiError> {
        match &self.memory {
            Some(memory) => memory.charge_derived(&self.body, derived),
            None => Ok(derived),
        }
    }

    /// Returns the client's headers with our request id instead of the client's.
    pub(crate) fn headers_with_request_id(&self) -> HeaderMap {
        let mut headers = self.headers.clone();
        headers.insert(REQUEST_ID, id_value(self.id));
        headers
    }
}

/// The few fields of a body that decide where it goes. Everything else is left to the engine.
#[derive(Debug, Default)]
pub struct Envelope<'a> {
    /// The model, if the client named one.
    pub model: Option<std::borrow::Cow<'a, str>>,
    /// For `/v1/responses`: whether it is something else than a step answered now, either in the background or without
    /// input.
    pub is_detached: bool,
    /// For `/v1/responses`: whether it runs in the background.
    pub is_background: bool,
    /// For `/v1/responses`: the response that this one follows.
    pub previous_response_id: Option<std::borrow::Cow<'a, str>>,
}

#[derive(Deserialize)]
struct RawEnvelope<'a> {
    #[serde(borrow)]
    model: Option<&'a RawValue>,
    stream: Option<&'a RawValue>,
    previous_response_id: Option<&'a RawValue>,
    background: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
}

impl<'a> Envelope<'a> {
    /// Reads the envelope of `body`, and checks that it is one JSON object in UTF-8. Lone surrogates in other fields
    /// are left to the engine.
    pub fn read(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| ApiError::NotUtf8 { offset: error.valid_up_to() })?;
        let not_json = |error: serde_json::Error| ApiError::NotJson { detail: error.to_string() };
        if !text.trim_start().starts_with('{') {
            let kind = serde_json::from_str::<&RawValue>(text).map_err(not_json)?;
            let detail = format!("expected an object, found {}", vocabulary::truncated(kind.get()));
            return Err(ApiError::NotJson { detail });
        }
        let raw: RawEnvelope<'a> = serde_json::from_str(text).map_err(not_json)?;
        if raw.stream.is_some_and(|stream| !matches!(stream.get(), "true" | "false" | "null")) {
            return Err(ApiError::invalid_field("stream", "true or false is accepted"));
        }
        let is_background = raw.background.is_some_and(|background| !matches!(background.get(), "false" | "null"));
        Ok(Self {
            model: text_field("model", raw.model)?,
            is_detached: raw.input.is_none() || is_background,
            is_background,
            previous_response_id: text_field("previous_response_id", raw.previous_response_id)?,
        })
    }
}

impl Envelope<'_> {
    /// Copies the borrowed fields, so that it no longer borrows the body.
    pub fn into_owned(self) -> Envelope<'static> {
        let owned = |text: std::borrow::Cow<'_, str>| std::borrow::Cow::Owned(text.into_owned());
        let (model, previous_response_id) = (self.model.map(owned), self.previous_response_id.map(owned));
        Envelope { model, previous_response_id, is_detached: self.is_detached, is_background: self.is_background }
    }
}

fn text_field<'a>(name: &str, value: Option<&'a RawValue>) -> Result<Option<std::borrow::Cow<'a, str>>, ApiError> {
    /// Borrows where there is no escape; serde's own `Cow` never does.
    #[derive(Deserialize)]
    struct BorrowedText<'a>(#[serde(borrow)] std::borrow::Cow<'a, str>);
    match value.map(RawValue::get) {
        None | Some("null") => Ok(None),
        Some(raw) => {
            let text: BorrowedText<'a> =
                serde_json::from_str(raw).map_err(|_| ApiError::invalid_field(name, "a text is accepted"))?;
            Ok(Some(text.0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_envelope_reads_the_model_and_skips_the_rest() {
        let body = br#" {"messages":[{"content":"\ud800"}],"model":"a/b","x":{"model":1},"stream":true}"#;
        assert_eq!(Envelope::read(body).unwrap().model.as_deref(), Some("a/b"));
        assert_eq!(Envelope::read(b"{}").unwrap().model, None);
        assert_eq!(Envelope::read(br#"{"model":null}"#).unwrap().model, None);
        assert_eq!(Envelope::read(br#"{"model":"\u0061"}"#).unwrap().model.as_deref(), Some("a"));
    }

    #[test]
    fn a_body_that_is_not_one_json_object_is_rejected_with_the_reason() {
        let error = |body: &[u8]| Envelope::read(body).unwrap_err();
        assert_eq!(error(b"{\"model\":\"\xff\"}"), ApiError::NotUtf8 { offset: 10 });
        for (body, wanted) in [
            (&b"{\"model\":"[..], "EOF"),
            (b"", "EOF"),
            (b"[\"a\"]", "expected an object"),
            (b"{} {}", "trailing"),
            (b"{\"model\":\"a\",\"model\":\"b\"}", "duplicate field"),
        ] {
            assert!(matches!(error(body), ApiError::NotJson { detail } if detail.contains(wanted)), "{wanted}");
        }
        for body in [&br#"{"model":1}"#[..], br#"{"model":{}}"#, br#"{"model":"\ud800"}"#] {
            assert!(matches!(error(body), ApiError::BadField { param, .. } if param == "model"));
        }
        assert!(matches!(error(br#"{"stream":"yes"}"#), ApiError::BadField { param, .. } if param == "stream"));
    }
}
