//! Converts `/v1/responses` (OpenAI) bodies as vLLM 0.32 does. Several items may become one message.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::{
    CallFunction, ChatEndpoint, ChatMessageContent, ChatPromptFields, ConvertedMessage, ConvertedRequest, ToolCall,
    ToolDefinition, ToolFunction, malformed, raw, unescape, unsupported,
};
use crate::PrefixError;

/// Parameters schema that the model sees for a freeform tool.
const FREEFORM_PARAMETERS: &str = r#"{"type":"object","properties":{"input":{"type":"string","description":"The freeform text payload for this tool."}},"required":["input"],"additionalProperties":false}"#;

#[derive(Deserialize)]
struct ResponsesBody<'a> {
    #[serde(borrow)]
    input: &'a RawValue,
    instructions: Option<Cow<'a, str>>,
    tools: Option<Vec<ResponsesTool<'a>>>,
    reasoning: Option<ReasoningConfig<'a>>,
    chat_template_kwargs: Option<&'a RawValue>,
    previous_response_id: Option<IgnoredAny>,
    previous_input_messages: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    #[serde(default = "truncation_disabled")]
    truncation: Option<Cow<'a, str>>,
}

fn truncation_disabled() -> Option<Cow<'static, str>> {
    Some("disabled".into())
}

#[derive(Deserialize)]
struct ReasoningConfig<'a> {
    #[serde(borrow)]
    effort: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct ResponsesTool<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    name: Option<Cow<'a, str>>,
    description: Option<Cow<'a, str>>,
    parameters: Option<&'a RawValue>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
    tools: Option<Vec<ResponsesTool<'a>>>,
}

#[derive(Deserialize)]
struct InputItem<'a> {
    #[serde(borrow)]
    r#type: Option<Cow<'a, str>>,
    role: Option<Cow<'a, str>>,
    content: Option<&'a RawValue>,
    status: Option<Cow<'a, str>>,
    name: Option<&'a RawValue>,
    namespace: Option<Cow<'a, str>>,
    arguments: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    call_id: Option<Cow<'a, str>>,
    output: Option<&'a RawValue>,
    summary: Option<Vec<SummaryText<'a>>>,
    encrypted_content: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct SummaryText<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
}

/// Converts a body to a chat request.
pub(super) fn convert_request(body: &[u8]) -> Result<ConvertedRequest, PrefixError> {
    let body: ResponsesBody<'_> = serde_json::from_slice(body)?;
    if body.previous_response_id.is_some() || body.previous_input_messages.is_some() || body.prompt.is_some() {
        return Err(unsupported("a conversation or prompt that the engine keeps"));
    }
    // vLLM treats null as `auto`, and how much it truncates depends on the model's context length.
    if body.truncation != truncation_disabled() {
        return Err(unsupported("truncation of what is too long"));
    }
    let instructions = body.instructions.filter(|text| !text.is_empty());
    let mut messages: Vec<ConvertedMessage<'_>> = instructions
        .map(|text| ConvertedMessage::of("system", Some(ChatMessageContent::Text(text))))
        .into_iter()
        .collect();
    let mut continues = false;
    if body.input.get().starts_with('"') {
        messages.push(ConvertedMessage::of("user", Some(ChatMessageContent::Sent(body.input))));
    } else {
        let items: Vec<InputItem<'_>> = serde_json::from_str(body.input.get())?;
        continues = items.last().is_some_and(InputItem::is_unfinished);
        let before = messages.len();
        for item in items {
            item.push(&mut messages, before)?;
        }
    }
    let tools = body.tools.filter(|tools| !tools.is_empty()).map(visible_tools).transpose()?;
    let chat = ChatPromptFields {
        tools,
        chat_template_kwargs: body.chat_template_kwargs,
        reasoning_effort: body.reasoning.and_then(|reasoning| reasoning.effort),
        add_generation_prompt: continues.then_some(false),
        continue_final_message: continues.then_some(true),
    };
    chat.with_messages(&messages, ChatEndpoint::Responses)
}

impl<'a> InputItem<'a> {
    fn kind(&self) -> &str {
        self.r#type.as_deref().unwrap_or("message")
    }

    /// Returns whether the response continues this item if it is the last one.
    fn is_unfinished(&self) -> bool {
        matches!(self.kind(), "message" | "reasoning")
            && matches!(self.status.as_deref(), Some("in_progress" | "incomplete"))
    }

