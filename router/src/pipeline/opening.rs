//! How a conversation began, for clients that name no session: what stays the same in all its steps.

use bytes::Bytes;
use prefix::{Asked, ChatForm, Converted, Prompt};
use serde::Deserialize;
use serde_json::value::RawValue;
use vocabulary::{Blocks, SessionId};
use workers_shim::dialect::{JsonFields, Splice};

use super::identify::Prefixed;
use super::parse::Request;
use crate::incoming::Endpoint;

/// Bytes of a completion's prompt that count as its opening.
const PROMPT_OPENING: usize = 1024;

/// A stand-in session by the opening: the messages up to the first user's, or the start of the prompt.
///
/// It serves for what must be stable over a conversation's steps without asking the ledger: the rollout share and the
/// pinning of the bypass. Conversations that begin alike share it.
pub fn opening(request: &Request) -> SessionId {
    let field = |name| request.body.fields().get(name).and_then(|raw| std::str::from_utf8(raw).ok());
    let text = match request.endpoint {
        Endpoint::ChatCompletions | Endpoint::Messages => field("messages").and_then(first_messages),
        Endpoint::Completions => field("prompt").map(start_of_prompt),
        Endpoint::Responses => field("input").and_then(|input| first_messages(input).or(Some(start_of_prompt(input)))),
    };
    let opening = format!("opening {}", text.unwrap_or_default());
    SessionId::of_key(&request.incoming.tenant, &request.model, &opening)
}

/// Blocks of the prompt that tools and the messages before the first user's fill. Many conversations begin with them,
/// so that sharing no more than these makes nobody's fork. Renders and tokenizes them anew: for rare cases only. `chat`
/// is what the engine makes of a request in another endpoint's words.
pub fn preamble(prefixed: &Prefixed, chat: Option<&Converted>) -> Blocks {
    preamble_prompt(prefixed, chat).map_or(Blocks::ZERO, |opening| {
        let ids = &prefixed.prompt.chain.ids;
        Blocks(opening.chain.ids.iter().zip(ids).take_while(|(a, b)| a == b).count() as u64)
    })
}

fn preamble_prompt(prefixed: &Prefixed, chat: Option<&Converted>) -> Option<Prompt> {
    let request = &prefixed.request;
    let identifier = &prefixed.model.identifier;
    let chat = match (request.endpoint.form()?, chat) {
        (ChatForm::Chat, _) => None,
        (_, chat) => Some(JsonFields::scan(Bytes::copy_from_slice(chat?.body()), &[]).ok()?),
    };
    let fields = chat.as_ref().unwrap_or(request.body.fields());
    let before = fields.get("messages").and_then(|raw| std::str::from_utf8(raw).ok()).and_then(before_user)?;
    let mut splice = Splice::new(fields);
    splice.set("messages", format!("[{before}]").into_bytes());
    splice.set("add_generation_prompt", b"false".as_slice());
    splice.remove("continue_final_message");
    let keys = prefixed.model.keys(request.cache_salt());
    Some(identifier.chat(&splice.finish(), Asked { keys, now: prefixed.now }))
}

/// The text of the messages before the first user's; none when there are none.
fn before_user(messages: &str) -> Option<&str> {
    span(messages, each(messages).take_while(|message| !is_user(message)))
}

fn is_user(message: &RawValue) -> bool {
    let role = serde_json::from_str::<Role<'_>>(message.get()).ok().and_then(|message| message.role);
    role.is_some_and(|role| role.get() == r#""user""#)
}

#[derive(Deserialize)]
struct Role<'a> {
    #[serde(borrow)]
    role: Option<&'a RawValue>,
}

fn first_messages(messages: &str) -> Option<&str> {
    let mut met = false;
    span(messages, each(messages).take_while(|message| !std::mem::replace(&mut met, is_user(message))))
}

/// The text from the first of these messages to the last.
fn span<'a>(messages: &'a str, mut those: impl Iterator<Item = &'a RawValue>) -> Option<&'a str> {
    let first = those.next()?;
    let last = those.last().unwrap_or(first);
    messages.get(offset(messages, first.get())..offset(messages, last.get()) + last.get().len())
}

/// The messages of a list, read one by one: most are never asked for.
fn each(list: &str) -> impl Iterator<Item = &RawValue> {
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
    &prompt[..prompt.floor_char_boundary(PROMPT_OPENING)]
}

/// Where `part`, a piece of `whole`, begins in it.
fn offset(whole: &str, part: &str) -> usize {
    part.as_ptr() as usize - whole.as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_opening_ends_with_the_first_user_message() {
        let one = r#"[{"role":"system","content":"s"}, {"content":"u","role":"user"}]"#;
        let more = one.replace("}]", r#"},{"role":"assistant","content":"a"},{"role":"user","content":"v"}]"#);
        assert_eq!(first_messages(one), first_messages(&more));
        assert!(first_messages(one).unwrap().ends_with(r#""role":"user"}"#));
        assert_ne!(first_messages(one), first_messages(&one.replace("\"u\"", "\"w\"")));
    }

    #[test]
    fn a_conversation_without_a_user_opens_with_all_its_messages() {
        assert_eq!(first_messages(r#"[{"role":"tool"},7]"#), Some(r#"{"role":"tool"},7"#));
        assert_eq!(first_messages("[]"), None);
    }

    #[test]
    fn the_preamble_ends_before_the_first_user() {
        let all = r#"[{"role":"system","content":"s"}, {"role":"developer"},{"content":"u","role":"user"},{"role":"system"}]"#;
        assert_eq!(before_user(all), Some(r#"{"role":"system","content":"s"}, {"role":"developer"}"#));
        assert_eq!(before_user(r#"[{"role":"user"}]"#), None);
        assert_eq!(before_user("[]"), None);
    }

    #[test]
    fn a_completion_opens_with_the_start_of_its_prompt() {
        assert_eq!(start_of_prompt(&format!("\"{}\"", "é".repeat(2000))).len(), 1023);
        assert_eq!(start_of_prompt("[1,2]"), "[1,2]");
    }
}
