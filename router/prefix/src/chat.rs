//! A chat request as the template sees it, shaped as vLLM shapes it before rendering.

use minijinja::Value;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::content_format::ContentFormat;
use crate::json_value::{JsonValue, entries};
use crate::{FallbackReason, PrefixError};

/// The fields of a chat request that decide its prompt.
#[derive(Debug, Deserialize)]
pub struct ChatBody {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<JsonValue>>,
    #[serde(default)]
    documents: Option<Vec<JsonValue>>,
    #[serde(default)]
    chat_template_kwargs: Option<JsonValue>,
    #[serde(default)]
    reasoning_effort: Option<JsonValue>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    chat_template: Option<IgnoredAny>,
    #[serde(default)]
    truncate_prompt_tokens: Option<IgnoredAny>,
}

/// One message; fields that no engine hands to its template are skipped.
#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Option<JsonValue>,
    #[serde(default)]
    tool_calls: Option<JsonValue>,
    #[serde(default)]
    tool_call_id: Option<JsonValue>,
    #[serde(default)]
    name: Option<JsonValue>,
    #[serde(default)]
    reasoning: Option<JsonValue>,
    #[serde(default)]
    reasoning_content: Option<JsonValue>,
    #[serde(default)]
    tools: Option<JsonValue>,
}

/// Variables of the template, in order.
pub(crate) type Variables = Vec<(Value, Value)>;

impl ChatBody {
    /// Reads a request body. Unknown fields are skipped, a field given twice is refused.
    pub fn parse(body: &[u8]) -> Result<Self, PrefixError> {
        Ok(serde_json::from_slice(body)?)
    }

    /// Whether special tokens are added after rendering; templates write their own.
    pub(crate) fn adds_special_tokens(&self) -> bool {
        self.add_special_tokens.unwrap_or(false)
    }

    /// Whether the answer goes on with the last message instead of starting a new one.
    pub(crate) fn continues_final_message(&self) -> bool {
        self.continue_final_message.unwrap_or(false)
    }

    /// The template's variables except the special tokens and the messages.
    pub(crate) fn variables(&self) -> Result<Variables, PrefixError> {
        let unsupported = |detail| PrefixError::unforeseeable(FallbackReason::UnsupportedOption, detail);
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
        let mut variables: Variables = Vec::with_capacity(12);
        for (name, value) in self.chat_template_kwargs.iter().flat_map(|kwargs| entries(&kwargs.0)) {
            match name.as_str() {
                Some("messages" | "tools" | "documents" | "chat_template" | "tokenize") | None => {
                    return Err(unsupported("a reserved name in chat_template_kwargs"));
                }
                Some(_) => variables.push((name, value)),
            }
        }
        if let Some(effort) = &self.reasoning_effort {
            variables.push(("reasoning_effort".into(), effort.0.clone()));
        }
        let documents = self.documents.as_ref().map(|list| list.iter().map(|item| item.0.clone()).collect::<Value>());
        variables.push(("tools".into(), self.tools()?));
        variables.push(("documents".into(), documents.unwrap_or(none())));
        variables.push(("add_generation_prompt".into(), generates.into()));
        Ok(variables)
    }

    /// The tools as vLLM's model of them prints: declared fields first, missing ones null.
    fn tools(&self) -> Result<Value, PrefixError> {
        let Some(tools) = &self.tools else { return Ok(none()) };
        tools.iter().map(|tool| shaped_tool(&tool.0)).collect::<Result<Vec<_>, _>>().map(Value::from)
    }

    /// The messages in the template's shape.
    pub(crate) fn messages(&self, format: ContentFormat) -> Result<Vec<Variables>, PrefixError> {
        match self.messages.is_empty() {
            true => Err(malformed("no messages")),
            false => self.messages.iter().map(|message| message.shaped(format)).collect(),
        }
    }
}

/// Python's `None`.
fn none() -> Value {
    Value::from(())
}

fn malformed(detail: &'static str) -> PrefixError {
    PrefixError::unforeseeable(FallbackReason::Malformed, detail)
}

