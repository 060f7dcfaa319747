//! What can go wrong between a model's files, a client's body and token ids, and whose doing it is.

use std::path::PathBuf;

use crate::FallbackReason;

/// Everything this crate refuses. Loading errors are the operator's to fix; the others turn a prompt into a fallback.
#[derive(Debug, thiserror::Error)]
pub enum PrefixError {
    /// A file of the model folder could not be read.
    #[error("cannot read {}: {source}; point the model's folder at a directory with a tokenizer.json", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of the model folder is larger than any real one.
    #[error("{file} is larger than {limit} bytes; is this the right file?")]
    FileTooLarge {
        /// The file's name.
        file: &'static str,
        /// The bound.
        limit: u64,
    },
    /// A file of the model folder is not what its name says.
    #[error("{file} is not valid: {source}")]
    File {
        /// The file's name.
        file: &'static str,
        /// What the parser said.
        source: serde_json::Error,
    },
    /// The tokenizer cannot be built, or cannot encode this text.
    #[error("tokenizer: {0}; without it prompts are identified by their bytes")]
    Tokenizer(#[from] fastokens::Error),
    /// Decoding what was encoded gave another text.
    #[error("tokenizer.json does not survive a round trip: {text:?} came back as {back:?}; its ids cannot be trusted")]
    RoundTrip {
        /// The sample.
        text: &'static str,
        /// What it decoded to.
        back: String,
    },
    /// The chat template does not compile, refused the conversation, or ran over its budget.
    #[error("chat template: {0:#}")]
    Template(#[from] minijinja::Error),
    /// The prompt's ids cannot be foreseen.
    #[error("{reason}: {detail}")]
    Unresolvable {
        /// Which kind of prompt this is.
        reason: FallbackReason,
        /// What was met.
        detail: &'static str,
    },
    /// The body is not the JSON that the endpoint takes.
    #[error("request body: {0}")]
    Body(#[from] serde_json::Error),
}

impl PrefixError {
    /// The bounded label under which a prompt that met this error is counted.
    pub fn reason(&self) -> FallbackReason {
        match self {
            Self::Unresolvable { reason, .. } => *reason,
            Self::Template(error) if error.kind() == minijinja::ErrorKind::WriteFailure => FallbackReason::TooLarge,
            Self::Template(error) if error.kind() == minijinja::ErrorKind::OutOfFuel => FallbackReason::TooLarge,
            Self::Template(_) => FallbackReason::TemplateError,
            Self::Body(_) => FallbackReason::Malformed,
            Self::Read { .. } | Self::FileTooLarge { .. } | Self::File { .. } => FallbackReason::NoTokenizer,
            Self::Tokenizer(_) | Self::RoundTrip { .. } => FallbackReason::TokenizerError,
        }
    }

    pub(crate) fn unresolvable(reason: FallbackReason, detail: &'static str) -> Self {
        Self::Unresolvable { reason, detail }
    }
}
