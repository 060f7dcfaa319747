//! Canonical bytes of a request: the substitute for token ids that cannot be predicted.
//!
//! The bytes are append-stable: if a conversation only grew, so did its canonical bytes. The fields that a template
//! renders first (tools, documents, template arguments) come first, each message follows on its own line, and nothing
//! closes the list. Lines cannot contain line feeds: JSON escapes them in strings, and other insignificant white
//! space is removed. Strings are copied as sent, with their escapes.

use std::borrow::Cow;
use std::ops::Range;

use memchr::{memchr, memchr2};
use vocabulary::count_visited;

use crate::chat_body_layout::field_spans;

/// Fields before the conversation, in the order of the canonical bytes.
const HEAD_FIELDS: [&str; 6] =
    ["tools", "documents", "chat_template", "chat_template_kwargs", "system", "instructions"];
const MESSAGES: usize = HEAD_FIELDS.len();
const INPUT: usize = MESSAGES + 1;
const PROMPT: usize = INPUT + 1;

/// Returns the canonical bytes of a request, truncated to `limit` bytes.
pub(crate) fn canonical_bytes(body: &[u8], limit: usize) -> Vec<u8> {
    let fields = field_spans(body).and_then(|fields| CanonicalFields::find(body, fields.into_iter()));
    fields.map_or_else(|| verbatim(body, limit), |fields| fields.canonical(body, &FieldLayout::unknown, limit).0)
}

/// What a scan of the body knows of the white space in one of its fields.
#[derive(Clone, Copy, Default, Debug)]
pub struct FieldLayout<'a> {
    /// Whether no white space stands between the value's tokens, so that the value is copied as it is.
    pub is_compact: bool,
    /// Offsets in the body after the elements of a list, if no white space stands between the tokens up to the last.
    pub element_ends: Option<&'a [u32]>,
}

impl FieldLayout<'_> {
    /// Returns the layout of a field of which nothing is known: it is read.
    pub fn unknown(_: &str) -> Self {
        Self::default()
    }
}

/// The layout of each field, by its name.
pub type LayoutOf<'f, 'a> = &'f dyn Fn(&str) -> FieldLayout<'a>;

/// Positions of the fields of a body that determine its prompt; those that are absent or null have none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CanonicalFields([Option<Range<usize>>; PROMPT + 1]);

