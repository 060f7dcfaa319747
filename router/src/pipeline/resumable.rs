//! Whether the rest of an answer can be had from another worker once a part of it is delivered: as a plain continuation of
//! token ids, where nothing is lost that an engine keeps of an answer beside them; or as the end of the same answer made
//! again, where it comes out the same.

use planner::TransferBar;
use prefix::FallbackReason;
use serde_json::Value;
use workers_shim::dialect::{JsonFields, Repeats, Retold, Said, ShownIds, Telling};
use workers_shim::scrape::Engine;

use super::identify::Prefixed;
use super::legs::options;
use super::parse::{Delivery, Request};
use crate::config::ResumeConfig;
use crate::incoming::Endpoint;

/// What of a request keeps its answer from going on elsewhere by token ids.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unresumable {
    /// No stream is to go on.
    Off,
    /// Its answer comes whole; it is asked for anew as a whole.
    Whole,
    /// Its prompt is so long that telling its ids would cost first-token time.
    Long,
    /// It lies at one engine, or the engine does more for it than answer.
    Held,
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
            Unresumable::Off => "that is switched off",
            Unresumable::Whole => "it comes whole",
            Unresumable::Long => "its prompt is too long for its token ids to be told",
            Unresumable::Held => "its engine keeps it, or runs its tools",
            Unresumable::Endpoint => "answers of this endpoint do not go on by token ids",
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

/// What keeps this request's answer from going on elsewhere by token ids; none where it can, from an engine that tells them.
pub fn unresumable(prefixed: &Prefixed, config: ResumeConfig) -> Option<Unresumable> {
    let request = &prefixed.request;
    let fields = request.body.fields();
    let is_on = |name: &str| fields.read::<Value>(name).is_some_and(|value| !is_nothing(&value));
    match () {
        () if request.delivery == Delivery::Whole => Some(Unresumable::Whole),
        () if !config.enabled => Some(Unresumable::Off),
        () if is_held(request) => Some(Unresumable::Held),
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
        () if prefixed.tokens() > config.most_prompt_tokens => Some(Unresumable::Long),
        () => None,
    }
}

/// What is kept of its answer from its first event on.
pub fn said(request: &Request) -> Said {
    let fields = request.body.fields();
    let stops = fields.read::<Value>("stop").is_some_and(|stops| !is_nothing(&stops));
    // Engines that look for tools and thoughts hold back what may begin one, asked for or not.
    let is_chat = request.endpoint == Endpoint::ChatCompletions;
    let telling = if stops || is_chat { Telling::Late } else { Telling::AtOnce };
    Said::new(options(request).api, shown(request), telling)
}

/// What is kept of its answer from its first event on, to know it again when it is made again; none where that is not to be
/// done, or not needed with this engine.
pub fn retold(request: &Request, unresumable: Option<Unresumable>, engine: Engine) -> Option<Retold> {
    let has_ids = unresumable.is_none() && engine == Engine::Vllm && request.endpoint == Endpoint::Completions;
    if has_ids || matches!(unresumable, Some(Unresumable::Whole | Unresumable::Off | Unresumable::Held)) {
        return None;
    }
    let fields = request.body.fields();
    let is_greedy = fields.read::<f64>("temperature") == Some(0.0) || fields.read::<i64>("top_k") == Some(1);
    let is_seeded = fields.read::<i64>("seed").is_some();
    let repeats = if is_greedy || is_seeded { Repeats::Always } else { Repeats::UntilItSpeaks };
    Some(Retold::new(options(request).api, shown(request), repeats))
}

pub(super) fn shown(request: &Request) -> ShownIds {
    if request.body.fields().read("return_token_ids").unwrap_or(false) { ShownIds::All } else { ShownIds::None }
}

/// Whether a response lies in a conversation at its engine, or has tools that the engine runs.
fn is_held(request: &Request) -> bool {
    let fields = request.body.fields();
    let tools = fields.read::<Vec<Value>>("tools").unwrap_or_default();
    let runs = tools.iter().any(|tool| !matches!(tool["type"].as_str(), Some("function" | "custom")));
    request.endpoint == Endpoint::Responses && (runs || fields.has("conversation"))
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
