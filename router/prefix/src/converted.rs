//! Requests of other endpoints as the chat requests that vLLM makes of them before it renders, so that all prompts are
//! identified in one way. Pure: JSON text in, JSON text out; what vLLM decides by the clock or by a store is refused.

mod messages;
mod responses;

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::chat::CallOrder;
use crate::{Asked, ChatBody, ChatLayout, FallbackReason, Identifier, PrefixError, Prompt};

pub(crate) use messages::{MessagesHabits, SystemPlace};

/// Whose words a conversation comes in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ChatForm {
    /// `/v1/chat/completions`: as it is rendered.
    #[default]
    Chat,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`.
    Responses,
}

impl ChatForm {
    pub(crate) fn call_order(self) -> CallOrder {
        match self {
            Self::Chat | Self::Messages => CallOrder::Declared,
            Self::Responses => CallOrder::NameFirst,
        }
    }
}

/// A request of another endpoint as the chat request that its engine makes of it.
#[derive(Debug)]
pub struct Converted {
    form: ChatForm,
    body: Vec<u8>,
    /// After the opening of the list of messages, which comes last.
    start: usize,
}

impl Converted {
    /// The chat request's body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// Where its messages lie.
    pub fn layout(&self) -> ChatLayout<'_> {
        ChatLayout::converted(self.form, &self.body, self.start)
    }

    pub(crate) fn call_order(&self) -> CallOrder {
        self.form.call_order()
    }

    fn chat(&self) -> Result<ChatBody, PrefixError> {
        Ok(ChatBody::parse(&self.body)?.with_call_order(self.call_order()))
    }
}

impl Identifier {
    /// Identifies a `/v1/messages` request by its whole body.
    pub fn messages(&self, body: &[u8], asked: Asked<'_>) -> Prompt {
        self.conversation(ChatForm::Messages, body, (asked, None)).prompt
    }

    /// Identifies a `/v1/responses` request by its whole body.
    pub fn responses(&self, body: &[u8], asked: Asked<'_>) -> Prompt {
        self.conversation(ChatForm::Responses, body, (asked, None)).prompt
    }

    /// The chat request that a request means to this model. None where it is one.
    pub fn converted(&self, form: ChatForm, body: &[u8]) -> Option<Result<Converted, PrefixError>> {
        match form {
            ChatForm::Chat => None,
            ChatForm::Messages => {
                let habits = self.text().map(|text| text.messages_habits()).unwrap_or_default();
                Some(messages::chat(body, habits))
            }
            ChatForm::Responses => Some(responses::chat(body)),
        }
    }

    /// The chat request that a request means to this model, read.
    pub fn chat_of(&self, form: ChatForm, body: &[u8]) -> Result<ChatBody, PrefixError> {
        self.converted(form, body).map_or_else(|| ChatBody::parse(body), |converted| converted?.chat())
    }
}

/// What of a chat request decides its prompt beside the messages.
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
}

impl Chat<'_> {
    /// As a body, the messages last.
    fn with(&self, messages: &[Message<'_>], form: ChatForm) -> Result<Converted, PrefixError> {
        let mut body = serde_json::to_vec(self)?;
        body.pop();
        if body.len() > 1 {
            body.push(b',');
        }
        body.extend_from_slice(b"\"messages\":");
        let start = body.len() + 1;
        serde_json::to_writer(&mut body, messages)?;
        body.push(b'}');
        Ok(Converted { form, body, start })
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
