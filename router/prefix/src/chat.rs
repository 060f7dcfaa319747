//! Chat requests as the template sees them, shaped as vLLM shapes them before rendering.

use minijinja::Value;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::content_format::ContentFormat;
use crate::template_value::{TemplateValue, entries, has_entries, object};
use crate::{FallbackReason, PrefixError};

/// Endpoint whose request format a conversation uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ChatEndpoint {
    /// `/v1/chat/completions`: rendered as it is.
    #[default]
    Chat,
    /// `/v1/messages`.
    Messages,
    /// `/v1/responses`.
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

/// Fields of a chat request that determine its prompt.
#[derive(Debug, Deserialize)]
pub struct ChatBody {
    messages: Vec<ChatMessage>,
    tools: Option<Vec<TemplateValue>>,
    documents: Option<Vec<TemplateValue>>,
    chat_template_kwargs: Option<TemplateValue>,
    reasoning_effort: Option<TemplateValue>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template: Option<IgnoredAny>,
    truncate_prompt_tokens: Option<IgnoredAny>,
    #[serde(skip)]
    call_order: CallFieldOrder,
    /// Length of the request body, an estimate of the prompt's length.
    #[serde(skip)]
    bytes: usize,
}

/// Order in which a template sees the fields of a tool call's function.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CallFieldOrder {
    /// `arguments` before `name`: the declaration order of vLLM's model that validates chat requests.
    #[default]
    Declared,
    /// `name` first: calls that the engine builds itself.
    NameFirst,
}

/// Prefix of system text lines that name the client and change with every request. vLLM drops these lines.
pub(crate) const BILLING_LINE_PREFIX: &str = "x-anthropic-billing-header";

/// One message. Fields that no engine passes to its template are skipped.
#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: String,
    content: Option<TemplateValue>,
    tool_calls: Option<TemplateValue>,
    tool_call_id: Option<TemplateValue>,
    name: Option<TemplateValue>,
    reasoning: Option<TemplateValue>,
    reasoning_content: Option<TemplateValue>,
    tools: Option<TemplateValue>,
}

/// Template variables, in order.
pub(crate) type TemplateVariables = Vec<(Value, Value)>;

