//! Whether the rest of an answer can be had from another worker once a part of it is delivered: where it is a plain
//! continuation of token ids, and nothing is lost that an engine keeps of an answer beside its ids.

use planner::TransferBar;
use prefix::FallbackReason;
use serde_json::Value;
use workers_shim::dialect::{JsonFields, Said, ShownIds, Telling};

use super::identify::Prefixed;
use super::legs::options;
use super::parse::{Delivery, Request};
use crate::incoming::Endpoint;

/// What of a request keeps its answer from going on elsewhere.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unresumable {
    /// Its answer comes whole; it is asked for anew as a whole.
    Whole,
    /// `/v1/messages` and `/v1/responses`: their events tell of more than text.
    Endpoint,
    /// Several choices, prompts or beams.
    SeveralChoices,
    /// Log probabilities, of answer or prompt.
    Logprobs,
    /// An answer that is held to a format.
    Format,
    /// Penalties, checks and stop texts for which what the answer has said already counts.
    Memory,
    /// Thoughts that are not to be told.
    Thoughts,
    /// Tools that the answer may call.
    Tools,
    /// A prompt that is more than text.
    Content,
}

impl Unresumable {
    /// In words, after "because".
    pub fn why(self) -> &'static str {
        match self {
            Unresumable::Whole => "it comes whole",
            Unresumable::Endpoint => "answers of this endpoint cannot be taken up",
            Unresumable::SeveralChoices => "the request asks for several choices",
            Unresumable::Logprobs => "the request asks for log probabilities or an echo",
            Unresumable::Format => "the request holds it to a format",
            Unresumable::Memory => "the request has penalties or stop texts for which what was said before counts",
            Unresumable::Thoughts => "the request leaves thoughts out",
            Unresumable::Tools => "the request has tools",
            Unresumable::Content => "the prompt is more than text",
        }
    }
}

/// Fields that hold an answer to a format.
const FORMATS: [&str; 7] = [
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structural_tag",
];
/// Fields for which an engine counts over the tokens of an answer, or looks back at them.
const MEMORIES: [&str; 5] =
    ["bad_words", "repetition_detection", "thinking_token_budget", "logits_processors", "watermarking"];
/// What names parts of a message that are not text.
const MEDIA: [&[u8]; 6] = [b"_url\"", b"\"image", b"\"audio", b"\"video", b"\"input_", b"\"file"];

/// What keeps this request's answer from going on elsewhere; none where it can, from an engine that tells token ids.
pub fn unresumable(prefixed: &Prefixed) -> Option<Unresumable> {
    let request = &prefixed.request;
    let fields = request.body.fields();
    let is_on = |name: &str| fields.read::<Value>(name).is_some_and(|value| !is_nothing(&value));
    match () {
        () if request.delivery == Delivery::Whole => Some(Unresumable::Whole),
        () if !matches!(request.endpoint, Endpoint::ChatCompletions | Endpoint::Completions) => {
            Some(Unresumable::Endpoint)
        }
        () if request.bar == Some(TransferBar::SeveralChoices) => Some(Unresumable::SeveralChoices),
        () if request.bar.is_some() || is_on("logprobs") || is_on("top_logprobs") => Some(Unresumable::Logprobs),
        () if FORMATS.into_iter().any(is_on) || has_format(fields) => Some(Unresumable::Format),
        () if MEMORIES.into_iter().chain(["presence_penalty", "frequency_penalty"]).any(is_on) => {
            Some(Unresumable::Memory)
        }
        () if is_on("stop") && is_on("include_stop_str_in_output") => Some(Unresumable::Memory),
        () if fields.read::<bool>("include_reasoning") == Some(false) => Some(Unresumable::Thoughts),
        () if (is_on("tools") && fields.read::<String>("tool_choice").as_deref() != Some("none"))
            || is_on("functions") =>
        {
            Some(Unresumable::Tools)
        }
        () if is_more_than_text(prefixed) => Some(Unresumable::Content),
        () => None,
    }
}

/// What is kept of its answer from its first event on.
pub fn said(request: &Request) -> Said {
    let fields = request.body.fields();
    let shown = if fields.read("return_token_ids").unwrap_or(false) { ShownIds::All } else { ShownIds::None };
    let stops = fields.read::<Value>("stop").is_some_and(|stops| !is_nothing(&stops));
    // Engines that look for tools and thoughts hold back what may begin one, asked for or not.
    let is_chat = request.endpoint == Endpoint::ChatCompletions;
    let telling = if stops || is_chat { Telling::Late } else { Telling::AtOnce };
    Said::new(options(request).api, shown, telling)
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn has_format(fields: &JsonFields) -> bool {
    let format = fields.read::<Value>("response_format");
    format.is_some_and(|format| format["type"] != "text")
}

/// Known by the tokenizer where there is one; else whatever may be more is taken for more.
fn is_more_than_text(prefixed: &Prefixed) -> bool {
    let fields = prefixed.request.body.fields();
    match prefixed.fallback() {
        None => false,
        Some(FallbackReason::Multimodal) => true,
        Some(_) if fields.has("prompt_embeds") || fields.has("suffix") => true,
        Some(_) => {
            let messages = fields.get("messages").unwrap_or_default();
            MEDIA.iter().any(|name| messages.windows(name.len()).any(|part| part == *name))
        }
    }
}

#[cfg(test)]
mod tests;