impl CanonicalFields {
    /// Finds them among the top-level fields. Returns `None` where a field occurs twice: only the engine knows what that
    /// means, but equal bytes mean the same.
    pub(crate) fn find<'n>(body: &[u8], fields: impl Iterator<Item = (Cow<'n, str>, Range<usize>)>) -> Option<Self> {
        let mut values = [const { None }; PROMPT + 1];
        for (name, range) in fields {
            let place = match &*name {
                "messages" => MESSAGES,
                "input" => INPUT,
                "prompt" => PROMPT,
                name => match HEAD_FIELDS.iter().position(|head| *head == name) {
                    Some(place) => place,
                    None => continue,
                },
            };
            if values[place].is_some() {
                return None;
            }
            values[place] = Some(range);
        }
        let is_set = |range: &Range<usize>| body.get(range.clone()).is_some_and(|value| value != b"null");
        Some(Self(values.map(|value| value.filter(is_set))))
    }

    fn value<'a>(&self, place: usize, body: &'a [u8]) -> Option<&'a [u8]> {
        body.get(self.0[place].clone()?)
    }

    /// Returns the field with the conversation.
    fn conversation(&self) -> Option<&Range<usize>> {
        self.0[MESSAGES].as_ref().or(self.0[INPUT].as_ref())
    }

    /// Returns the ends of the conversation's messages after `offset`, if they are known.
    fn message_ends<'a>(&self, layout: LayoutOf<'_, 'a>, offset: usize) -> Option<&'a [u32]> {
        let ends = layout(if self.0[MESSAGES].is_some() { "messages" } else { "input" }).element_ends?;
        Some(&ends[ends.partition_point(|end| *end as usize <= offset)..])
    }

    /// Returns whether the canonical bytes of `body` begin like those of `known`, up to the last message of `known`:
    /// both bodies must have the same bytes up to `end`, the end of that message.
    pub(crate) fn continues(&self, body: &[u8], (known_fields, known): (&Self, &[u8]), end: usize) -> bool {
        let lists = (self.conversation(), known_fields.conversation());
        let is_same_list = matches!(lists, (Some(list), Some(before))
            if list.start == before.start && (list.start..list.end).contains(&end) && body.get(list.start) == Some(&b'['));
        // What stands before `end` in both bodies is equal.
        let is_same_place = |place: usize| {
            let (new, before) = (&self.0[place], &known_fields.0[place]);
            new == before && new.as_ref().is_none_or(|value| value.end <= end)
        };
        is_same_list
            && (0..HEAD_FIELDS.len())
                .all(|place| is_same_place(place) || self.is_same_value(place, body, (known_fields, known)))
    }

    fn is_same_value(&self, place: usize, body: &[u8], (known_fields, known): (&Self, &[u8])) -> bool {
        let value = self.value(place, body);
        count_visited(value.map_or(0, <[u8]>::len));
        value == known_fields.value(place, known)
    }

    /// Returns the canonical bytes, truncated to `limit` bytes, and how many of them there are up to the end of the last
    /// message; `None` where there is no list of messages, or they were truncated.
    pub(crate) fn canonical(&self, body: &[u8], layout: LayoutOf<'_, '_>, limit: usize) -> (Vec<u8>, Option<usize>) {
        let mut out = Vec::with_capacity(body.len().min(limit));
        for (place, name) in HEAD_FIELDS.iter().enumerate() {
            if let Some(value) = self.value(place, body) {
                line(name, (value, layout(name).is_compact), &mut out);
            }
        }
        let mut end = None;
        if let Some((list, value)) = self.conversation().and_then(|list| Some((list, body.get(list.clone())?))) {
            end = match self.message_ends(layout, list.start) {
                _ if !value.starts_with(b"[") => {
                    line("messages", (value, false), &mut out);
                    None
                }
                Some(ends) if !ends.is_empty() => known_elements(body, (list.start + 1, ends), (&mut out, limit)),
                _ => elements(&value[1..], &mut out, limit),
            };
        }
        self.finish(body, (out, end), limit)
    }

    /// Returns the canonical bytes from those in `out` on, which are of the messages that end at `end` in the body.
    pub(crate) fn canonical_after(
        &self,
        body: &[u8],
        (mut out, end): (Vec<u8>, usize),
        (layout, limit): (LayoutOf<'_, '_>, usize),
    ) -> (Vec<u8>, Option<usize>) {
        let rest = self.conversation().and_then(|list| body.get(end..list.end)).unwrap_or_default();
        let end = match self.message_ends(layout, end) {
            Some([]) => {
                let end = out.len();
                out.push(b'\n');
                Some(end)
            }
            // The line of the last known message ends, unless there is no room for another one.
            Some(ends) => {
                out.push(b'\n');
                if out.len() < limit { known_elements(body, (end + 1, ends), (&mut out, limit)) } else { None }
            }
            None => elements_after(rest, &mut out, limit),
        };
        self.finish(body, (out, end), limit)
    }

    fn finish(&self, body: &[u8], (mut out, end): (Vec<u8>, Option<usize>), limit: usize) -> (Vec<u8>, Option<usize>) {
        if let Some(prompt) = self.value(PROMPT, body).filter(|_| out.len() < limit) {
            out.extend_from_slice(b"prompt:");
            // The closing quote is dropped so that a longer text extends a shorter one.
            compact(prompt.strip_suffix(b"\"").unwrap_or(prompt), &mut out);
        }
        let is_whole = out.len() <= limit;
        out.truncate(limit);
        (out, end.filter(|_| is_whole))
    }
}

/// Returns the beginning of a body that is not an object, or has a field twice.
fn verbatim(body: &[u8], limit: usize) -> Vec<u8> {
    body[..body.len().min(limit)].to_vec()
}

