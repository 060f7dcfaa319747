//! A strict look at a JSON object that keeps nothing but where its fields stand. What JSON is, `serde_json` says.

use std::ops::Range;

use serde::Deserializer as _;
use serde::de::{Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;

/// How deep values may nest.
pub(super) const DEEPEST: usize = 128;

/// Why a body is not the JSON object that it must be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum JsonError {
    /// Not UTF-8.
    #[error("byte {offset} is not UTF-8")]
    NotUtf8 {
        /// Where.
        offset: usize,
    },
    /// Something stands where it may not, or is missing.
    #[error("byte {offset}: {why}")]
    Syntax {
        /// Where.
        offset: usize,
        /// What may stand there.
        why: String,
    },
    /// Values nested too deep.
    #[error("byte {offset}: nested deeper than {DEEPEST} levels")]
    TooDeep {
        /// Where.
        offset: usize,
    },
    /// A field that decides something stands twice; engines and routers could read different ones.
    #[error("the field {name:?} stands twice")]
    Duplicate {
        /// Which.
        name: String,
    },
    /// More fields than any request has.
    #[error("more than {most} fields")]
    TooManyFields {
        /// How many are accepted.
        most: usize,
    },
}

/// A field as it stands in the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Field {
    /// The name without its quotes, escapes and all.
    pub(super) name: Range<usize>,
    pub(super) value: Range<usize>,
}

/// The fields of the object that is the whole text, in their order.
pub(super) fn fields(bytes: &[u8], most: usize) -> Result<Vec<Field>, JsonError> {
    let text = std::str::from_utf8(bytes).map_err(|error| JsonError::NotUtf8 { offset: error.valid_up_to() })?;
    if let Some(offset) = too_deep(bytes) {
        return Err(JsonError::TooDeep { offset });
    }
    let (mut reader, mut fields) = (serde_json::Deserializer::from_str(text), Vec::with_capacity(24));
    let read = reader.deserialize_map(Fields { text, most, fields: &mut fields }).and_then(|()| reader.end());
    if fields.len() > most {
        return Err(JsonError::TooManyFields { most });
    }
    read.map(|()| fields).map_err(|error| {
        let before: usize = text.split_inclusive('\n').take(error.line().saturating_sub(1)).map(str::len).sum();
        let why = error.to_string().split(" at line ").next().unwrap_or_default().to_owned();
        JsonError::Syntax { offset: before + error.column().saturating_sub(1), why }
    })
}

struct Fields<'a, 'f> {
    text: &'a str,
    most: usize,
    fields: &'f mut Vec<Field>,
}

impl<'a> Visitor<'a> for Fields<'a, '_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<(), A::Error> {
        let place = |raw: &RawValue| {
            let start = raw.get().as_ptr() as usize - self.text.as_ptr() as usize;
            start..start + raw.get().len()
        };
        while let Some((name, value)) = map.next_entry::<&RawValue, &RawValue>()? {
            let name = place(name);
            self.fields.push(Field { name: name.start + 1..name.end - 1, value: place(value) });
            if self.fields.len() > self.most {
                return Err(A::Error::custom("too many fields"));
            }
        }
        Ok(())
    }
}

/// Where values nest too deep; of text that is no JSON it may tell anything. `serde_json` steps over values of any depth.
fn too_deep(text: &[u8]) -> Option<usize> {
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => loop {
                at += 1 + memchr::memchr2(b'"', b'\\', text.get(at + 1..)?)?;
                if text[at] == b'"' {
                    break;
                }
                at += 1;
            },
            b'{' | b'[' if depth == DEEPEST => return Some(at),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests;
