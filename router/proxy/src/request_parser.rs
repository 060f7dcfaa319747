//! Request parser: reads in place the few body fields that decide how a request is served. The bytes stay as the client
//! sent them.

use std::sync::Arc;

use planner::RequestTransferBlocker;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;
use vocabulary::{ModelId, Tokens, count_visited};
use workers_shim::engine_api::{BodyGrowth, ClientRequestBody, JsonString, ScannedJson};

use crate::client_request::{ClientRequest, GenerationEndpoint};
use crate::error::ApiError;
use crate::identified_request::{ParsedRequest, ResponseDelivery};
use crate::request_body_cache::BodyLineage;
use crate::session_key::SessionKey;

/// Parses and checks a request. Types are checked where routing depends on them; the rest is up to the engine.
pub fn parse(
    incoming: ClientRequest,
    endpoint: GenerationEndpoint,
    salt: Option<Arc<str>>,
) -> Result<ParsedRequest, ApiError> {
    parse_grown(incoming, endpoint, (salt, None))
}

/// Parses a request, its body from where it has grown on.
pub fn parse_grown(
    incoming: ClientRequest,
    endpoint: GenerationEndpoint,
    (salt, growth): (Option<Arc<str>>, Option<&BodyGrowth>),
) -> Result<ParsedRequest, ApiError> {
    let body = ClientRequestBody::read_grown(incoming.body.clone(), growth).map_err(ApiError::invalid_body)?;
    let fields = body.scanned_json();
    match endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Messages => {
            require(fields, "messages", "an array of messages", b"[")?
        }
        GenerationEndpoint::Responses => require(fields, "input", "a text, or an array of items", b"\"[")?,
        GenerationEndpoint::Completions => {
            require(fields, "prompt", "a text, or an array of texts or of token ids", b"\"[")?
        }
    }
    let model = match read::<JsonString<'_>>(fields, "model", "a text")? {
        Some(JsonString(name)) if !name.is_empty() => ModelId::from(&*name),
        _ => {
            return Err(ApiError::invalid_field(
                "model",
                "the name of a served model is required; GET /v1/models lists them",
            ));
        }
    };
    let delivery = match read::<bool>(fields, "stream", "true or false")?.unwrap_or(false) {
        false => ResponseDelivery::Whole,
        true => ResponseDelivery::Stream { usage_wanted: wants_usage(endpoint, fields)? },
    };
    let answer = answer_tokens(endpoint, fields)?;
    let session_key = SessionKey::find(&incoming.headers, session_key_in_body(fields).as_deref());
    let bar = transfer_bar(fields)?;
    if salt.is_some() {
        refuse_media_ids(fields)?;
    }
    let own_salt = fields.read::<String>("cache_salt").filter(|_| salt.is_none()).map(Arc::from);
    Ok(ParsedRequest {
        endpoint,
        model,
        salt,
        client_salt: own_salt,
        session_key,
        delivery,
        max_answer: answer,
        transfer_bar: bar,
        body,
        lineage: BodyLineage::default(),
        incoming,
    })
}

/// Returns the field's value; `None` where it is missing or null.
fn read<'a, T: Deserialize<'a>>(fields: &'a ScannedJson, name: &str, accepted: &str) -> Result<Option<T>, ApiError> {
    let wrong = |_| ApiError::invalid_field(name, format!("{accepted} is accepted"));
    let Some(value) = fields.get(name) else { return Ok(None) };
    count_visited(value.len());
    serde_json::from_slice::<Option<T>>(value).map_err(wrong)
}

/// Refuses a field that is missing, or whose first byte is none of `starts`.
fn require(fields: &ScannedJson, name: &str, accepted: &str, starts: &[u8]) -> Result<(), ApiError> {
    match fields.get(name).and_then(|raw| raw.first()) {
        Some(first) if starts.contains(first) => Ok(()),
        Some(_) => Err(ApiError::invalid_field(name, format!("{accepted} is accepted"))),
        None => Err(ApiError::invalid_field(name, format!("{accepted} is required"))),
    }
}

