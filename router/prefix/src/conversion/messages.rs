//! Converts `/v1/messages` (Anthropic) bodies as vLLM 0.32 does.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{
    CallFunction, ChatEndpoint, ChatMessageContent, ChatPromptFields, ConvertedMessage, ConvertedRequest, TextPart,
    ToolCall, ToolDefinition, ToolFunction, malformed, multimodal, raw, unescape, unsupported,
};
use crate::PrefixError;
use crate::chat::BILLING_LINE_PREFIX;
use crate::conversion_traits::{AllowedSystemPosition, ConversionTraits};

#[derive(Deserialize)]
struct MessagesBody<'a> {
    #[serde(borrow)]
    messages: Vec<AnthropicMessage<'a>>,
    system: Option<ContentBlocks<'a>>,
    tools: Option<Vec<AnthropicTool<'a>>>,
    thinking: Option<ThinkingConfig<'a>>,
    output_config: Option<OutputConfig<'a>>,
    chat_template_kwargs: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct AnthropicMessage<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    content: ContentBlocks<'a>,
}

#[derive(Deserialize)]
struct ThinkingConfig<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct OutputConfig<'a> {
    #[serde(borrow)]
    effort: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct AnthropicTool<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    description: Option<Cow<'a, str>>,
    input_schema: &'a RawValue,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

/// Content: a list of blocks, or one text.
struct ContentBlocks<'a>(Vec<ContentBlock<'a>>, Option<Cow<'a, str>>);

#[derive(Deserialize)]
struct ContentBlock<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    text: Option<Cow<'a, str>>,
    thinking: Option<Cow<'a, str>>,
    id: Option<Cow<'a, str>>,
    name: Option<Cow<'a, str>>,
    input: Option<&'a RawValue>,
    tool_use_id: Option<Cow<'a, str>>,
    content: Option<&'a RawValue>,
}

impl<'de: 'a, 'a> Deserialize<'de> for ContentBlocks<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&'a RawValue>::deserialize(deserializer)?;
        Self::parse(raw).map_err(serde::de::Error::custom)
    }
}

impl<'a> ContentBlocks<'a> {
    fn parse(raw: &'a RawValue) -> Result<Self, serde_json::Error> {
        match raw.get().starts_with('"') {
            true => Ok(Self(Vec::new(), Some(unescape(raw)?))),
            false => Ok(Self(serde_json::from_str(raw.get())?, None)),
        }
    }

    /// Returns the texts of a system message within the conversation.
    fn inline_system_texts(&self) -> Result<Vec<&str>, PrefixError> {
        match &self.1 {
            Some(text) if text.starts_with(BILLING_LINE_PREFIX) => Ok(Vec::new()),
            _ => self.system_texts(),
        }
    }

    /// Returns the texts of the system prompt; nothing else of it reaches a template.
    fn system_texts(&self) -> Result<Vec<&str>, PrefixError> {
        if let Some(text) = &self.1 {
            return Ok(vec![text]);
        }
        if self.0.iter().any(|block| matches!(&*block.r#type, "tool_addition" | "tool_removal")) {
            return Err(unsupported("tools added or removed within the conversation"));
        }
        let texts = self.0.iter().filter(|block| block.r#type == "text").filter_map(|block| block.text.as_deref());
        Ok(texts.filter(|text| !text.is_empty() && !text.starts_with(BILLING_LINE_PREFIX)).collect())
    }
}

/// Converts a body to a chat request.
pub(super) fn convert_request(body: &[u8], habits: ConversionTraits) -> Result<ConvertedRequest, PrefixError> {
    let body: MessagesBody<'_> = serde_json::from_slice(body)?;
    let mut messages = Vec::with_capacity(body.messages.len() + 1);
    let mut system: Vec<&str> = body.system.as_ref().map_or(Ok(Vec::new()), |system| system.system_texts())?;
    if habits.system_placement == AllowedSystemPosition::Head {
        for turn in body.messages.iter().filter(|turn| turn.role == "system") {
            system.extend(turn.content.inline_system_texts()?);
        }
    }
    if !system.is_empty() && system.iter().any(|text| !text.is_empty()) {
        messages.push(ConvertedMessage::of("system", Some(ChatMessageContent::Text(system.concat().into()))));
    }
    for turn in &body.messages {
        match &*turn.role {
            "system" if habits.system_placement == AllowedSystemPosition::Head => {}
            "system" => {
                let system_text = turn.content.inline_system_texts()?.concat();
                let message = (!system_text.is_empty())
                    .then(|| ConvertedMessage::of("system", Some(ChatMessageContent::Text(system_text.into()))));
                messages.extend(message);
            }
            "user" | "assistant" => turn.convert(&mut messages)?,
            _ => return Err(malformed("a role other than user, assistant and system")),
        }
    }
    let effort = match &body.thinking {
        Some(thinking) if thinking.r#type == "disabled" => Some(habits.no_thinking_effort.into()),
        _ => body.output_config.and_then(|config| config.effort),
    };
    let tools =
        body.tools.map(|tools| tools.into_iter().map(AnthropicTool::tool).collect::<Result<_, _>>()).transpose()?;
    let kwargs = body.chat_template_kwargs;
    let chat = ChatPromptFields {
        tools,
        chat_template_kwargs: kwargs,
        reasoning_effort: effort,
        ..ChatPromptFields::default()
    };
    chat.with_messages(&messages, ChatEndpoint::Messages)
}

impl<'a> AnthropicMessage<'a> {
    /// Appends the converted messages; tool results come before the user's other content.
    fn convert<'b>(&'b self, messages: &mut Vec<ConvertedMessage<'b>>) -> Result<(), PrefixError> {
        if let Some(text) = &self.content.1 {
            messages.push(ConvertedMessage::of(&*self.role, Some(ChatMessageContent::Text(text.as_ref().into()))));
            return Ok(());
        }
        let (mut parts, mut thoughts) = (Vec::new(), Vec::new());
        let mut message = ConvertedMessage::of(&*self.role, None);
        for block in &self.content.0 {
            match &*block.r#type {
                "text" => parts.extend(block.text.as_deref().filter(|text| !text.is_empty()).map(Cow::Borrowed)),
                "thinking" => thoughts.extend(block.thinking.as_deref()),
                "tool_use" => message.tool_calls.push(block.tool_call()?),
                "tool_result" if self.role == "user" => messages.push(block.tool_result()?),
                "tool_result" => parts.push(block.assistant_tool_result()?),
                "image" => return Err(multimodal()),
                "redacted_thinking" | "tool_reference" => {}
                _ => return Err(malformed("a block of a type that messages do not have")),
            }
        }
        message.reasoning = (!thoughts.is_empty()).then(|| thoughts.concat().into());
        message.content = match parts.len() {
            0 => None,
            1 => parts.pop().map(ChatMessageContent::Text),
            _ => Some(ChatMessageContent::Parts(parts.into_iter().map(TextPart::text).collect())),
        };
        if self.role == "assistant" || message.content.is_some() {
            messages.push(message);
        }
        Ok(())
    }
}

