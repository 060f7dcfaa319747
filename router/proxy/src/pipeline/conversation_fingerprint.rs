//! Conversation fingerprint: a stable id for clients that name no session, derived from how the conversation began.

use bytes::Bytes;
use prefix::{ChatEndpoint, ConvertedRequest, ExtraPromptInputs, Prompt};
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{Blocks, SessionId};
use workers_shim::engine_api::{JsonSplice, ScannedJson};
use xxhash_rust::xxh3::xxh3_128;

use crate::client_request::GenerationEndpoint;
use crate::identified_request::{IdentifiedRequest, ParsedRequest};

/// Bytes of a completion's prompt that enter its fingerprint.
const FINGERPRINT_BYTES: usize = 1024;

/// Returns a substitute session id, derived from the messages up to the first user message or from the start of the
/// prompt.
///
/// It is used where a value must be stable over a conversation's steps without a ledger lookup: the rollout share and
/// the affinity of the fallback policy. Conversations with the same beginning share it.
pub fn conversation_fingerprint(request: &ParsedRequest) -> SessionId {
    let field = |name| request.body.scanned_json().get(name).and_then(|raw| std::str::from_utf8(raw).ok());
    let text = match request.endpoint {
        GenerationEndpoint::ChatCompletions | GenerationEndpoint::Messages => {
            field("messages").and_then(first_messages)
        }
        GenerationEndpoint::Completions => field("prompt").map(start_of_prompt),
        GenerationEndpoint::Responses => {
            field("input").and_then(|input| first_messages(input).or(Some(start_of_prompt(input))))
        }
    };
    // Hashed by itself, because it may be as long as the body.
    let opening = format!("opening {:032x}", xxh3_128(text.unwrap_or_default().as_bytes()));
    SessionId::of_key(&request.incoming.tenant, &request.model, &opening)
}

/// Number of prompt blocks that tools and the messages before the first user message fill. Many conversations share
/// them, so a prompt that shares no more than these is not a fork. Renders and tokenizes these messages again, so it is
/// for rare cases only. `converted` is the request of another endpoint as the engine converts it.
pub fn shared_prefix_blocks(identified: &IdentifiedRequest, converted: Option<&ConvertedRequest>) -> Blocks {
    shared_prefix_prompt(identified, converted).map_or(Blocks::ZERO, |opening| {
        let ids = &identified.prompt.chain.ids;
        Blocks(opening.chain.ids.iter().zip(ids).take_while(|(a, b)| a == b).count() as u64)
    })
}

fn shared_prefix_prompt(identified: &IdentifiedRequest, converted: Option<&ConvertedRequest>) -> Option<Prompt> {
    let request = &identified.request;
    let identifier = &identified.model.identifier;
    let converted = match (request.endpoint.chat_form()?, converted) {
        (ChatEndpoint::Chat, _) => None,
        (_, converted) => Some(ScannedJson::scan(Bytes::copy_from_slice(converted?.body()), &[]).ok()?),
    };
    let fields = converted.as_ref().unwrap_or(request.body.scanned_json());
    let before = fields.get("messages").and_then(|raw| std::str::from_utf8(raw).ok()).and_then(text_before_user)?;
    let mut splice = JsonSplice::new(fields);
    splice.set("messages", format!("[{before}]").into_bytes());
    splice.set("add_generation_prompt", b"false".as_slice());
    splice.remove("continue_final_message");
    let keys = identified.model.root_keys(request.cache_salt());
    Some(identifier.resolve_chat(&splice.finish(), ExtraPromptInputs { keys, now: identified.wall_time }))
}

/// Returns the text of the messages before the first user message; `None` when there are none.
fn text_before_user(messages: &str) -> Option<&str> {
    span(messages, raw_messages(messages).take_while(|message| !is_user(message)))
}

fn is_user(message: &RawValue) -> bool {
    let role = serde_json::from_str::<RoleField<'_>>(message.get()).ok().and_then(|message| message.role);
    role.is_some_and(|role| role.get() == r#""user""#)
}

#[derive(Deserialize)]
struct RoleField<'a> {
    #[serde(borrow)]
    role: Option<&'a RawValue>,
}

fn first_messages(messages: &str) -> Option<&str> {
    let mut met = false;
    span(messages, raw_messages(messages).take_while(|message| !std::mem::replace(&mut met, is_user(message))))
}

/// Returns the text from the first to the last of these messages.
fn span<'a>(messages: &'a str, mut those: impl Iterator<Item = &'a RawValue>) -> Option<&'a str> {
    let first = those.next()?;
    let last = those.last().unwrap_or(first);
    messages.get(offset_in(messages, first.get())..offset_in(messages, last.get()) + last.get().len())
}

/// Iterates over the messages of a JSON list lazily: most are never needed.
fn raw_messages(list: &str) -> impl Iterator<Item = &RawValue> {
    let mut rest = list.trim_start().strip_prefix('[').unwrap_or_default();
    std::iter::from_fn(move || {
        let mut items = serde_json::Deserializer::from_str(rest).into_iter::<&RawValue>();
        let item = items.next()?.ok()?;
        let after = rest[items.byte_offset()..].trim_start();
        rest = after.strip_prefix(',').unwrap_or_default();
        Some(item)
    })
}

fn start_of_prompt(prompt: &str) -> &str {
    &prompt[..prompt.floor_char_boundary(FINGERPRINT_BYTES)]
}

/// Returns the byte offset of `part` in `whole`, of which it is a slice.
fn offset_in(whole: &str, part: &str) -> usize {
    part.as_ptr() as usize - whole.as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fingerprint_ends_after_the_first_user_message() {
        let one = r#"[{"role":"system","content":"s"}, {"content":"u","role":"user"}]"#;
        let more = one.replace("}]", r#"},{"role":"assistant","content":"a"},{"role":"user","content":"v"}]"#);
        assert_eq!(first_messages(one), first_messages(&more));
        assert!(first_messages(one).unwrap().ends_with(r#""role":"user"}"#));
        assert_ne!(first_messages(one), first_messages(&one.replace("\"u\"", "\"w\"")));
    }

    #[test]
    fn a_conversation_without_a_user_fingerprints_all_messages() {
        assert_eq!(first_messages(r#"[{"role":"tool"},7]"#), Some(r#"{"role":"tool"},7"#));
        assert_eq!(first_messages("[]"), None);
    }

    #[test]
    fn the_shared_prefix_ends_before_the_first_user_message() {
        let all = r#"[{"role":"system","content":"s"}, {"role":"developer"},{"content":"u","role":"user"},{"role":"system"}]"#;
        assert_eq!(text_before_user(all), Some(r#"{"role":"system","content":"s"}, {"role":"developer"}"#));
        assert_eq!(text_before_user(r#"[{"role":"user"}]"#), None);
        assert_eq!(text_before_user("[]"), None);
    }

    #[test]
    fn a_completion_fingerprints_the_start_of_its_prompt() {
        assert_eq!(start_of_prompt(&format!("\"{}\"", "é".repeat(2000))).len(), 1023);
        assert_eq!(start_of_prompt("[1,2]"), "[1,2]");
    }
}
