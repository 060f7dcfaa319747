//! What is wrong with a model's description, in words that say what to write instead.

/// Why a `config.json` or an attention file gives no specification. The file's fault; a retry does not help.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpecError {
    /// Not JSON, or not an object.
    #[error("config.json is not a JSON object: {0}")]
    NotAnObject(String),
    /// The file is longer than any model's description.
    #[error("config.json has {found} bytes, accepted are up to {accepted}")]
    TooLong {
        /// Its bytes.
        found: usize,
        /// The most that are read.
        accepted: usize,
    },
    /// A family whose state is not known here.
    #[error("model_type is {found}; accepted: {accepted}; describe any other model in a file (models.NAME.attention)")]
    UnknownFamily {
        /// What the file says.
        found: String,
        /// All that are known.
        accepted: String,
    },
    /// A field is missing, has another type, or is out of bounds.
    #[error("{field} is {found}; accepted: {accepted}")]
    Field {
        /// Which one, with its section.
        field: String,
        /// What it says, shortened.
        found: String,
        /// What it may say.
        accepted: String,
    },
}

impl SpecError {
    pub(super) fn field(field: &str, found: impl std::fmt::Display, accepted: impl Into<String>) -> Self {
        Self::Field { field: field.to_owned(), found: shortened(&found.to_string()), accepted: accepted.into() }
    }
}

/// The beginning of something that a stranger wrote.
pub(super) fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 48;
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
