//! Canonical bytes of a request: the substitute for token ids that cannot be predicted.
//!
//! The bytes are append-stable: if a conversation only grew, so did its canonical bytes. The fields that a template
//! renders first (tools, documents, template arguments) come first, each message follows on its own line, and nothing
//! closes the list. Lines cannot contain line feeds: JSON escapes them in strings, and other insignificant white
//! space is removed. Strings are copied as sent, with their escapes.

use memchr::{memchr, memchr2};
use serde::Deserialize;
use serde_json::value::RawValue;

/// Fields that determine the prompt of a request of any endpoint, as unparsed JSON.
#[derive(Deserialize)]
struct RawBody<'a> {
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    documents: Option<&'a RawValue>,
    chat_template: Option<&'a RawValue>,
    chat_template_kwargs: Option<&'a RawValue>,
    system: Option<&'a RawValue>,
    instructions: Option<&'a RawValue>,
    input: Option<&'a RawValue>,
    messages: Option<&'a RawValue>,
    prompt: Option<&'a RawValue>,
}

/// Returns the canonical bytes of a request, truncated to `limit` bytes.
pub(crate) fn canonical_bytes(body: &[u8], limit: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(body.len().min(limit));
    let is_object = body.trim_ascii_start().starts_with(b"{");
    match serde_json::from_slice::<RawBody<'_>>(body) {
        Ok(raw) if is_object => raw.write(&mut out, limit),
        // Not an object, or a duplicate field: only the engine knows what it means, but equal bytes mean the same.
        _ => out.extend_from_slice(&body[..body.len().min(limit)]),
    }
    out.truncate(limit);
    out
}

impl RawBody<'_> {
    fn write(&self, out: &mut Vec<u8>, limit: usize) {
        let head = [
            ("tools", self.tools),
            ("documents", self.documents),
            ("chat_template", self.chat_template),
            ("chat_template_kwargs", self.chat_template_kwargs),
            ("system", self.system),
            ("instructions", self.instructions),
        ];
        for (name, value) in head {
            if let Some(value) = value {
                line(name, value.get(), out);
            }
        }
        let list = self.messages.or(self.input).map(|raw| (raw, serde_json::from_str::<Vec<&RawValue>>(raw.get())));
        match list {
            Some((_, Ok(messages))) => {
                for message in messages {
                    if out.len() >= limit {
                        return;
                    }
                    line("", message.get(), out);
                }
            }
            Some((raw, Err(_))) => line("messages", raw.get(), out),
            None => {}
        }
        if let Some(prompt) = self.prompt {
            out.extend_from_slice(b"prompt:");
            // The closing quote is dropped so that a longer text extends a shorter one.
            compact(prompt.get().strip_suffix('"').unwrap_or(prompt.get()), out);
        }
    }
}

fn line(name: &str, json: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(name.as_bytes());
    out.push(b':');
    compact(json, out);
    out.push(b'\n');
}

/// Copies valid JSON without the insignificant white space.
fn compact(json: &str, out: &mut Vec<u8>) {
    let mut rest = json.as_bytes();
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
            compact(&text, &mut out);
            assert_eq!(out, by_bytes(&text), "{text:?}");
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
