//! Converts requests of other endpoints to the chat requests that vLLM builds from them before rendering, so that all
//! prompts are resolved in one way.
//!
//! Pure: JSON text in, JSON text out. What vLLM decides by the clock or by stored state is refused.

mod messages;
mod responses;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::chat::{CallFieldOrder, ChatEndpoint};
use crate::conversion_traits::ConversionTraits;
use crate::{ChatBody, ChatBodyLayout, FallbackReason, PrefixError};

/// Chat request that the engine builds from a request of another endpoint.
#[derive(Debug)]
pub struct ConvertedRequest {
    form: ChatEndpoint,
    body: Vec<u8>,
    /// Offset after the opening bracket of the message list, which comes last.
    list_start: usize,
}

impl ConvertedRequest {
    /// Returns the chat request's body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Returns the layout of the converted body.
    pub fn layout(&self) -> ChatBodyLayout<'_> {
        ChatBodyLayout::converted(self.form, &self.body, self.list_start)
    }

    pub(crate) fn call_order(&self) -> CallFieldOrder {
        self.form.call_order()
    }

    pub(crate) fn chat(&self) -> Result<ChatBody, PrefixError> {
        Ok(ChatBody::parse(&self.body)?.with_call_order(self.call_order()))
    }
}

/// Converts a request to the chat request of a model with these conversion traits. Returns `None` if it already is a
/// chat request.
pub(crate) fn convert(
    endpoint: ChatEndpoint,
    body: &[u8],
    traits: ConversionTraits,
) -> Option<Result<ConvertedRequest, PrefixError>> {
    match endpoint {
        ChatEndpoint::Chat => None,
        ChatEndpoint::Messages => Some(messages::convert_request(body, traits)),
        ChatEndpoint::Responses => Some(responses::convert_request(body)),
    }
}

/// Fields of a chat request that determine its prompt, besides the messages.
#[derive(Default, Serialize)]
struct ChatPromptFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Vec<ToolDefinition<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_generation_prompt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    continue_final_message: Option<bool>,
}

impl ChatPromptFields<'_> {
    /// Serializes the request with the messages last.
    fn with_messages(
        &self,
        messages: &[ConvertedMessage<'_>],
        endpoint: ChatEndpoint,
    ) -> Result<ConvertedRequest, PrefixError> {
        let mut body = serde_json::to_vec(self)?;
        body.pop();
        if body.len() > 1 {
            body.push(b',');
        }
        body.extend_from_slice(b"\"messages\":");
        let start = body.len() + 1;
        serde_json::to_writer(&mut body, messages)?;
        body.push(b'}');
        Ok(ConvertedRequest { form: endpoint, body, list_start: start })
    }
}

#[derive(Default, Serialize)]
struct ConvertedMessage<'a> {
    role: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<ChatMessageContent<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a RawValue>,
}

impl<'a> ConvertedMessage<'a> {
    fn of(role: impl Into<Cow<'a, str>>, content: Option<ChatMessageContent<'a>>) -> Self {
        Self { role: role.into(), content, ..Self::default() }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum ChatMessageContent<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<TextPart<'a>>),
    Sent(&'a RawValue),
}

#[derive(Serialize)]
struct TextPart<'a> {
    r#type: &'static str,
    text: Cow<'a, str>,
}

impl<'a> TextPart<'a> {
    fn text(text: Cow<'a, str>) -> Self {
        Self { r#type: "text", text }
    }
}

#[derive(Serialize)]
struct ToolCall<'a> {
    id: Cow<'a, str>,
    r#type: &'static str,
    function: CallFunction<'a>,
}

#[derive(Serialize)]
struct CallFunction<'a> {
    name: Cow<'a, str>,
    arguments: Cow<'a, RawValue>,
}

#[derive(Serialize)]
struct ToolDefinition<'a> {
    r#type: &'static str,
    function: ToolFunction<'a>,
}

#[derive(Serialize)]
struct ToolFunction<'a> {
    name: Cow<'a, str>,
    description: Option<Cow<'a, str>>,
    parameters: Option<Cow<'a, RawValue>>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

fn unsupported(detail: &'static str) -> PrefixError {
    PrefixError::unresolvable(FallbackReason::UnsupportedOption, detail)
}

fn malformed(detail: &'static str) -> PrefixError {
    PrefixError::unresolvable(FallbackReason::Malformed, detail)
}

fn multimodal() -> PrefixError {
    PrefixError::unresolvable(FallbackReason::Multimodal, "a part that is not text")
}

/// Parses a JSON string; borrowed if nothing in it is escaped.
fn unescape(raw: &RawValue) -> Result<Cow<'_, str>, serde_json::Error> {
    #[derive(Deserialize)]
    struct UnescapedString<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<UnescapedString<'_>>(raw.get()).map(|text| text.0)
}

/// Wraps JSON text that is known to be valid.
fn raw(json: &str) -> Result<Cow<'static, RawValue>, PrefixError> {
    Ok(Cow::Owned(serde_json::from_str::<Box<RawValue>>(json)?))
}

#[cfg(test)]
mod tests;