impl ChatBody {
    /// Parses a request body. Unknown fields are skipped; a duplicate field is an error.
    pub fn parse(body: &[u8]) -> Result<Self, PrefixError> {
        // UTF-8 is validated once here instead of for each string.
        let read: Self = match std::str::from_utf8(body) {
            Ok(text) => serde_json::from_str(text)?,
            Err(_) => serde_json::from_slice(body)?,
        };
        Ok(Self { bytes: body.len(), ..read })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns this request with another field order in tool calls, for requests built by the engine without
    /// validation.
    pub(crate) fn with_call_order(self, call_order: CallFieldOrder) -> Self {
        Self { call_order, ..self }
    }

    /// Returns whether the tokenizer adds special tokens after rendering. Default: no, because templates write their
    /// own.
    pub(crate) fn adds_special_tokens(&self) -> bool {
        self.add_special_tokens.unwrap_or(false)
    }

    /// Returns whether the response continues the last message instead of starting a new one.
    pub(crate) fn continues_final_message(&self) -> bool {
        self.continue_final_message.unwrap_or(false)
    }

    /// Returns whether the request passes its own arguments to the template (`chat_template_kwargs`).
    pub(crate) fn has_template_arguments(&self) -> bool {
        self.chat_template_kwargs.is_some()
    }

    /// Returns the template variables except special tokens and messages.
    pub(crate) fn variables(&self) -> Result<TemplateVariables, PrefixError> {
        let unsupported = |detail| PrefixError::unresolvable(FallbackReason::UnsupportedOption, detail);
        if self.chat_template.is_some() {
            return Err(unsupported("a chat template in the request"));
        }
        if self.truncate_prompt_tokens.is_some() {
            return Err(unsupported("truncate_prompt_tokens"));
        }
        let generates = self.add_generation_prompt.unwrap_or(true);
        if generates && self.continues_final_message() {
            return Err(malformed("continue_final_message needs add_generation_prompt: false"));
        }
        let mut variables: TemplateVariables = Vec::with_capacity(12);
        for (name, value) in self.chat_template_kwargs.iter().flat_map(|kwargs| entries(&kwargs.0)) {
            match name.as_str() {
                Some("messages" | "tools" | "documents" | "chat_template" | "tokenize") | None => {
                    return Err(unsupported("a reserved name in chat_template_kwargs"));
                }
                Some(_) => variables.push((name, value)),
            }
        }
        if let Some(effort) = &self.reasoning_effort {
            // vLLM derives `enable_thinking` from the reasoning effort when the request does not set it.
            if !variables.iter().any(|(name, _)| name.as_str() == Some("enable_thinking")) {
                variables.push(("enable_thinking".into(), (effort.0.as_str() != Some("none")).into()));
            }
            variables.push(("reasoning_effort".into(), effort.0.clone()));
        }
        let documents = self.documents.as_ref().map(|list| list.iter().map(|item| item.0.clone()).collect::<Value>());
        variables.push(("tools".into(), self.tools()?));
        variables.push(("documents".into(), documents.unwrap_or(none())));
        variables.push(("add_generation_prompt".into(), generates.into()));
        Ok(variables)
    }

    /// Returns the tools as vLLM's model serializes them: declared fields first, missing ones null.
    fn tools(&self) -> Result<Value, PrefixError> {
        let Some(tools) = &self.tools else { return Ok(none()) };
        tools.iter().map(|tool| template_tool(&tool.0)).collect::<Result<Vec<_>, _>>().map(Value::from)
    }

    /// Returns the messages in the template's shape. An empty list is an error.
    pub(crate) fn messages(&self, format: ContentFormat) -> Result<Vec<TemplateVariables>, PrefixError> {
        match self.messages.is_empty() {
            true => Err(malformed("no messages")),
            false => self.appended_messages(format),
        }
    }

    /// Returns the messages in the template's shape, to follow other messages. The list may be empty.
    pub(crate) fn appended_messages(&self, format: ContentFormat) -> Result<Vec<TemplateVariables>, PrefixError> {
        self.messages.iter().map(|message| message.template_fields(format, self.call_order)).collect()
    }
}

/// Returns Python's `None`.
fn none() -> Value {
    Value::from(())
}

fn malformed(detail: &'static str) -> PrefixError {
    PrefixError::unresolvable(FallbackReason::Malformed, detail)
}

impl ChatMessage {
    fn template_fields(&self, format: ContentFormat, order: CallFieldOrder) -> Result<TemplateVariables, PrefixError> {
        let mut fields: TemplateVariables = Vec::with_capacity(6);
        let reasoning = self.reasoning.as_ref().or(self.reasoning_content.as_ref());
        let reasoning = reasoning.filter(|_| self.role == "assistant").map(|value| value.0.clone());
        // Older names of this field, which transformers sets as well.
        if let Some(reasoning) = &reasoning {
            fields.push(("thinking".into(), reasoning.clone()));
        }
        fields.push(("role".into(), Value::from(self.role.as_str())));
        fields.push(("content".into(), content(&self.role, self.content.as_ref().map(|value| &value.0), format)?));
        match self.role.as_str() {
            "assistant" => {
                if let Some(calls) =
                    self.tool_calls.as_ref().map(|calls| tool_calls(&calls.0, order)).transpose()?.flatten()
                {
                    fields.push(("tool_calls".into(), calls));
                }
            }
            "tool" => fields.extend(self.tool_call_id.iter().map(|id| ("tool_call_id".into(), id.0.clone()))),
            "developer" => {
                fields.push(("tools".into(), self.tools.as_ref().map_or_else(none, |tools| tools.0.clone())));
            }
            _ => {}
        }
        if let Some(reasoning) = reasoning {
            fields.push(("reasoning".into(), reasoning.clone()));
            fields.push(("reasoning_content".into(), reasoning));
        }
        if let Some(name) = self.name.as_ref().filter(|name| name.0.as_str().is_some()) {
            fields.push(("name".into(), name.0.clone()));
        }
        Ok(fields)
    }
}

fn text_part(text: Value) -> Value {
    object(vec![("type".into(), "text".into()), ("text".into(), text)])
}

/// Converts a message's content to the template's format. The input is null, a string or parts; the output a string
/// or parts.
fn content(role: &str, given: Option<&Value>, format: ContentFormat) -> Result<Value, PrefixError> {
    let mut texts = texts(given)?;
    if role == "system" {
        texts = texts.into_iter().filter_map(strip_billing_line).collect();
    }
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(match format {
        ContentFormat::Text if texts.len() == 1 => texts.remove(0),
        ContentFormat::Text => {
            let texts: Vec<String> = texts.iter().map(text).filter(|text| !text.is_empty()).collect();
            Value::from(texts.join("\n"))
        }
        // Templates expect tool results as strings.
        ContentFormat::Parts if role == "tool" => Value::from(texts.iter().map(text).collect::<Vec<_>>().join("\n")),
        ContentFormat::Parts => texts.into_iter().map(text_part).collect(),
    })
}

/// Returns the texts of a message's content.
fn texts(given: Option<&Value>) -> Result<Vec<Value>, PrefixError> {
    let Some(arguments) = given else { return Ok(Vec::new()) };
    if arguments.as_str().is_some() {
        return Ok(vec![arguments.clone()]);
    }
    let not_content = || malformed("a message's content is neither text nor a list of parts");
    if arguments.kind() != minijinja::value::ValueKind::Seq {
        return Err(not_content());
    }
    let parts = arguments.try_iter().map_err(|_| not_content())?;
    parts.filter_map(|part| part_text(&part).transpose()).collect()
}

/// Removes the line that names the client and changes with every request; `None` if nothing else is there.
fn strip_billing_line(text: Value) -> Option<Value> {
    match text.as_str().filter(|text| text.starts_with(BILLING_LINE_PREFIX)) {
        None => Some(text),
        Some(billed) => billed.split_once('\n').map(|(_, rest)| rest).filter(|rest| !rest.is_empty()).map(Value::from),
    }
}

/// Returns a content part's text, or `None` for a part without text, which engines skip.
fn part_text(part: &Value) -> Result<Option<Value>, PrefixError> {
    if part.as_str().is_some() {
        return Ok(Some(part.clone()));
    }
    let field = |name: &str| part.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none());
    let kind = field("type");
    let (name, may_be_missing) = match kind.as_ref().and_then(Value::as_str) {
        Some("text") => ("text", true),
        Some("refusal") => ("refusal", true),
        Some("input_text" | "output_text") => ("text", false),
        Some("thinking") => ("thinking", false),
        Some(_) => return Err(PrefixError::unresolvable(FallbackReason::Multimodal, "a part that is not text")),
        None => return Err(malformed("a part without a type")),
    };
    match field(name) {
        Some(text) if text.as_str().is_some() => Ok(Some(text)),
        None if may_be_missing => Ok(None),
        _ => Err(malformed("a text part without text")),
    }
}