impl Message {
    fn shaped(&self, format: ContentFormat) -> Result<Variables, PrefixError> {
        let mut fields: Variables = Vec::with_capacity(6);
        let reasoning = self.reasoning.as_ref().or(self.reasoning_content.as_ref());
        let reasoning = reasoning.filter(|_| self.role == "assistant").map(|value| value.0.clone());
        // Older names of the field, as transformers fills them in.
        if let Some(reasoning) = &reasoning {
            fields.push(("thinking".into(), reasoning.clone()));
        }
        fields.push(("role".into(), Value::from(self.role.as_str())));
        fields.push(("content".into(), content(self.content.as_ref().map(|value| &value.0), format)?));
        match self.role.as_str() {
            "assistant" => {
                if let Some(calls) = self.tool_calls.as_ref().map(|calls| tool_calls(&calls.0)).transpose()?.flatten() {
                    fields.push(("tool_calls".into(), calls));
                }
            }
            "tool" => fields.extend(self.tool_call_id.iter().map(|id| ("tool_call_id".into(), id.0.clone()))),
            "developer" => fields.extend(self.tools.iter().map(|tools| ("tools".into(), tools.0.clone()))),
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
    Value::from_pairs([("type", Value::from("text")), ("text", text)])
}

/// Content as the template wants it: nothing, a string or parts in; a string or parts out.
fn content(given: Option<&Value>, format: ContentFormat) -> Result<Value, PrefixError> {
    let Some(given) = given else {
        return Ok(if format == ContentFormat::Text { Value::from("") } else { Value::from(Vec::<Value>::new()) });
    };
    if given.as_str().is_some() {
        return Ok(match format {
            ContentFormat::Text => given.clone(),
            ContentFormat::Parts => Value::from(vec![text_part(given.clone())]),
        });
    }
    let not_content = || malformed("a message's content is neither text nor a list of parts");
    if given.kind() != minijinja::value::ValueKind::Seq {
        return Err(not_content());
    }
    let parts = given.try_iter().map_err(|_| not_content())?.map(|part| part_text(&part));
    let parts: Vec<PartText> = parts.filter_map(Result::transpose).collect::<Result<_, _>>()?;
    Ok(match format {
        ContentFormat::Text => {
            let texts: Vec<&str> = parts.iter().filter_map(|p| p.text.as_str()).filter(|t| !t.is_empty()).collect();
            Value::from(texts.join("\n"))
        }
        ContentFormat::Parts => parts.into_iter().filter_map(PartText::wrapped).collect(),
    })
}

/// The text of one part, and whether the client had wrapped it in an object.
struct PartText {
    text: Value,
    bare: bool,
}

impl PartText {
    fn wrapped(self) -> Option<Value> {
        match self.bare {
            true if self.text.as_str() == Some("") => None,
            true => Some(self.text),
            false => Some(text_part(self.text)),
        }
    }
}

/// A part's text; `None` for one without text, which engines skip.
fn part_text(part: &Value) -> Result<Option<PartText>, PrefixError> {
    if part.as_str().is_some() {
        return Ok(Some(PartText { text: part.clone(), bare: true }));
    }
    let field = |name: &str| part.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none());
    let kind = field("type");
    let (name, may_be_missing) = match kind.as_ref().and_then(Value::as_str) {
        Some("text") => ("text", true),
        Some("refusal") => ("refusal", true),
        Some("input_text" | "output_text") => ("text", false),
        Some("thinking") => ("thinking", false),
        Some(_) => return Err(PrefixError::unforeseeable(FallbackReason::Multimodal, "a part that is not text")),
        None => return Err(malformed("a part without a type")),
    };
    match field(name) {
        Some(text) if text.as_str().is_some() => Ok(Some(PartText { text, bare: false })),
        None if may_be_missing => Ok(None),
        _ => Err(malformed("a text part without text")),
    }
}

/// Tool calls with their arguments read from JSON text into objects; `None` when there are none.
fn tool_calls(calls: &Value) -> Result<Option<Value>, PrefixError> {
    let not_calls = || malformed("tool_calls is not a list of calls");
    let calls: Vec<Value> = calls.try_iter().map_err(|_| not_calls())?.collect();
    if calls.is_empty() {
        return Ok(None);
    }
    let shaped = calls.iter().map(|call| {
        let function = call.get_attr("function").map_err(|_| not_calls())?;
        if entries(&function).next().is_none() {
            return Err(not_calls());
        }
        replaced(call, "function", call_function(&function)?)
    });
    shaped.collect::<Result<Vec<_>, _>>().map(|calls| Some(Value::from(calls)))
}

fn call_function(function: &Value) -> Result<Value, PrefixError> {
    let arguments = function.get_attr("arguments").unwrap_or_default();
    let arguments = match arguments.as_str() {
        Some("") => Value::from_pairs(std::iter::empty::<(Value, Value)>()),
        Some(text) => serde_json::from_str::<JsonValue>(text)?.0,
        None if arguments.is_true() => arguments,
        None => Value::from_pairs(std::iter::empty::<(Value, Value)>()),
    };
    replaced(function, "arguments", arguments)
}

/// The object with one entry replaced in its place, or added at the end.
fn replaced(object: &Value, name: &str, value: Value) -> Result<Value, PrefixError> {
    let mut pairs: Variables = entries(object).collect();
    match pairs.iter_mut().find(|(key, _)| key.as_str() == Some(name)) {
        Some((_, old)) => *old = value,
        None => pairs.push((name.into(), value)),
    }
    Ok(Value::from_pairs(pairs))
}

fn shaped_tool(tool: &Value) -> Result<Value, PrefixError> {
    let function = tool.get_attr("function").unwrap_or_default();
    if function.get_attr("name").ok().and_then(|name| name.as_str().map(drop)).is_none() {
        return Err(malformed("a tool that is not a function with a name"));
    }
    let kind = tool.get_attr("type").ok().filter(|kind| !kind.is_undefined());
    let function = declared_first(&function, &["name", "description", "parameters"]);
    let mut pairs: Variables =
        vec![("type".into(), kind.unwrap_or_else(|| Value::from("function"))), ("function".into(), function)];
    pairs.extend(entries(tool).filter(|(key, _)| !matches!(key.as_str(), Some("type" | "function"))));
    Ok(Value::from_pairs(pairs))
}

fn declared_first(object: &Value, declared: &[&str]) -> Value {
    let given = |name: &str| object.get_attr(name).ok().filter(|value| !value.is_undefined());
    let mut pairs: Variables = declared.iter().map(|name| ((*name).into(), given(name).unwrap_or(none()))).collect();
    pairs.extend(entries(object).filter(|(key, _)| !declared.iter().any(|name| key.as_str() == Some(name))));
    Value::from_pairs(pairs)
}

#[cfg(test)]
mod tests;
