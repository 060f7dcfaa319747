//! Requests of other endpoints as the chat requests that vLLM makes of them before it renders, so that all prompts are
//! identified in one way. Pure: JSON text in, JSON text out; what vLLM decides by the clock or by a store is refused.

mod messages;
mod responses;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::chat::CallFieldOrder;
use crate::{ChatBody, ChatLayout, FallbackReason, PrefixError, Prompt, PromptInputs, PromptResolver};

pub(crate) use messages::{SystemPlacement, TemplateTraits};

/// Whose words a conversation comes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ChatEndpoint {
    /// `/v1/convert_request/completions`: as it is rendered.
    #[default]
    Chat,
    /// `/v1/resolve_messages`.
    Messages,
    /// `/v1/resolve_responses`.
    Responses,
}

impl ChatEndpoint {
    pub(crate) fn call_order(self) -> CallFieldOrder {
        match self {
            Self::Chat | Self::Messages => CallFieldOrder::Declared,
            Self::Responses => CallFieldOrder::NameFirst,
        }
    }
}

/// A request of another endpoint as the chat request that its engine makes of it.
#[derive(Debug)]
pub struct ConvertedRequest {
    form: ChatEndpoint,
    body: Vec<u8>,
    /// After the opening of the list of messages, which comes last.
    list_start: usize,
}

impl ConvertedRequest {
    /// The chat request's body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Where its messages lie.
    pub fn layout(&self) -> ChatLayout<'_> {
        ChatLayout::converted(self.form, &self.body, self.list_start)
    }

    pub(crate) fn call_order(&self) -> CallFieldOrder {
        self.form.call_order()
    }

    fn chat(&self) -> Result<ChatBody, PrefixError> {
        Ok(ChatBody::parse(&self.body)?.with_call_order(self.call_order()))
    }
}

impl PromptResolver {
    /// Identifies a `/v1/resolve_messages` request by its whole body.
    pub fn resolve_messages(&self, body: &[u8], asked: PromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Messages, body, (asked, None)).prompt
    }

    /// Identifies a `/v1/resolve_responses` request by its whole body.
    pub fn resolve_responses(&self, body: &[u8], asked: PromptInputs<'_>) -> Prompt {
        self.resolve_conversation(ChatEndpoint::Responses, body, (asked, None)).prompt
    }

    /// The chat request that a request means to this model. None where it is one.
    pub fn convert(&self, form: ChatEndpoint, body: &[u8]) -> Option<Result<ConvertedRequest, PrefixError>> {
        match form {
            ChatEndpoint::Chat => None,
            ChatEndpoint::Messages => {
                let habits = self.text().map(|text| text.template_traits()).unwrap_or_default();
                Some(messages::convert_request(body, habits))
            }
            ChatEndpoint::Responses => Some(responses::convert_request(body)),
        }
    }

    /// The chat request that a request means to this model, read.
    pub fn chat_request(&self, form: ChatEndpoint, body: &[u8]) -> Result<ChatBody, PrefixError> {
        self.convert(form, body).map_or_else(|| ChatBody::parse(body), |converted| converted?.chat())
    }
}

/// What of a chat request decides its prompt beside the messages.
#[derive(Default, Serialize)]
struct ChatRequestHead<'a> {
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

impl ChatRequestHead<'_> {
    /// As a body, the messages last.
    fn with_messages(
        &self,
        messages: &[ConvertedMessage<'_>],
        form: ChatEndpoint,
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
        Ok(ConvertedRequest { form, body, list_start: start })
    }
}

#[derive(Default, Serialize)]
struct ConvertedMessage<'a> {
    role: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<ConvertedContent<'a>>,
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
    fn of(role: impl Into<Cow<'a, str>>, content: Option<ConvertedContent<'a>>) -> Self {
        Self { role: role.into(), content, ..Self::default() }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum ConvertedContent<'a> {
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

/// A JSON string, borrowed where nothing in it is escaped.
fn unescape(raw: &RawValue) -> Result<Cow<'_, str>, serde_json::Error> {
    #[derive(Deserialize)]
    struct UnescapedString<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<UnescapedString<'_>>(raw.get()).map(|text| text.0)
}

/// JSON text that is known to be valid.
fn raw(json: &str) -> Result<Cow<'static, RawValue>, PrefixError> {
    Ok(Cow::Owned(serde_json::from_str::<Box<RawValue>>(json)?))
}

#[cfg(test)]
mod tests;