fn line(name: &str, (json, is_compact): (&[u8], bool), out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    out.push(b':');
    match is_compact {
        true => out.extend_from_slice(json),
        false => compact(json, out),
    }
    out.push(b'\n');
}

/// Implements [`elements`] for a list without white space, whose elements begin at `start` and end at `ends`, without
/// reading it.
fn known_elements(
    body: &[u8],
    (mut start, ends): (usize, &[u32]),
    (out, limit): (&mut Vec<u8>, usize),
) -> Option<usize> {
    for (index, end) in ends.iter().enumerate() {
        if index > 0 {
            out.push(b'\n');
            if out.len() >= limit {
                return None;
            }
        }
        out.push(b':');
        out.extend_from_slice(body.get(start..*end as usize)?);
        // After the comma.
        start = *end as usize + 1;
    }
    let end = out.len();
    out.push(b'\n');
    Some(end)
}

/// Writes each element of a list as a line, until `out` has `limit` bytes. `list` begins after the opening bracket.
/// Returns the length of `out` at the end of the last element; `None` where there is none, or not all were written.
fn elements(list: &[u8], out: &mut Vec<u8>, limit: usize) -> Option<usize> {
    elements_from(list, false, (out, limit))
}

/// Implements [`elements`] for the rest of a list after an element whose line has no end yet.
fn elements_after(list: &[u8], out: &mut Vec<u8>, limit: usize) -> Option<usize> {
    elements_from(list, true, (out, limit))
}

fn elements_from(list: &[u8], mut is_inside: bool, (out, limit): (&mut Vec<u8>, usize)) -> Option<usize> {
    count_visited(list.len());
    let (mut rest, mut depth) = (list, 0_usize);
    while let Some((&byte, after)) = rest.split_first() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => {
                rest = after;
                continue;
            }
            b']' if depth == 0 => break,
            b',' if depth == 0 => {
                out.push(b'\n');
                is_inside = false;
                if out.len() >= limit {
                    return None;
                }
                rest = after;
                continue;
            }
            _ => {}
        }
        if !is_inside {
            out.push(b':');
            is_inside = true;
        }
        let length = match byte {
            b'"' => string_length(rest),
            b'[' | b'{' => {
                depth += 1;
                1
            }
            b']' | b'}' => {
                depth -= 1;
                1
            }
            _ => 1 + after.iter().position(|byte| b"\"[]{}, \t\n\r".contains(byte)).unwrap_or(after.len()),
        };
        out.extend_from_slice(&rest[..length]);
        rest = &rest[length..];
    }
    let end = out.len();
    if is_inside {
        out.push(b'\n');
    }
    is_inside.then_some(end)
}

/// Copies valid JSON without the insignificant white space.
fn compact(json: &[u8], out: &mut Vec<u8>) {
    count_visited(json.len());
    let mut rest = json;
    while !rest.is_empty() {
        let (between, string) = rest.split_at(memchr(b'"', rest).unwrap_or(rest.len()));
        out.extend(between.iter().filter(|byte| !byte.is_ascii_whitespace()));
        let (string, after) = string.split_at(string_length(string));
        out.extend_from_slice(string);
        rest = after;
    }
}

