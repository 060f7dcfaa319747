//! Where the messages of a chat body lie, so that what is new in it can be read without the rest.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;
use strum::{AsRefStr, EnumString, VariantArray};

/// System messages that may stand before the first other one.
const MOST_LEADS: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, AsRefStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// Of those that a conversation may open with.
    pub(crate) fn leads(self) -> bool {
        matches!(self, Self::System | Self::Developer)
    }
}

/// Whether a user has asked, and has been answered since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Asked {
    #[default]
    Never,
    Open,
    Answered,
}

impl Asked {
    /// After one more message, which calls no tools.
    pub(crate) fn then(self, role: Role) -> Self {
        match (role, self) {
            (Role::User, _) => Self::Open,
            (Role::Assistant, Self::Open) => Self::Answered,
            _ => self,
        }
    }
}

/// One message of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) role: Role,
    pub(crate) end: usize,
    /// Whether it is nothing but one text, so that another text may stand for it.
    pub(crate) plain: bool,
    /// Whether it calls tools.
    pub(crate) calls: bool,
}

/// The messages of a body from some place on.
#[derive(Debug)]
pub(crate) struct Scan {
    pub(crate) start: usize,
    pub(crate) messages: Vec<Place>,
    /// Where the list of all messages has been closed.
    pub(crate) end: usize,
}

#[derive(Deserialize)]
struct Whole<'a> {
    #[serde(borrow)]
    messages: &'a RawValue,
}

#[derive(Deserialize)]
struct Brief<'a> {
    #[serde(borrow)]
    role: Cow<'a, str>,
    content: Option<&'a RawValue>,
    tool_calls: Option<&'a RawValue>,
    name: Option<IgnoredAny>,
}

/// A text; borrowed unless it holds escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

impl Scan {
    /// All messages of a body that has been read before. None where one of them is of no common kind, or a user says
    /// one of the words that the template `heeds`.
    pub(crate) fn whole(body: &[u8], heeds: &[Box<str>]) -> Option<Self> {
        let whole: Whole<'_> = serde_json::from_slice(body).ok()?;
        let list = whole.messages.get();
        let start = list.as_ptr() as usize - body.as_ptr() as usize + 1;
        list.starts_with('[').then(|| Self::from(body, start, heeds)).flatten()
    }

    /// The messages after `start`, which lies after the opening of their list or after one of them.
    pub(crate) fn from(body: &[u8], start: usize, heeds: &[Box<str>]) -> Option<Self> {
        let mut at = start;
        let mut messages = Vec::new();
        loop {
            let byte = next(body, &mut at)?;
            match byte {
                b']' => return Some(Self { start, messages, end: at + 1 }),
                b',' if at > start || is_after_message(body, start) => at += 1,
                b'{' if messages.is_empty() && !is_after_message(body, start) => {}
                _ => return None,
            }
            next(body, &mut at)?;
            let mut items = serde_json::Deserializer::from_slice(&body[at..]).into_iter::<Brief<'_>>();
            let message = items.next()?.ok()?;
            at += items.byte_offset();
            messages.push(Place::of(&message, at, heeds)?);
        }
    }

    /// The roles of the system messages that it opens with. None when there are too many.
    pub(crate) fn leads(&self) -> Option<Box<[Role]>> {
        let roles = self.messages.iter().map(|message| message.role);
        let leads: Box<[Role]> = roles.take_while(|role| role.leads()).collect();
        (leads.len() <= MOST_LEADS).then_some(leads)
    }

    /// Whether a system message stands after the first other one. `leads` are those that may.
    pub(crate) fn has_late_system(&self, leads: usize) -> bool {
        self.messages.iter().skip(leads).any(|message| message.role.leads())
    }

    /// What the messages before one of them come to, after those that came before the scan.
    pub(crate) fn asked(&self, at: usize, before: Asked) -> Asked {
        self.messages[..at]
            .iter()
            .filter(|message| !message.calls)
            .fold(before, |asked, message| asked.then(message.role))
    }

    pub(crate) fn last_user(&self) -> Option<usize> {
        self.messages.iter().rposition(|message| message.role == Role::User)
    }
}

impl Place {
    fn of(brief: &Brief<'_>, end: usize, heeds: &[Box<str>]) -> Option<Self> {
        let role = brief.role.parse::<Role>().ok()?;
        let content = brief.content.map_or("", RawValue::get);
        let is_text = is_some_text(content) || is_one_part(content);
        if role == Role::User && says_any(content, heeds) {
            return None;
        }
        let plain = is_text && brief.tool_calls.is_none() && brief.name.is_none();
        let calls = brief.tool_calls.is_some_and(|calls| calls.get() != "[]");
        Some(Self { role, end, plain, calls })
    }
}

/// Whether it is a text that says something.
fn is_some_text(json: &str) -> bool {
    json.starts_with('"') && json.len() > 2
}

