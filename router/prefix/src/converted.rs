//! Requests of other endpoints as the chat requests that vLLM makes of them before it renders, so that all prompts are
//! identified in one way. Pure: JSON text in, JSON text out; what vLLM decides by the clock or by a store is refused.

mod messages;
mod responses;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::chat::CallOrder;
use crate::{Asked, ChatBody, FallbackReason, Identifier, PrefixError, Prompt};

pub(crate) use messages::{MessagesHabits, SystemPlace};

impl Identifier {
    /// Identifies a `/v1/messages` request by its whole body.
    pub fn messages(&self, body: &[u8], asked: Asked<'_>) -> Prompt {
        self.converted(self.chat_of_messages(body), body, asked)
    }

    /// Identifies a `/v1/responses` request by its whole body.
    pub fn responses(&self, body: &[u8], asked: Asked<'_>) -> Prompt {
        self.converted(self.chat_of_responses(body), body, asked)
    }

    /// The chat request that a `/v1/messages` request means to this model.
    pub fn chat_of_messages(&self, body: &[u8]) -> Result<ChatBody, PrefixError> {
        ChatBody::parse(&self.messages_as_chat(body)?)
    }

    /// The body of that chat request.
    pub fn messages_as_chat(&self, body: &[u8]) -> Result<Vec<u8>, PrefixError> {
        messages::chat(body, self.text().map(|text| text.messages_habits()).unwrap_or_default())
    }

    /// The chat request that a `/v1/responses` request means.
    pub fn chat_of_responses(&self, body: &[u8]) -> Result<ChatBody, PrefixError> {
        Ok(ChatBody::parse(&responses::chat(body)?)?.with_call_order(CallOrder::NameFirst))
    }

    fn converted(&self, chat: Result<ChatBody, PrefixError>, body: &[u8], asked: Asked<'_>) -> Prompt {
        let encoded = chat.and_then(|chat| match self.text() {
            Some(text) => text.encode_chat(&chat, asked.now),
            None => Err(PrefixError::unforeseeable(
                FallbackReason::NoTokenizer,
                "no tokenizer is configured for this model",
            )),
        });
        match encoded {
            Ok(ids) => self.exact(ids, asked.keys),
            Err(error) => self.fallback(body, &error, asked.keys),
        }
    }
}

/// A chat request, as far as it decides a prompt.
#[derive(Default, Serialize)]
struct Chat<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<Vec<Tool<'a>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    chat_template_kwargs: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_effort: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    add_generation_prompt: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    continue_final_message: Option<bool>,
    messages: Vec<Message<'a>>,
}

impl Chat<'_> {
    fn written(&self) -> Result<Vec<u8>, PrefixError> {
        Ok(serde_json::to_vec(self)?)
    }
}

#[derive(Default, Serialize)]
struct Message<'a> {
    role: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<Content<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a RawValue>,
}

impl<'a> Message<'a> {
    fn of(role: impl Into<Cow<'a, str>>, content: Option<Content<'a>>) -> Self {
        Self { role: role.into(), content, ..Self::default() }
    }
}

#[derive(Serialize)]
#[serde(untagged)]
enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part<'a>>),
    /// As the client sent it.
    Sent(&'a RawValue),
}

#[derive(Serialize)]
struct Part<'a> {
    r#type: &'static str,
    text: Cow<'a, str>,
}

impl<'a> Part<'a> {
    fn text(text: Cow<'a, str>) -> Self {
        Self { r#type: "text", text }
    }
}

#[derive(Serialize)]
struct Call<'a> {
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
struct Tool<'a> {
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
    PrefixError::unforeseeable(FallbackReason::UnsupportedOption, detail)
}

fn malformed(detail: &'static str) -> PrefixError {
    PrefixError::unforeseeable(FallbackReason::Malformed, detail)
}

fn media() -> PrefixError {
    PrefixError::unforeseeable(FallbackReason::Multimodal, "a part that is not text")
}

/// A JSON string, borrowed where nothing in it is escaped.
fn text(raw: &RawValue) -> Result<Cow<'_, str>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    serde_json::from_str::<Text<'_>>(raw.get()).map(|text| text.0)
}

/// JSON text that is known to be valid.
fn raw(json: &str) -> Result<Cow<'static, RawValue>, PrefixError> {
    Ok(Cow::Owned(serde_json::from_str::<Box<RawValue>>(json)?))
}

#[cfg(test)]
mod tests;