/// Refuses media parts with an id. vLLM keeps media by these ids, without a salt: a part with an id and no data gets
/// what another tenant has sent under it.
pub(crate) fn refuse_media_ids(fields: &ScannedJson) -> Result<(), ApiError> {
    let has_id = |list: &str| fields.read::<Vec<&RawValue>>(list).into_iter().flatten().any(has_media_id);
    match ["messages", "input"].into_iter().find(|list| fields.names_media_id(list) && has_id(list)) {
        Some(list) => Err(ApiError::invalid_field(
            list,
            "content parts without a uuid are accepted, because tenants share engines here",
        )),
        None => Ok(()),
    }
}

/// Returns whether a part of a message's content has an id. What cannot be read counts as having one: the engine may
/// read it otherwise.
fn has_media_id(message: &RawValue) -> bool {
    #[derive(Deserialize)]
    struct MessageContent<'a> {
        #[serde(borrow)]
        content: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct PartId {
        uuid: Option<IgnoredAny>,
    }
    if !message.get().starts_with('{') {
        return false;
    }
    let Ok(MessageContent { content }) = serde_json::from_str(message.get()) else { return true };
    let Some(parts) = content.filter(|content| content.get().starts_with('[')) else { return false };
    let Ok(parts) = serde_json::from_str::<Vec<&RawValue>>(parts.get()) else { return true };
    parts
        .iter()
        .filter(|part| part.get().starts_with('{'))
        .any(|part| serde_json::from_str::<PartId>(part.get()).map_or(true, |part| part.uuid.is_some()))
}

fn wants_usage(endpoint: GenerationEndpoint, fields: &ScannedJson) -> Result<bool, ApiError> {
    if matches!(endpoint, GenerationEndpoint::Messages | GenerationEndpoint::Responses) {
        // Streams of these endpoints always end with the usage.
        return Ok(true);
    }
    #[derive(Deserialize)]
    struct StreamOptions {
        include_usage: Option<bool>,
    }
    let options: Option<StreamOptions> = read(fields, "stream_options", "an object with include_usage")?;
    Ok(options.and_then(|options| options.include_usage).unwrap_or(false))
}

fn answer_tokens(endpoint: GenerationEndpoint, fields: &ScannedJson) -> Result<Option<Tokens>, ApiError> {
    let bound = |name| read::<u64>(fields, name, "a positive integer");
    let tokens = match endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Completions => {
            bound("max_completion_tokens")?.or(bound("max_tokens")?)
        }
        GenerationEndpoint::Messages => bound("max_tokens")?,
        GenerationEndpoint::Responses => bound("max_output_tokens")?,
    };
    Ok(tokens.map(Tokens))
}

fn transfer_bar(fields: &ScannedJson) -> Result<Option<RequestTransferBlocker>, ApiError> {
    let choices = read::<u64>(fields, "n", "a positive integer")?.unwrap_or(1);
    let tried = fields.read::<u64>("best_of").unwrap_or(1);
    let beams = fields.read::<bool>("use_beam_search").unwrap_or(false);
    let echo = read::<bool>(fields, "echo", "true or false")?.unwrap_or(false);
    let batch = fields.get("prompt").is_some_and(is_batch);
    Ok(if choices > 1 || tried > 1 || beams || batch {
        Some(RequestTransferBlocker::SeveralChoices)
    } else if echo || fields.has("prompt_logprobs") {
        Some(RequestTransferBlocker::PromptLogprobs)
    } else {
        None
    })
}

/// Whether a completion's prompt is a batch: an array whose elements are not token ids.
fn is_batch(prompt: &[u8]) -> bool {
    let inside = prompt.strip_prefix(b"[").map(<[u8]>::trim_ascii_start);
    inside.and_then(<[u8]>::first).is_some_and(|first| matches!(first, b'"' | b'['))
}

/// Returns the session's name in the body, the most trusted field first: cache key, session parameters, metadata.
/// Fields of unexpected types are ignored.
fn session_key_in_body(fields: &ScannedJson) -> Option<String> {
    #[derive(Deserialize)]
    struct SessionIdField {
        session_id: Option<String>,
    }
    let inside = |name| fields.read::<SessionIdField>(name)?.session_id;
    fields.read("prompt_cache_key").or_else(|| inside("session_params")).or_else(|| inside("metadata"))
}

#[cfg(test)]
mod tests;
