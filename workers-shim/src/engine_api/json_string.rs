//! JSON strings that are read without a copy.

use std::borrow::Cow;
use std::fmt;
use std::ops::Deref;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// A JSON string, borrowed unless it has escapes. (An `Option<Cow<str>>` would always be copied: serde borrows a `Cow`
/// only where it is the whole type of a field.)
#[derive(serde::Deserialize)]
pub struct JsonString<'a>(#[serde(borrow)] pub Cow<'a, str>);

impl Deref for JsonString<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

/// Length of a JSON string in bytes, its escapes resolved.
#[derive(Clone, Copy, Default)]
pub(super) struct StringLength(pub(super) usize);

impl<'de> Deserialize<'de> for StringLength {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Length;
        impl Visitor<'_> for Length {
            type Value = StringLength;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<StringLength, E> {
                Ok(StringLength(text.len()))
            }
        }
        deserializer.deserialize_str(Length)
    }
}
