//! `/v1/messages`: Anthropic's bodies, converted as vLLM 0.32 does.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use smart_default::SmartDefault;

use super::{
    Call, CallFunction, Chat, ChatForm, Content, Converted, Message, Part, Tool, ToolFunction, malformed, media, raw,
    text, unsupported,
};
use crate::chat::BILLING;
use crate::{ChatBody, ModelText, PrefixError, WallTime};

/// Where a template takes system turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SystemPlace {
    Anywhere,
    /// At the head only, so that all are moved there.
    Head,
}

/// What vLLM finds out about a template when it starts, before it converts. By default there is no template: its prompts
/// are known by their bytes, which shall only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, SmartDefault)]
pub(crate) struct MessagesHabits {
    #[default(SystemPlace::Anywhere)]
    pub(crate) system: SystemPlace,
    /// The `reasoning_effort` that stands for `thinking.type: disabled`.
    #[default("low")]
    pub(crate) disabled: &'static str,
}

impl MessagesHabits {
    /// `none` disables thinking only where the template tells it from every other effort.
    pub(crate) fn probe(text: &ModelText, system: SystemPlace) -> Self {
        let prompt = |effort: &str| {
            let body = format!(r#"{{"reasoning_effort":"{effort}","messages":[{{"role":"user","content":"Hi"}}]}}"#);
            text.render(&ChatBody::parse(body.as_bytes()).ok()?, WallTime::default()).ok()
        };
        let none = prompt("none");
        let told = none.is_some() && ["low", "medium", "high", "xhigh", "max"].into_iter().all(|e| prompt(e) != none);
        Self { system, disabled: if told { "none" } else { "low" } }
    }
}

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(borrow)]
    messages: Vec<Turn<'a>>,
    system: Option<Blocks<'a>>,
    tools: Option<Vec<Declared<'a>>>,
    thinking: Option<Thinking<'a>>,
    output_config: Option<OutputConfig<'a>>,
    chat_template_kwargs: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Turn<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    content: Blocks<'a>,
}

#[derive(Deserialize)]
struct Thinking<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct OutputConfig<'a> {
    #[serde(borrow)]
    effort: Option<Cow<'a, str>>,
}

#[derive(Deserialize)]
struct Declared<'a> {
    #[serde(borrow)]
    name: Cow<'a, str>,
    description: Option<Cow<'a, str>>,
    input_schema: &'a RawValue,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

/// Text, or a list of blocks.
struct Blocks<'a>(Vec<Block<'a>>, Option<Cow<'a, str>>);

#[derive(Deserialize)]
struct Block<'a> {
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

impl<'de: 'a, 'a> Deserialize<'de> for Blocks<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&'a RawValue>::deserialize(deserializer)?;
        Self::read(raw).map_err(serde::de::Error::custom)
    }
}

impl<'a> Blocks<'a> {
    fn read(raw: &'a RawValue) -> Result<Self, serde_json::Error> {
        match raw.get().starts_with('"') {
            true => Ok(Self(Vec::new(), Some(text(raw)?))),
            false => Ok(Self(serde_json::from_str(raw.get())?, None)),
        }
    }

    /// The texts of a system turn within the conversation.
    fn inline_system_texts(&self) -> Result<Vec<&str>, PrefixError> {
        match &self.1 {
            Some(text) if text.starts_with(BILLING) => Ok(Vec::new()),
            _ => self.system_texts(),
        }
    }

