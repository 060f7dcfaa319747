//! Locates the messages of a chat body so that the new ones can be read without the rest.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;
use strum::{AsRefStr, EnumString, VariantArray};

/// Maximum number of system messages before the first other one.
const MAX_LEADING_SYSTEM_MESSAGES: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum MessageRole {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl MessageRole {
    /// Returns whether this is a role that may open a conversation.
    pub(crate) fn is_system(self) -> bool {
        matches!(self, Self::System | Self::Developer)
    }
}

/// Whether a user has asked a question, and whether it has been answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum QuestionState {
    #[default]
    Never,
    Open,
    Answered,
}

impl QuestionState {
    /// Returns the state after one more message, which has no tool calls.
    pub(crate) fn after(self, role: MessageRole) -> Self {
        match (role, self) {
            (MessageRole::User, _) => Self::Open,
            (MessageRole::Assistant, Self::Open) => Self::Answered,
            _ => self,
        }
    }
}

/// Position and properties of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ScannedMessage {
    pub(crate) role: MessageRole,
    pub(crate) end: usize,
    /// Whether the message is only one text, so that a placeholder can replace its content.
    pub(crate) is_plain: bool,
    /// Whether the message has tool calls.
    pub(crate) calls_tools: bool,
}

/// Messages of a body from an offset on.
#[derive(Debug)]
pub(crate) struct MessageScan {
    pub(crate) start: usize,
    pub(crate) messages: Vec<ScannedMessage>,
    /// Offset after the closing bracket of the message list.
    pub(crate) end: usize,
}

#[derive(Deserialize)]
struct MessagesField<'a> {
    #[serde(borrow)]
    messages: &'a RawValue,
}

#[derive(Deserialize)]
struct RawMessage<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    content: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
    name: Option<IgnoredAny>,
}

/// A string; borrowed unless it contains escapes.
#[derive(Deserialize)]
struct MessageText<'a>(#[serde(borrow)] Cow<'a, str>);

impl MessageScan {
    /// Scans all messages of a body that is known to be valid. Returns `None` if a message is of an unusual kind or a
    /// user's text contains a literal that the template searches for (`heeds`).
    pub(crate) fn of_body(body: &[u8], heeds: &[Box<str>]) -> Option<Self> {
        let whole: MessagesField<'_> = serde_json::from_slice(body).ok()?;
        let list = whole.messages.get();
        let start = list.as_ptr() as usize - body.as_ptr() as usize + 1;
        list.starts_with('[').then(|| Self::from_offset(body, start, heeds)).flatten()
    }

    /// Scans the messages after `start`, which is after the list's opening bracket or after a message.
    pub(crate) fn from_offset(body: &[u8], start: usize, heeds: &[Box<str>]) -> Option<Self> {
        let mut at = start;
        let mut messages = Vec::new();
        loop {
            let byte = next_token_byte(body, &mut at)?;
            match byte {
                b']' => return Some(Self { start, messages, end: at + 1 }),
                b',' if at > start || is_after_message(body, start) => at += 1,
                b'{' if messages.is_empty() && !is_after_message(body, start) => {}
                _ => return None,
            }
            next_token_byte(body, &mut at)?;
            let mut items = serde_json::Deserializer::from_slice(&body[at..]).into_iter::<RawMessage<'_>>();
            let message = items.next()?.ok()?;
            at += items.byte_offset();
            messages.push(ScannedMessage::of(&message, at, heeds)?);
        }
    }

    /// Returns the roles of the leading system messages, or `None` if there are too many.
    pub(crate) fn leading_roles(&self) -> Option<Box<[MessageRole]>> {
        let roles = self.messages.iter().map(|message| message.role);
        let leads: Box<[MessageRole]> = roles.take_while(|role| role.is_system()).collect();
        (leads.len() <= MAX_LEADING_SYSTEM_MESSAGES).then_some(leads)
    }

    /// Returns whether a system message follows the first other one. The first `leads` messages are skipped.
    pub(crate) fn has_late_system(&self, leads: usize) -> bool {
        self.messages.iter().skip(leads).any(|message| message.role.is_system())
    }