    /// Merges the item into the preceding assistant message if that has room, otherwise appends a message.
    fn push(self, messages: &mut Vec<ConvertedMessage<'a>>, before: usize) -> Result<(), PrefixError> {
        let mut last = messages[before..].last_mut().filter(|last| last.role == "assistant");
        match self.kind() {
            "function_call" | "custom_tool_call" => {
                let call = self.tool_call()?;
                match last {
                    Some(last) => last.tool_calls.push(call),
                    None => messages
                        .push(ConvertedMessage { tool_calls: vec![call], ..ConvertedMessage::of("assistant", None) }),
                }
            }
            "reasoning" => {
                let thought = Some(self.reasoning_text()?);
                match last.as_mut().filter(|last| last.reasoning.is_none()) {
                    Some(last) => last.reasoning = thought,
                    None => messages
                        .push(ConvertedMessage { reasoning: thought, ..ConvertedMessage::of("assistant", None) }),
                }
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = self.call_id.ok_or_else(|| malformed("a tool's output without a call_id"))?;
                let message = ConvertedMessage::of("tool", self.output.map(ChatMessageContent::Sent));
                messages.push(ConvertedMessage { tool_call_id: Some(id), ..message });
            }
            "message" if self.role.as_deref() == Some("assistant") && self.content.is_some() => {
                let text = Some(ChatMessageContent::Text(self.assistant_text()?));
                match last.as_mut().filter(|last| last.content.is_none()) {
                    Some(last) => last.content = text,
                    None => messages.push(ConvertedMessage::of("assistant", text)),
                }
            }
            "message" => {
                let role = self.role.ok_or_else(|| malformed("an item without type and role"))?;
                messages.push(ConvertedMessage {
                    name: self.name,
                    ..ConvertedMessage::of(role, self.content.map(ChatMessageContent::Sent))
                });
            }
            _ => return Err(unsupported("an item of a type that is not turned into a message")),
        }
        Ok(())
    }

    fn tool_call(self) -> Result<ToolCall<'a>, PrefixError> {
        let incomplete = || malformed("a call without name, call_id or arguments");
        let name = unescape(self.name.ok_or_else(incomplete)?)?;
        let id = self.call_id.ok_or_else(incomplete)?;
        let (name, arguments) = match &*self.r#type.unwrap_or_default() {
            "custom_tool_call" => {
                let input = self.input.ok_or_else(incomplete)?;
                (name, raw(&format!(r#"{{"input":{}}}"#, input.get()))?)
            }
            _ => {
                let arguments = Cow::Borrowed(self.arguments.ok_or_else(incomplete)?);
                let space = self.namespace.filter(|space| !space.is_empty());
                (space.map_or(name.clone(), |space| format!("{space}__{name}").into()), arguments)
            }
        };
        Ok(ToolCall { id, r#type: "function", function: CallFunction { name, arguments } })
    }

    fn reasoning_text(self) -> Result<Cow<'a, str>, PrefixError> {
        if self.encrypted_content.is_some_and(|text| !text.is_empty()) {
            return Err(malformed("encrypted reasoning"));
        }
        let content: Vec<SummaryText<'a>> = match self.content {
            Some(content) => serde_json::from_str(content.get())?,
            None => Vec::new(),
        };
        let reasoning = content.into_iter().next().or_else(|| self.summary.unwrap_or_default().into_iter().next());
        Ok(reasoning.and_then(|reasoning| reasoning.text).unwrap_or_default())
    }

    /// Returns an assistant item's text, or the text of its first part.
    fn assistant_text(&self) -> Result<Cow<'a, str>, PrefixError> {
        let content = self.content.ok_or_else(|| malformed("an answer without content"))?;
        if content.get().starts_with('"') {
            return Ok(unescape(content)?);
        }
        let parts: Vec<SummaryText<'a>> = serde_json::from_str(content.get())?;
        let first = parts.into_iter().next().and_then(|part| part.text);
        first.ok_or_else(|| malformed("an answer that does not begin with text"))
    }
}

/// Returns the tools shown to the model, without those that the service runs itself.
fn visible_tools(declared: Vec<ResponsesTool<'_>>) -> Result<Vec<ToolDefinition<'_>>, PrefixError> {
    let mut tools = Vec::with_capacity(declared.len());
    for tool in declared {
        match &*tool.r#type {
            "function" => tools.push(tool.function("")?),
            "custom" => {
                let parameters = Some(raw(FREEFORM_PARAMETERS)?);
                let mut shown = tool.function("")?;
                shown.function = ToolFunction { parameters, strict: None, ..shown.function };
                tools.push(shown);
            }
            "namespace" => {
                let space = format!("{}__", tool.name.as_deref().unwrap_or_default());
                let functions = tool.tools.unwrap_or_default().into_iter().filter(|tool| tool.r#type == "function");
                for function in functions {
                    tools.push(function.function(&space)?);
                }
            }
            _ => {}
        }
    }
    Ok(tools)
}

impl<'a> ResponsesTool<'a> {
    fn function(self, space: &str) -> Result<ToolDefinition<'a>, PrefixError> {
        let name = self.name.ok_or_else(|| malformed("a tool without a name"))?;
        let name = if space.is_empty() { name } else { format!("{space}{name}").into() };
        let Self { description, parameters, strict, defer_loading, .. } = self;
        let parameters = parameters.map(Cow::Borrowed);
        Ok(ToolDefinition {
            r#type: "function",
            function: ToolFunction { name, description, parameters, strict, defer_loading },
        })
    }
}
