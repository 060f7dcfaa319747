//! Decides whether another worker can produce the rest of a partly delivered answer as a plain continuation of token
//! ids: only where the engine keeps no other state of the answer.

use planner::RequestTransferBlocker;
use prefix::FallbackReason;
use serde_json::Value;
use workers_shim::engine_api::ScannedJson;

use crate::client_request::GenerationEndpoint;
use crate::identified_request::{IdentifiedRequest, ParsedRequest, ResponseDelivery};
use crate::pipeline::ResumeConfig;
use crate::request_states::ResumeBlocker;

/// Fields that constrain an answer to a format.
const FORMAT_FIELDS: [&str; 7] = [
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "structural_tag",
];
/// Fields that make an engine count or inspect the tokens of the answer so far.
const HISTORY_DEPENDENT_FIELDS: [&str; 5] =
    ["bad_words", "repetition_detection", "thinking_token_budget", "logits_processors", "watermarking"];

/// Returns why this request's answer cannot resume by token ids; `None` where it can, from an engine that returns them.
pub fn resume_blocker(identified: &IdentifiedRequest, config: ResumeConfig) -> Option<ResumeBlocker> {
    let request = &identified.request;
    let fields = request.body.scanned_json();
    let is_on = |name: &str| is_on(fields, name);
    match () {
        () if request.delivery == ResponseDelivery::Whole => Some(ResumeBlocker::NotStreamed),
        () if !config.enabled => Some(ResumeBlocker::Disabled),
        () if has_engine_state(request) => Some(ResumeBlocker::EngineState),
        () if !matches!(request.endpoint, GenerationEndpoint::ChatCompletions | GenerationEndpoint::Completions) => {
            Some(ResumeBlocker::Endpoint)
        }
        () if request.transfer_bar == Some(RequestTransferBlocker::SeveralChoices) => {
            Some(ResumeBlocker::SeveralChoices)
        }
        () if request.transfer_bar.is_some() || is_on("logprobs") || is_on("top_logprobs") => {
            Some(ResumeBlocker::Logprobs)
        }
        () if FORMAT_FIELDS.into_iter().any(is_on) || has_format(fields) => Some(ResumeBlocker::Format),
        () if HISTORY_DEPENDENT_FIELDS.into_iter().chain(["presence_penalty", "frequency_penalty"]).any(is_on) => {
            Some(ResumeBlocker::HistoryDependent)
        }
        () if is_on("stop") && is_on("include_stop_str_in_output") => Some(ResumeBlocker::HistoryDependent),
        () if fields.read::<bool>("include_reasoning") == Some(false) => Some(ResumeBlocker::HiddenReasoning),
        () if (is_on("tools") && fields.read::<String>("tool_choice").as_deref() != Some("none"))
            || is_on("functions") =>
        {
            Some(ResumeBlocker::Tools)
        }
        () if is_more_than_text(identified) => Some(ResumeBlocker::NotText),
        () if identified.total_tokens() > config.max_prompt_tokens => Some(ResumeBlocker::PromptTooLong),
        () => None,
    }
}

/// Whether a response belongs to a conversation stored at its engine, or has tools that the engine runs.
fn has_engine_state(request: &ParsedRequest) -> bool {
    if request.endpoint != GenerationEndpoint::Responses {
        return false;
    }
    let fields = request.body.scanned_json();
    let tools = fields.read::<Vec<Value>>("tools").unwrap_or_default();
    tools.iter().any(|tool| !matches!(tool["type"].as_str(), Some("function" | "custom"))) || fields.has("conversation")
}

/// Whether a field has a value other than null, false, zero or an empty one. Reads no further than it must.
pub(super) fn is_on(fields: &ScannedJson, name: &str) -> bool {
    let Some(value) = fields.get(name) else { return false };
    match value {
        b"null" | b"false" | b"\"\"" => false,
        [b'[' | b'{', rest @ ..] => !matches!(rest.trim_ascii_start(), [b']' | b'}', ..]),
        [b'-' | b'0'..=b'9', ..] => fields.read::<f64>(name) != Some(0.0),
        _ => true,
    }
}

fn has_format(fields: &ScannedJson) -> bool {
    let format = fields.read::<Value>("response_format");
    format.is_some_and(|format| format["type"] != "text")
}

/// Whether the prompt holds more than text. Known where there is a tokenizer; else everything that may be more counts.
fn is_more_than_text(identified: &IdentifiedRequest) -> bool {
    let fields = identified.request.body.scanned_json();
    match identified.fallback_reason() {
        None => false,
        Some(FallbackReason::Multimodal) => true,
        Some(_) if fields.has("prompt_embeds") || fields.has("suffix") => true,
        Some(_) => fields.names_media("messages") || fields.names_media("input"),
    }
}

#[cfg(test)]
mod tests;