    /// Returns the question state before message `at`, given the state before the scan.
    pub(crate) fn question_state(&self, at: usize, before: QuestionState) -> QuestionState {
        self.messages[..at]
            .iter()
            .filter(|message| !message.calls_tools)
            .fold(before, |asked, message| asked.after(message.role))
    }

    pub(crate) fn last_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == MessageRole::User)
    }
}

impl ScannedMessage {
    fn of(brief: &RawMessage<'_>, end: usize, heeds: &[Box<str>]) -> Option<Self> {
        let role = brief.role.parse::<MessageRole>().ok()?;
        let content = brief.content.map_or("", RawValue::get);
        let is_text = is_nonempty_text(content) || is_single_text_part(content);
        if role == MessageRole::User && contains_any(content, heeds) {
            return None;
        }
        let plain = is_text && brief.tool_calls.is_none() && brief.name.is_none();
        let calls = brief.tool_calls.is_some_and(|calls| calls.get() != "[]");
        Some(Self { role, end, is_plain: plain, calls_tools: calls })
    }
}

/// Returns whether this is a non-empty string.
fn is_nonempty_text(json: &str) -> bool {
    json.starts_with('"') && json.len() > 2
}

/// Returns whether this is a list of one text part, which templates see as plain text.
fn is_single_text_part(content: &str) -> bool {
    #[derive(Deserialize)]
    struct ContentPart<'a> {
        #[serde(borrow)]
        r#type: Cow<'a, str>,
        text: &'a RawValue,
    }
    let part = || serde_json::from_str::<[ContentPart<'_>; 1]>(content).ok();
    let is_text = |part: &ContentPart<'_>| matches!(&*part.r#type, "text" | "input_text" | "output_text");
    content.starts_with('[') && part().is_some_and(|[part]| is_text(&part) && is_nonempty_text(part.text.get()))
}

/// Returns whether the content contains one of the words, so that a template may not treat it as a user's question.
fn contains_any(content: &str, words: &[Box<str>]) -> bool {
    let says = |text: &str| words.iter().any(|word| text.contains(&**word));
    match content.as_bytes().first() {
        _ if words.is_empty() => false,
        Some(b'"') => serde_json::from_str::<MessageText<'_>>(content).is_ok_and(|text| says(&text.0)),
        _ => serde_json::from_str(content).is_ok_and(|parts| any_string(&parts, &says)),
    }
}

fn any_string(value: &Value, says: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => says(text),
        Value::Array(list) => list.iter().any(|item| any_string(item, says)),
        Value::Object(fields) => fields.values().any(|field| any_string(field, says)),
        _ => false,
    }
}

fn is_after_message(body: &[u8], start: usize) -> bool {
    start > 0 && body[start - 1] == b'}'
}