/// Returns the tool calls with their arguments parsed from JSON text into objects, or `None` if there are none.
fn tool_calls(calls: &Value, order: CallFieldOrder) -> Result<Option<Value>, PrefixError> {
    let not_calls = || malformed("tool_calls is not a list of calls");
    let calls: Vec<Value> = calls.try_iter().map_err(|_| not_calls())?.collect();
    if calls.is_empty() {
        return Ok(None);
    }
    let shaped = calls.iter().map(|call| {
        let function = call.get_attr("function").map_err(|_| not_calls())?;
        if !has_entries(&function) {
            return Err(not_calls());
        }
        let attribute = |object: &Value, name: &str| object.get_attr(name).ok().filter(|value| !value.is_undefined());
        let name = attribute(&function, "name").map(|name| ("name".into(), name));
        let mut of_function: TemplateVariables = name.into_iter().collect();
        let position = if order == CallFieldOrder::Declared { 0 } else { of_function.len() };
        of_function.insert(position, ("arguments".into(), call_arguments(&function)?));
        let id = attribute(call, "id").map(|id| ("id".into(), id));
        let mut shaped: TemplateVariables = id.into_iter().collect();
        shaped.push(("function".into(), object(of_function)));
        shaped.extend(attribute(call, "type").map(|kind| ("type".into(), kind)));
        Ok(object(shaped))
    });
    shaped.collect::<Result<Vec<_>, _>>().map(|calls| Some(Value::from(calls)))
}

/// Arguments that are not an object count as an empty object.
fn call_arguments(function: &Value) -> Result<Value, PrefixError> {
    let arguments = function.get_attr("arguments").unwrap_or_default();
    let read = match arguments.as_str() {
        None => arguments,
        Some(text) => match serde_json::from_str::<TemplateValue>(text) {
            Ok(value) => value.0,
            Err(error) if python_accepts(text, &error) => return Err(error.into()),
            Err(_) => Value::UNDEFINED,
        },
    };
    match read.kind() {
        minijinja::value::ValueKind::Map => Ok(read),
        _ => Ok(object(Vec::new())),
    }
}

/// Returns whether Python's parser may accept what ours rejected: numbers of any size, constants, lone surrogates,
/// depth.
fn python_accepts(text: &str, error: &serde_json::Error) -> bool {
    let error = error.to_string();
    [crate::template_value::UNSUPPORTED_NUMBER, "out of range", "recursion limit"]
        .iter()
        .any(|ours| error.contains(ours))
        || ["NaN", "Infinity", "\\ud", "\\uD"].iter().any(|pythons| text.contains(pythons))
}

/// Converts a tool to the fields that vLLM declares for tools and functions. Optional fields are omitted if null.
fn template_tool(tool: &Value) -> Result<Value, PrefixError> {
    let function = tool.get_attr("function").unwrap_or_default();
    if function.get_attr("name").ok().and_then(|name| name.as_str().map(drop)).is_none() {
        return Err(malformed("a tool that is not a function with a name"));
    }
    let attribute = |object: &Value, name: &str| object.get_attr(name).ok().filter(|value| !value.is_undefined());
    let set = |object: &Value, name: &str| attribute(object, name).filter(|value| !value.is_none());
    let mut pairs: TemplateVariables = Vec::with_capacity(5);
    for name in ["name", "description", "parameters"] {
        pairs.push((name.into(), attribute(&function, name).unwrap_or_else(none)));
    }
    let deferred = set(tool, "defer_loading");
    pairs.extend(set(&function, "strict").map(|value| ("strict".into(), value)));
    let of_function = set(&function, "defer_loading").or_else(|| deferred.clone());
    pairs.extend(of_function.map(|value| ("defer_loading".into(), value)));
    let kind = attribute(tool, "type").unwrap_or_else(|| Value::from("function"));
    let mut tool: TemplateVariables = vec![("type".into(), kind), ("function".into(), object(pairs))];
    tool.extend(deferred.map(|value| ("defer_loading".into(), value)));
    Ok(object(tool))
}

#[cfg(test)]
mod tests;
