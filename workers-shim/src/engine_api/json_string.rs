//! JSON strings that are read without a copy.

use std::borrow::Cow;
use std::ops::Deref;

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
