//! Byte ranges of the messages in a chat body, and a digest of the other fields that determine its prompt.
//!
//! Fields that do not affect the prompt (such as `max_tokens` and `stream`) may change between steps, and fields may
//! be in any order.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use vocabulary::count_visited;
use xxhash_rust::xxh3::Xxh3;

use crate::chat::{CallFieldOrder, ChatEndpoint};

/// Body fields that the prompt depends on, besides the messages and the fields that are part of the chain's root.
const PROMPT_FIELDS: [&str; 9] = [
    "tools",
    "documents",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "truncate_prompt_tokens",
];

/// Layout of a chat body: position of its message list and digest of its settings.
#[derive(Clone, Copy, Debug)]
pub struct ChatBodyLayout<'a> {
    pub(crate) body: &'a [u8],
    /// Offset after the opening bracket of the message list.
    list_start: usize,
    /// Digest of the other fields that determine the prompt.
    pub(crate) settings_digest: u128,
    /// Order in which the template sees the fields of tool calls.
    pub(crate) call_order: CallFieldOrder,
}

impl<'a> ChatBodyLayout<'a> {
    /// Builds the layout from the body's fields, in order: their names and the byte ranges of their values. Returns
    /// `None` unless there is exactly one message list.
    pub fn new<'n>(body: &'a [u8], fields: impl Iterator<Item = (Cow<'n, str>, Range<usize>)>) -> Option<Self> {
        let mut others = Xxh3::new();
        let mut messages = None;
        for (name, value) in fields {
            if name == "messages" {
                let before = messages.replace(value);
                if before.is_some() {
                    return None;
                }
            } else if PROMPT_FIELDS.contains(&&*name) {
                let value = body.get(value)?;
                others.update(name.as_bytes());
                others.update(&(value.len() as u64).to_le_bytes());
                others.update(value);
            }
        }
        let list = messages?;
        let start = body.get(list.clone())?.starts_with(b"[").then_some(list.start + 1)?;
        Some(Self {
            body,
            list_start: start,
            settings_digest: others.digest128(),
            call_order: CallFieldOrder::default(),
        })
    }

    /// Builds the layout of a converted body, whose messages begin at `list_start` and end it. Everything before
    /// them determines the prompt.
    pub(crate) fn converted(endpoint: ChatEndpoint, body: &'a [u8], list_start: usize) -> Self {
        let mut others = Xxh3::new();
        others.update(&[endpoint as u8]);
        others.update(&body[..list_start]);
        Self { body, list_start, settings_digest: others.digest128(), call_order: endpoint.call_order() }
    }

    /// Parses a body's top-level fields. Returns `None` if it is not a JSON object with one message list.
    pub fn read(body: &'a [u8]) -> Option<Self> {
        Self::new(body, field_spans(body)?.into_iter())
    }

    /// Returns the bytes from the first message to the end of the body.
    pub(crate) fn message_list(&self) -> &'a [u8] {
        &self.body[self.list_start..]
    }

    /// Returns the body up to an offset in the message list.
    pub(crate) fn body_up_to(&self, end: usize) -> Option<&'a [u8]> {
        self.body.get(..self.list_start + end)
    }
}

/// Returns the top-level fields of a body, in order: their names and the byte ranges of their values. Returns `None` if
/// it is not a JSON object.
pub(crate) fn field_spans(body: &[u8]) -> Option<Vec<(Cow<'_, str>, Range<usize>)>> {
    count_visited(body.len());
    let mut reader = serde_json::Deserializer::from_slice(body);
    let fields = reader.deserialize_map(FieldSpanVisitor(body)).ok()?;
    reader.end().ok()?;
    Some(fields)
}

struct FieldSpanVisitor<'a>(&'a [u8]);

impl<'a> Visitor<'a> for FieldSpanVisitor<'a> {
    type Value = Vec<(Cow<'a, str>, Range<usize>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut fields = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value::<&RawValue>()?.get();
            let start = value.as_ptr() as usize - self.0.as_ptr() as usize;
            fields.push((Cow::Owned(name), start..start + value.len()));
        }
        map.next_key::<IgnoredAny>()?;
        Ok(fields)
    }
}

#[cfg(test)]
mod tests {
    use serde::de::Deserialize;
    use serde::forward_to_deserialize_any;

    use super::*;
    use crate::ChatBody;

    fn of(body: &str) -> Option<(String, u128)> {
        let layout = ChatBodyLayout::read(body.as_bytes())?;
        Some((String::from_utf8(layout.message_list().to_vec()).unwrap(), layout.settings_digest))
    }

    #[test]
    fn prompt_irrelevant_fields_do_not_change_the_digest() {
        let plain = of(r#"{"messages":[{}],"tools":[1]}"#).unwrap();
        assert_eq!(plain.0, r#"{}],"tools":[1]}"#);
        for same in [
            r#"{"model":"m","messages":[{}],"tools":[1]}"#,
            r#" { "tools" : [1] , "messages" : [{}], "max_tokens" : 7 } "#,
            r#"{"stream":true,"to\u006fls":[1],"m\u0065ssages":[{}]}"#,
        ] {
            assert_eq!(of(same).unwrap().1, plain.1, "{same}");
        }
        for other in [
            r#"{"messages":[{}]}"#,
            r#"{"messages":[{}],"tools":[1 ]}"#,
            r#"{"messages":[{}],"tools":[1],"tools":[1]}"#,
            r#"{"messages":[{}],"tools":[1],"add_generation_prompt":true}"#,
        ] {
            assert_ne!(of(other).unwrap().1, plain.1, "{other}");
        }
    }

    #[test]
    fn layout_requires_exactly_one_message_list() {
        let followed = r#"{"messages":[]}{"messages":[]}"#;
        for none in
            ["{}", "[]", "", r#"{"messages":1}"#, r#"{"messages":[],"messages":[]}"#, r#"{"messages":[]"#, followed]
        {
            assert!(ChatBodyLayout::read(none.as_bytes()).is_none(), "{none}");
        }
        let outside = [("messages".into(), 3..99)];
        assert!(ChatBodyLayout::new(b"{}", outside.into_iter()).is_none());
    }

    /// Serde deserializer that only collects the names of a struct's fields.
    struct FieldNameDeserializer<'a>(&'a mut Vec<&'static str>);

    impl<'de> serde::Deserializer<'de> for FieldNameDeserializer<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(serde::de::Error::custom("no struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Self::Error> {
            self.0.extend(fields);
            self.deserialize_any(visitor)
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    #[test]
    fn every_prompt_field_is_part_of_the_digest() {
        let mut read = Vec::new();
        ChatBody::deserialize(FieldNameDeserializer(&mut read)).unwrap_err();
        read.retain(|name| *name != "messages");
        read.sort_unstable();
        let mut decides = PROMPT_FIELDS.to_vec();
        decides.sort_unstable();
        assert_eq!(read, decides);
    }
}