/// Whether it is a list of one text: templates are shown it as the text itself.
fn is_one_part(content: &str) -> bool {
    #[derive(Deserialize)]
    struct Part<'a> {
        #[serde(borrow)]
        r#type: Cow<'a, str>,
        text: &'a RawValue,
    }
    let part = || serde_json::from_str::<[Part<'_>; 1]>(content).ok();
    let is_text = |part: &Part<'_>| matches!(&*part.r#type, "text" | "input_text" | "output_text");
    content.starts_with('[') && part().is_some_and(|[part]| is_text(&part) && is_some_text(part.text.get()))
}

/// Whether a template may take this for something else than a user's question.
fn says_any(content: &str, words: &[Box<str>]) -> bool {
    let says = |text: &str| words.iter().any(|word| text.contains(&**word));
    match content.as_bytes().first() {
        _ if words.is_empty() => false,
        Some(b'"') => serde_json::from_str::<Text<'_>>(content).is_ok_and(|text| says(&text.0)),
        _ => serde_json::from_str(content).is_ok_and(|parts| any_text(&parts, &says)),
    }
}

fn any_text(value: &Value, says: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => says(text),
        Value::Array(list) => list.iter().any(|item| any_text(item, says)),
        Value::Object(fields) => fields.values().any(|field| any_text(field, says)),
        _ => false,
    }
}

fn is_after_message(body: &[u8], start: usize) -> bool {
    start > 0 && body[start - 1] == b'}'
}

/// The next byte that is no white space; `at` becomes its place.
fn next(body: &[u8], at: &mut usize) -> Option<u8> {
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

    fn of(messages: &str) -> Option<Scan> {
        Scan::whole(format!(r#"{{"messages":[{messages}]}}"#).as_bytes(), &["<tool_response>".into()])
    }

    #[test]
    fn messages_are_found_with_their_ends_whatever_stands_in_and_around_them() {
        let scan = Scan::whole(BODY.as_bytes(), &[]).unwrap();
        let roles: Vec<Role> = scan.messages.iter().map(|message| message.role).collect();
        assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::Tool, Role::Assistant]);
        assert!(BODY[..scan.start].ends_with("\"messages\" : ["));
        assert_eq!(&BODY[scan.end..], " ,\"n\":1}");
        assert!(scan.messages.iter().all(|message| BODY[..message.end].ends_with('}')));
        assert_eq!((scan.leads().unwrap().len(), scan.last_user()), (1, Some(1)));
        assert_eq!(
            scan.messages.iter().map(|message| message.calls).collect::<Vec<_>>(),
            [false, false, true, false, false]
        );
        assert_eq!(
            scan.messages.iter().map(|message| message.plain).collect::<Vec<_>>(),
            [true, true, false, true, false]
        );
    }

    #[test]
    fn the_rest_is_found_from_the_end_of_any_message() {
        let whole = Scan::whole(BODY.as_bytes(), &[]).unwrap();
        for (n, message) in whole.messages.iter().enumerate() {
            let rest = Scan::from(BODY.as_bytes(), message.end, &[]).unwrap();
            assert_eq!((&rest.messages[..], rest.end), (&whole.messages[n + 1..], whole.end));
        }
        assert!(Scan::from(BODY.as_bytes(), 3, &[]).is_none());
    }

    #[test]
    fn what_is_no_common_message_is_not_scanned() {
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
        let leads = [r#"{"role":"system","content":"s"}"#; MOST_LEADS + 1].join(",");
        assert!(of(&leads).unwrap().leads().is_none());
    }

    #[test]
    fn a_system_message_after_the_first_other_one_is_late() {
        let (system, user) = (r#"{"role":"system","content":"s"}"#, r#"{"role":"user","content":"u"}"#);
        let late =
            |messages: &[&str]| of(&messages.join(",")).map(|scan| scan.has_late_system(scan.leads().unwrap().len()));
        assert_eq!(late(&[system, system, user]), Some(false));
        assert_eq!(late(&[system, user, system]), Some(true));
        assert_eq!(late(&[user, user]), Some(false));
    }

    #[test]
    fn a_name_several_parts_and_no_text_are_not_plain() {
        let plain = |content: &str| of(&format!(r#"{{"role":"user","content":{content}}}"#)).unwrap().messages[0].plain;
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
    fn calls_do_not_answer() {
        let scan = Scan::whole(BODY.as_bytes(), &[]).unwrap();
        let asked: Vec<Asked> = (0..=5).map(|at| scan.asked(at, Asked::Never)).collect();
        assert_eq!(asked, [Asked::Never, Asked::Never, Asked::Open, Asked::Open, Asked::Open, Asked::Answered]);
        assert_eq!(scan.asked(2, Asked::Answered), Asked::Open);
    }
}
