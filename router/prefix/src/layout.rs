//! Where the messages lie in a chat body, and what else in it decides its prompt: what does not (the bound of the answer,
//! whether it streams) may change from step to step, and fields may stand in any order.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use xxhash_rust::xxh3::Xxh3;

use crate::chat::CallOrder;
use crate::converted::ChatForm;

/// The fields of a body that its prompt depends on, beside its messages and what the root of its chain is made of.
const DECIDES: [&str; 9] = [
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

/// A chat body that has been walked over.
#[derive(Clone, Copy, Debug)]
pub struct ChatLayout<'a> {
    pub(crate) body: &'a [u8],
    /// After the opening of the list of messages.
    start: usize,
    /// Digest of the other fields that decide the prompt.
    pub(crate) others: u128,
    /// In which the template is shown the fields of calls.
    pub(crate) order: CallOrder,
}

impl<'a> ChatLayout<'a> {
    /// Of a body with these fields, in their order: names, and where values lie. None where there is no one list of
    /// messages.
    pub fn new<'n>(body: &'a [u8], fields: impl Iterator<Item = (Cow<'n, str>, Range<usize>)>) -> Option<Self> {
        let mut others = Xxh3::new();
        let mut messages = None;
        for (name, value) in fields {
            if name == "messages" {
                let before = messages.replace(value);
                if before.is_some() {
                    return None;
                }
            } else if DECIDES.contains(&&*name) {
                let value = body.get(value)?;
                others.update(name.as_bytes());
                others.update(&(value.len() as u64).to_le_bytes());
                others.update(value);
            }
        }
        let list = messages?;
        let start = body.get(list.clone())?.starts_with(b"[").then_some(list.start + 1)?;
        Some(Self { body, start, others: others.digest128(), order: CallOrder::default() })
    }

    /// Of a body that was made of another one, with nothing after its messages, which begin at `start`: all that
    /// stands before them decides.
    pub(crate) fn converted(form: ChatForm, body: &'a [u8], start: usize) -> Self {
        let mut others = Xxh3::new();
        others.update(&[form as u8]);
        others.update(&body[..start]);
        Self { body, start, others: others.digest128(), order: form.call_order() }
    }

    /// Walks over a body.
    pub fn read(body: &'a [u8]) -> Option<Self> {
        let fields = serde_json::Deserializer::from_slice(body).deserialize_map(Fields(body)).ok()?;
        Self::new(body, fields.into_iter())
    }

    /// From its first message to the end of the body.
    pub(crate) fn list(&self) -> &'a [u8] {
        &self.body[self.start..]
    }

    /// Up to a place in the list.
    pub(crate) fn head(&self, end: usize) -> Option<&'a [u8]> {
        self.body.get(..self.start + end)
    }
}

struct Fields<'a>(&'a [u8]);

impl<'a> Visitor<'a> for Fields<'a> {
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
        let layout = ChatLayout::read(body.as_bytes())?;
        Some((String::from_utf8(layout.list().to_vec()).unwrap(), layout.others))
    }

    #[test]
    fn what_decides_nothing_may_change_and_stand_anywhere() {
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
    fn one_list_of_messages_is_needed() {
        for none in ["{}", "[]", "", r#"{"messages":1}"#, r#"{"messages":[],"messages":[]}"#, r#"{"messages":[]"#] {
            assert!(ChatLayout::read(none.as_bytes()).is_none(), "{none}");
        }
        let outside = [("messages".into(), 3..99)];
        assert!(ChatLayout::new(b"{}", outside.into_iter()).is_none());
    }

    /// Stops at the names of a struct's fields.
    struct Names<'a>(&'a mut Vec<&'static str>);

    impl<'de> serde::Deserializer<'de> for Names<'_> {
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
    fn every_field_that_a_prompt_is_made_of_decides() {
        let mut read = Vec::new();
        ChatBody::deserialize(Names(&mut read)).unwrap_err();
        read.retain(|name| *name != "messages");
        read.sort_unstable();
        let mut decides = DECIDES.to_vec();
        decides.sort_unstable();
        assert_eq!(read, decides);
    }
}
