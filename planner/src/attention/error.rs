//! Errors in a model's description, with messages that say what to write instead.

/// Why a `config.json` or an attention file yields no specification. The fault of the file; a retry does not help.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpecError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object: {0}")]
    NotAnObject(String),
    /// The file is longer than any valid description.
    #[error("config.json has {found} bytes, accepted are up to {accepted}")]
    TooLong {
        /// Size of the file in bytes.
        found: usize,
        /// Largest accepted size in bytes.
        accepted: usize,
    },
    /// A model family whose KV state is unknown.
    #[error(
        "model_type is {found}; accepted: {accepted}; describe any other model in a file (models.NAME.attention_file)"
    )]
    UnknownFamily {
        /// Value in the file.
        found: String,
        /// All known families.
        accepted: String,
    },
    /// A field is missing, has another type, or is out of bounds.
    #[error("{field} is {found}; accepted: {accepted}")]
    Field {
        /// Name of the field, with its section.
        field: String,
        /// Value of the field, shortened.
        found: String,
        /// Accepted values.
        accepted: String,
    },
}

impl SpecError {
    pub(super) fn field(field: &str, found: impl std::fmt::Display, accepted: impl Into<String>) -> Self {
        Self::Field { field: field.to_owned(), found: shortened(&found.to_string()), accepted: accepted.into() }
    }
}

/// Returns the beginning of a text from an untrusted file.
pub(super) fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 48;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