impl<'a> ContentBlock<'a> {
    fn tool_call(&self) -> Result<ToolCall<'_>, PrefixError> {
        let id = self.id.as_deref().filter(|id| !id.is_empty());
        let id = id.ok_or_else(|| unsupported("a tool_use without an id, which the engine takes from its clock"))?;
        let arguments = self.input.map_or_else(|| raw("{}"), |input| Ok(Cow::Borrowed(input)))?;
        let name = self.name.as_deref().unwrap_or_default();
        Ok(ToolCall { id: id.into(), r#type: "function", function: CallFunction { name: name.into(), arguments } })
    }

    /// Converts a tool result to a message of its own.
    fn tool_result(&self) -> Result<ConvertedMessage<'_>, PrefixError> {
        let mut texts = Vec::new();
        let content = self.content.map(ContentBlocks::parse).transpose()?;
        if let Some(ContentBlocks(items, plain)) = content {
            texts.extend(plain);
            for item in items {
                match &*item.r#type {
                    "text" => texts.push(item.text.unwrap_or_default()),
                    "image" => return Err(multimodal()),
                    "tool_reference" => return Err(unsupported("a reference to a tool in a tool's result")),
                    _ => {}
                }
            }
        }
        let message = ConvertedMessage::of("tool", Some(ChatMessageContent::Text(texts.join("\n").into())));
        Ok(ConvertedMessage { tool_call_id: Some(self.tool_use_id.as_deref().unwrap_or_default().into()), ..message })
    }

    /// Returns a tool result that appears in an assistant message as text.
    fn assistant_tool_result(&self) -> Result<Cow<'_, str>, PrefixError> {
        let parts = match self.content {
            None => Cow::Borrowed(""),
            Some(raw) if raw.get().starts_with('"') => unescape(raw)?,
            Some(raw) if raw.get() == "[]" => Cow::Borrowed(""),
            Some(_) => return Err(unsupported("blocks in a tool's result that an assistant tells")),
        };
        Ok(format!("Tool result: {parts}").into())
    }
}

impl<'a> AnthropicTool<'a> {
    fn tool(self) -> Result<ToolDefinition<'a>, PrefixError> {
        let Self { name, description, input_schema, strict, defer_loading } = self;
        let parameters = Some(with_object_type(input_schema)?);
        Ok(ToolDefinition {
            r#type: "function",
            function: ToolFunction { name, description, parameters, strict, defer_loading },
        })
    }
}

/// Returns the schema with `"type": "object"` added if it has no type.
fn with_object_type(schema: &RawValue) -> Result<Cow<'_, RawValue>, PrefixError> {
    let names: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(schema.get())?;
    let inside = schema.get().trim_start_matches('{').strip_suffix('}');
    match inside {
        Some(_) if names.contains_key("type") => Ok(Cow::Borrowed(schema)),
        Some(_) if names.is_empty() => raw(r#"{"type":"object"}"#),
        Some(inside) => raw(&format!(r#"{{{inside},"type":"object"}}"#)),
        None => Err(malformed("an input_schema that is not an object")),
    }
}