    /// The texts of a system prompt; nothing else of it reaches a template.
    fn system_texts(&self) -> Result<Vec<&str>, PrefixError> {
        if let Some(text) = &self.1 {
            return Ok(vec![text]);
        }
        if self.0.iter().any(|block| matches!(&*block.r#type, "tool_addition" | "tool_removal")) {
            return Err(unsupported("tools added or removed within the conversation"));
        }
        let texts = self.0.iter().filter(|block| block.r#type == "text").filter_map(|block| block.text.as_deref());
        Ok(texts.filter(|text| !text.is_empty() && !text.starts_with(BILLING)).collect())
    }
}

/// The chat request that a body means.
pub(super) fn chat(body: &[u8], habits: MessagesHabits) -> Result<Converted, PrefixError> {
    let body: Body<'_> = serde_json::from_slice(body)?;
    let mut messages = Vec::with_capacity(body.messages.len() + 1);
    let mut system: Vec<&str> = body.system.as_ref().map_or(Ok(Vec::new()), |system| system.system_texts())?;
    if habits.system == SystemPlace::Head {
        for turn in body.messages.iter().filter(|turn| turn.role == "system") {
            system.extend(turn.content.inline_system_texts()?);
        }
    }
    if !system.is_empty() && system.iter().any(|text| !text.is_empty()) {
        messages.push(Message::of("system", Some(Content::Text(system.concat().into()))));
    }
    for turn in &body.messages {
        match &*turn.role {
            "system" if habits.system == SystemPlace::Head => {}
            "system" => {
                let said = turn.content.inline_system_texts()?.concat();
                let message = (!said.is_empty()).then(|| Message::of("system", Some(Content::Text(said.into()))));
                messages.extend(message);
            }
            "user" | "assistant" => turn.convert(&mut messages)?,
            _ => return Err(malformed("a role other than user, assistant and system")),
        }
    }
    let effort = match &body.thinking {
        Some(thinking) if thinking.r#type == "disabled" => Some(habits.disabled.into()),
        _ => body.output_config.and_then(|config| config.effort),
    };
    let tools = body.tools.map(|tools| tools.into_iter().map(Declared::tool).collect::<Result<_, _>>()).transpose()?;
    let kwargs = body.chat_template_kwargs;
    let chat = Chat { tools, chat_template_kwargs: kwargs, reasoning_effort: effort, ..Chat::default() };
    chat.with(&messages, ChatForm::Messages)
}

impl<'a> Turn<'a> {
    /// Results of tools come before what else the user says.
    fn convert<'b>(&'b self, messages: &mut Vec<Message<'b>>) -> Result<(), PrefixError> {
        if let Some(text) = &self.content.1 {
            messages.push(Message::of(&*self.role, Some(Content::Text(text.as_ref().into()))));
            return Ok(());
        }
        let (mut parts, mut thoughts) = (Vec::new(), Vec::new());
        let mut message = Message::of(&*self.role, None);
        for block in &self.content.0 {
            match &*block.r#type {
                "text" => parts.extend(block.text.as_deref().filter(|text| !text.is_empty()).map(Cow::Borrowed)),
                "thinking" => thoughts.extend(block.thinking.as_deref()),
                "tool_use" => message.tool_calls.push(block.call()?),
                "tool_result" if self.role == "user" => messages.push(block.result()?),
                "tool_result" => parts.push(block.told_result()?),
                "image" => return Err(media()),
                "redacted_thinking" | "tool_reference" => {}
                _ => return Err(malformed("a block of a type that messages do not have")),
            }
        }
        message.reasoning = (!thoughts.is_empty()).then(|| thoughts.concat().into());
        message.content = match parts.len() {
            0 => None,
            1 => parts.pop().map(Content::Text),
            _ => Some(Content::Parts(parts.into_iter().map(Part::text).collect())),
        };
        if self.role == "assistant" || message.content.is_some() {
            messages.push(message);
        }
        Ok(())
    }
}

impl<'a> Block<'a> {
    fn call(&self) -> Result<Call<'_>, PrefixError> {
        let id = self.id.as_deref().filter(|id| !id.is_empty());
        let id = id.ok_or_else(|| unsupported("a tool_use without an id, which the engine takes from its clock"))?;
        let arguments = self.input.map_or_else(|| raw("{}"), |input| Ok(Cow::Borrowed(input)))?;
        let name = self.name.as_deref().unwrap_or_default();
        Ok(Call { id: id.into(), r#type: "function", function: CallFunction { name: name.into(), arguments } })
    }

    /// A result as a turn of its own.
    fn result(&self) -> Result<Message<'_>, PrefixError> {
        let mut said = Vec::new();
        let content = self.content.map(Blocks::read).transpose()?;
        if let Some(Blocks(items, plain)) = content {
            said.extend(plain);
            for item in items {
                match &*item.r#type {
                    "text" => said.push(item.text.unwrap_or_default()),
                    "image" => return Err(media()),
                    "tool_reference" => return Err(unsupported("a reference to a tool in a tool's result")),
                    _ => {}
                }
            }
        }
        let message = Message::of("tool", Some(Content::Text(said.join("\n").into())));
        Ok(Message { tool_call_id: Some(self.tool_use_id.as_deref().unwrap_or_default().into()), ..message })
    }

    /// A result that an assistant tells.
    fn told_result(&self) -> Result<Cow<'_, str>, PrefixError> {
        let told = match self.content {
            None => Cow::Borrowed(""),
            Some(raw) if raw.get().starts_with('"') => text(raw)?,
            Some(raw) if raw.get() == "[]" => Cow::Borrowed(""),
            Some(_) => return Err(unsupported("blocks in a tool's result that an assistant tells")),
        };
        Ok(format!("Tool result: {told}").into())
    }
}

impl<'a> Declared<'a> {
    fn tool(self) -> Result<Tool<'a>, PrefixError> {
        let Self { name, description, input_schema, strict, defer_loading } = self;
        let parameters = Some(with_type(input_schema)?);
        Ok(Tool { r#type: "function", function: ToolFunction { name, description, parameters, strict, defer_loading } })
    }
}

/// The schema, of type object where it does not say.
fn with_type(schema: &RawValue) -> Result<Cow<'_, RawValue>, PrefixError> {
    let names: BTreeMap<Cow<'_, str>, &RawValue> = serde_json::from_str(schema.get())?;
    let inside = schema.get().trim_start_matches('{').strip_suffix('}');
    match inside {
        Some(_) if names.contains_key("type") => Ok(Cow::Borrowed(schema)),
        Some(_) if names.is_empty() => raw(r#"{"type":"object"}"#),
        Some(inside) => raw(&format!(r#"{{{inside},"type":"object"}}"#)),
        None => Err(malformed("an input_schema that is not an object")),
    }
}