/// Returns the length of the string at the beginning, quotes included; of an unfinished one all of it.
fn string_length(json: &[u8]) -> usize {
    let mut at = 1;
    while let Some(found) = json.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) {
        at += found + 1;
        match json[at - 1] {
            b'"' => return at,
            // The escaped character.
            _ => at += 1,
        }
    }
    json.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::value::RawValue;

    use super::*;

    fn bytes(body: &str) -> String {
        String::from_utf8(canonical_bytes(body.as_bytes(), 10_000)).unwrap()
    }

    #[test]
    fn canonical_bytes_ignore_white_space_and_unrelated_fields() {
        let plain = bytes(r#"{"model":"m","messages":[{"role":"user","content":" a  b "}],"temperature":1}"#);
        let airy = bytes("{ \"messages\" : [ {\n\"role\": \"user\",\t\"content\": \" a  b \" } ] }");
        assert_eq!(plain, airy);
        assert_eq!(plain, ":{\"role\":\"user\",\"content\":\" a  b \"}\n");
    }

    #[test]
    fn extending_a_conversation_extends_its_canonical_bytes() {
        let short = bytes(r#"{"messages":[{"content":"]}\""}],"tools":[{"a":1}]}"#);
        let long = bytes(r#"{"tools":[{"a":1}],"messages":[{"content":"]}\""},{"content":"x"}]}"#);
        assert!(long.starts_with(&short), "{short} {long}");
        assert!(short.starts_with("tools:[{\"a\":1}]\n"));
    }

    #[test]
    fn extending_a_text_prompt_extends_its_canonical_bytes() {
        let short = bytes(r#"{"prompt":"once upon"}"#);
        assert!(bytes(r#"{"prompt":"once upon a time"}"#).starts_with(&short));
        assert_eq!(bytes(r#"{"prompt": [1, 2]}"#), "prompt:[1,2]");
    }

    #[test]
    fn quoted_and_escaped_strings_keep_their_spaces() {
        assert_eq!(bytes(r#"{"prompt":"a \" b \\"}"#), r#"prompt:"a \" b \\"#);
        assert_eq!(bytes(r#"{"messages":[{"a \\":" \\\" "} ,1]}"#), ":{\"a \\\\\":\" \\\\\\\" \"}\n:1\n");
    }

    #[test]
    fn white_space_is_removed_as_byte_by_byte() {
        let by_bytes = |json: &str| {
            let (mut in_string, mut escaped, mut out) = (false, false, Vec::new());
            for &byte in json.as_bytes() {
                if in_string {
                    in_string = escaped || byte != b'"';
                    escaped = !escaped && byte == b'\\';
                } else if byte.is_ascii_whitespace() {
                    continue;
                } else {
                    in_string = byte == b'"';
                }
                out.push(byte);
            }
            out
        };
        let parts = ["\"", "\\", " ", "\n", "a", "é", "{", ":", "\\\"", "\\\\"];
        for mut number in 0..parts.len().pow(5) {
            let mut text = String::new();
            for _ in 0..5 {
                text.push_str(parts[number % parts.len()]);
                number /= parts.len();
            }
            let mut out = Vec::new();
            compact(text.as_bytes(), &mut out);
            assert_eq!(out, by_bytes(&text), "{text:?}");
        }
    }

    fn any_json() -> impl Strategy<Value = String> {
        let space = "[ \t\n\r]{0,2}";
        let leaf = prop_oneof![
            "[a-z \\[\\]{},:]{0,6}".prop_map(|text| format!("\"{text}\"")),
            "(\\\\\"|\\\\\\\\|[,\\]} ]){0,4}".prop_map(|text| format!("\"{text}\"")),
            Just("null".to_owned()),
            (0..1000_u32).prop_map(|number| number.to_string()),
        ];
        (leaf, space, space).prop_map(|(leaf, before, after)| format!("{before}{leaf}{after}")).prop_recursive(
            4,
            24,
            4,
            |inner| {
                let list = prop::collection::vec(inner.clone(), 0..4).prop_map(|list| format!("[{}]", list.join(",")));
                let named = inner.prop_map(|value| format!(" \"a]\" :{value}"));
                let object = prop::collection::vec(named, 0..4).prop_map(|fields| format!("{{{}}} ", fields.join(",")));
                prop_oneof![list, object]
            },
        )
    }

    proptest! {
        #[test]
        fn each_element_of_a_list_is_a_line(values in prop::collection::vec(any_json(), 0..5)) {
            let list = format!("[ {}\n]", values.join(","));
            let mut expected = Vec::new();
            for element in serde_json::from_str::<Vec<&RawValue>>(&list).unwrap() {
                line("", (element.get().as_bytes(), false), &mut expected);
            }
            let mut out = Vec::new();
            elements(&list.as_bytes()[1..], &mut out, usize::MAX);
            prop_assert_eq!(String::from_utf8(out), String::from_utf8(expected));
        }
    }

    proptest! {
        #[test]
        fn known_ends_of_messages_give_the_same_bytes_at_each_limit(
            contents in prop::collection::vec("[a-z \\[\\]{},:]{0,12}", 1..6),
            tools in prop_oneof![Just("null"), Just("[1,[2]]")],
            known in 0..6_usize,
        ) {
            let messages: Vec<String> = contents.iter().map(|text| format!("{{\"content\":\"{text}\"}}")).collect();
            let start = "{\"messages\":[".len();
            let ends: Vec<u32> = messages
                .iter()
                .scan(start, |end, message| {
                    *end += message.len() + 1;
                    Some(*end as u32 - 1)
                })
                .collect();
            let body = format!("{{\"messages\":[{}],\"tools\":{tools},\"prompt\":\"p\"}}", messages.join(","));
            let body = body.as_bytes();
            let fields = CanonicalFields::find(body, field_spans(body).unwrap().into_iter()).unwrap();
            let layout = |_: &str| FieldLayout { is_compact: true, element_ends: Some(&ends) };
            let whole = fields.canonical(body, &FieldLayout::unknown, usize::MAX).0;
            // The bytes up to the end of a known message, where the next body goes on.
            let known = known.min(ends.len() - 1);
            let until = whole.windows(2).enumerate().filter(|(_, pair)| pair[0] == b'\n' && pair[1] == b':');
            let tail_ends: Vec<usize> = until.map(|(at, _)| at).chain([whole.len() - "\nprompt:\"p".len()]).collect();
            let tail = &whole[..tail_ends[known + usize::from(tools != "null")]];
            for limit in 0..whole.len() + 2 {
                prop_assert_eq!(
                    fields.canonical(body, &layout, limit),
                    fields.canonical(body, &FieldLayout::unknown, limit)
                );
                let end = ends[known] as usize;
                prop_assert_eq!(
                    fields.canonical_after(body, (tail.to_vec(), end), (&layout, limit)),
                    fields.canonical_after(body, (tail.to_vec(), end), (&FieldLayout::unknown, limit))
                );
            }
        }
    }

    #[test]
    fn system_and_input_fields_of_all_endpoints_are_canonicalized() {
        let messages = bytes(r#"{"messages":[{"role":"user","content":"a"}],"system":"s"}"#);
        assert_eq!(messages, "system:\"s\"\n:{\"role\":\"user\",\"content\":\"a\"}\n");
        let responses = bytes(r#"{"input":[{"role":"user"}],"instructions":"s"}"#);
        assert_eq!(responses, "instructions:\"s\"\n:{\"role\":\"user\"}\n");
        assert_eq!(bytes(r#"{"input":"once"}"#), "messages:\"once\"\n");
    }

    #[test]
    fn null_fields_count_as_absent() {
        assert_eq!(bytes(r#"{"tools":null,"prompt":"a"}"#), "prompt:\"a");
    }

    #[test]
    fn invalid_json_is_returned_verbatim() {
        for body in ["", "{", "[1]", "nonsense", "{\"messages\":1,\"messages\":2}"] {
            assert_eq!(bytes(body), body);
        }
        assert_eq!(canonical_bytes(b"\xff\xfe", 10), b"\xff\xfe");
    }

    #[test]
    fn lone_surrogates_are_preserved() {
        assert_eq!(bytes(r#"{"prompt":"\ud800x"}"#), r#"prompt:"\ud800x"#);
    }

    #[test]
    fn byte_limit_applies_to_json_and_other_bodies() {
        let body = format!("{{\"messages\":[{}]}}", vec!["\"0123456789\""; 50].join(","));
        assert_eq!(canonical_bytes(body.as_bytes(), 100).len(), 100);
        assert_eq!(canonical_bytes(&[b'x'; 500], 100).len(), 100);
    }
}