/// Advances `at` to the next byte that is not white space and returns it.
fn next_token_byte(body: &[u8], at: &mut usize) -> Option<u8> {
    let rest = body.get(*at..)?;
    let skipped = rest.iter().position(|byte| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r'))?;
    *at += skipped;
    Some(rest[skipped])
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &str = r#" {"model":"m", "messages" : [ {"role":"system","content":"s"} ,
        {"content":"[{\"role\": \"user\"}]","role":"user"},{"role":"assistant","content":"","tool_calls":[{"x":1}]},
        {"role":"tool","content":"t","tool_call_id":"c"},{"role":"assistant","content":"a","tool_calls":[]} ] ,"n":1}"#;

    fn of(messages: &str) -> Option<MessageScan> {
        MessageScan::of_body(format!(r#"{{"messages":[{messages}]}}"#).as_bytes(), &["<tool_response>".into()])
    }

    #[test]
    fn messages_are_located_despite_surrounding_content() {
        let scan = MessageScan::of_body(BODY.as_bytes(), &[]).unwrap();
        let roles: Vec<MessageRole> = scan.messages.iter().map(|message| message.role).collect();
        assert_eq!(
            roles,
            [MessageRole::System, MessageRole::User, MessageRole::Assistant, MessageRole::Tool, MessageRole::Assistant]
        );
        assert!(BODY[..scan.start].ends_with("\"messages\" : ["));
        assert_eq!(&BODY[scan.end..], " ,\"n\":1}");
        assert!(scan.messages.iter().all(|message| BODY[..message.end].ends_with('}')));
        assert_eq!((scan.leading_roles().unwrap().len(), scan.last_user()), (1, Some(1)));
        assert_eq!(
            scan.messages.iter().map(|message| message.calls_tools).collect::<Vec<_>>(),
            [false, false, true, false, false]
        );
        assert_eq!(
            scan.messages.iter().map(|message| message.is_plain).collect::<Vec<_>>(),
            [true, true, false, true, false]
        );
    }

    #[test]
    fn scan_continues_after_any_message() {
        let whole = MessageScan::of_body(BODY.as_bytes(), &[]).unwrap();
        for (n, message) in whole.messages.iter().enumerate() {
            let rest = MessageScan::from_offset(BODY.as_bytes(), message.end, &[]).unwrap();
            assert_eq!((&rest.messages[..], rest.end), (&whole.messages[n + 1..], whole.end));
        }
        assert!(MessageScan::from_offset(BODY.as_bytes(), 3, &[]).is_none());
    }

    #[test]
    fn unusual_messages_are_not_scanned() {
        assert!(of(r#"{"role":"user","content":"hi"}"#).is_some());
        assert!(of(r#"{"role":"tool","content":"<tool_response>"}"#).is_some(), "only users are taken for tools");
        assert!(of("").unwrap().messages.is_empty());
        for odd in [
            r#"{"role":"narrator","content":"hi"}"#,
            r#"{"content":"hi"}"#,
            r#"{"role":"user","role":"user","content":"hi"}"#,
            r#"{"role":"user","content":" <tool_response>\nhi"}"#,
            r#"{"role":"user","content":"[INST]\u003ctool_response> and more"}"#,
            r#"{"role":"user","content":[{"type":"text","text":"<tool_response\u003e"}]}"#,
            r#"{"role":"user","content":"hi"},"#,
            r#"{"role":"user","content":"hi"}{"role":"user","content":"hi"}"#,
            "7",
        ] {
            assert!(of(odd).is_none(), "{odd}");
        }
        let leads = [r#"{"role":"system","content":"s"}"#; MAX_LEADING_SYSTEM_MESSAGES + 1].join(",");
        assert!(of(&leads).unwrap().leading_roles().is_none());
    }

    #[test]
    fn system_message_after_another_role_is_late() {
        let (system, user) = (r#"{"role":"system","content":"s"}"#, r#"{"role":"user","content":"u"}"#);
        let late = |messages: &[&str]| {
            of(&messages.join(",")).map(|scan| scan.has_late_system(scan.leading_roles().unwrap().len()))
        };
        assert_eq!(late(&[system, system, user]), Some(false));
        assert_eq!(late(&[system, user, system]), Some(true));
        assert_eq!(late(&[user, user]), Some(false));
    }

    #[test]
    fn messages_with_names_several_parts_or_no_text_are_not_plain() {
        let plain =
            |content: &str| of(&format!(r#"{{"role":"user","content":{content}}}"#)).unwrap().messages[0].is_plain;
        let part = r#"{"type":"text","text":"x","cache_control":{}}"#;
        let two = format!("[{part},{part}]");
        for content in [
            r#""""#,
            "null",
            "[]",
            &two,
            r#""x","name":"n""#,
            r#"[{"type":"text","text":""}]"#,
            r#"[{"type":"image_url","text":"x"}]"#,
            r#"[{"type":"text"}]"#,
            r#"["x"]"#,
        ] {
            assert!(!plain(content), "{content}");
        }
        assert!(plain(r#""x""#) && plain(&format!("[ {part} ]")) && plain(r#"[{"type":"input_text","text":"x"}]"#));
    }

    #[test]
    fn tool_calls_do_not_count_as_answers() {
        let scan = MessageScan::of_body(BODY.as_bytes(), &[]).unwrap();
        let asked: Vec<QuestionState> = (0..=5).map(|at| scan.question_state(at, QuestionState::Never)).collect();
        assert_eq!(
            asked,
            [
                QuestionState::Never,
                QuestionState::Never,
                QuestionState::Open,
                QuestionState::Open,
                QuestionState::Open,
                QuestionState::Answered
            ]
        );
        assert_eq!(scan.question_state(2, QuestionState::Answered), QuestionState::Open);
    }
}
