//! Errors of loading a model's files and of resolving prompts.

use std::path::PathBuf;

use crate::FallbackReason;

/// Errors of this crate. Loading errors must be fixed by the operator; the others make the prompt fall back to
/// canonical bytes.
#[derive(Debug, thiserror::Error)]
pub enum PrefixError {
    /// A file of the model folder could not be read.
    #[error("cannot read {}: {source}; point the model's folder at a directory with a tokenizer.json", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// A file of the model folder is larger than any real one.
    #[error("{file} is larger than {limit} bytes; is this the right file?")]
    FileTooLarge {
        /// The file's name.
        file: &'static str,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// A file of the model folder is not valid JSON.
    #[error("{file} is not valid: {source}")]
    File {
        /// The file's name.
        file: &'static str,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// The tokenizer cannot be built, or cannot encode this text.
    #[error("tokenizer: {0}; without it prompts are identified by their bytes")]
    Tokenizer(#[from] fastokens::Error),
    /// Decoding an encoded sample gave another text.
    #[error("tokenizer.json does not survive a round trip: {text:?} came back as {back:?}; its ids cannot be trusted")]
    RoundTrip {
        /// The sample.
        text: &'static str,
        /// The text it decoded to.
        back: String,
    },
    /// The chat template does not compile, rejected the conversation, or exceeded its budget.
    #[error("chat template: {0:#}")]
    Template(#[from] minijinja::Error),
    /// The prompt's token ids cannot be predicted.
    #[error("{reason}: {detail}")]
    Unresolvable {
        /// Reason, as a metric label.
        reason: FallbackReason,
        /// Details for the log.
        detail: &'static str,
    },
    /// The body is not the JSON that the endpoint takes.
    #[error("request body: {0}")]
    Body(#[from] serde_json::Error),
}

impl PrefixError {
    /// Returns the metric label under which a prompt with this error is counted.
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
