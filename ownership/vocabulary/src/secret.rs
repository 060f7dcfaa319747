//! Passwords, tokens and keys.

use std::sync::Arc;

use serde::Deserialize;

/// A text that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Arc<str>);

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum RawSecret {
            Text(Arc<str>),
            Other(serde::de::IgnoredAny),
        }
        match RawSecret::deserialize(deserializer)? {
            RawSecret::Text(text) => Ok(Self(text)),
            // Serde's own message would quote the value.
            RawSecret::Other(_) => Err(serde::de::Error::custom("accepted is a text, in quotes")),
        }
    }
}

/// Least length of a secret from which keys are derived, in characters.
const MIN_CHARACTERS: usize = 16;

impl Secret {
    /// Returns the text itself; only for sending it.
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Returns whether it is too short to derive keys from: fewer than 16 characters.
    pub fn is_short(&self) -> bool {
        self.0.chars().count() < MIN_CHARACTERS
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(secret)")
    }
}
