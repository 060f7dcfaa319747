//! Errors in an engine's profile and in requests.

/// Why an engine cannot be created.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum EngineBuildError {
    /// A profile field is out of range.
    #[error("profile: {field} must be {must}")]
    Profile {
        /// Its name.
        field: &'static str,
        /// The valid range.
        must: &'static str,
    },
    /// The token generator has no words.
    #[error("a voice needs at least two words that are not special tokens")]
    NoWords,
}

/// Why a request was rejected. The client's fault, except for the last two.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestRejection {
    /// The prompt is empty.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The prompt and one generated token exceed the context.
    #[error("the prompt has {prompt} tokens, the context holds {context}")]
    TooLong {
        /// Length of the prompt in tokens.
        prompt: u32,
        /// Maximum context in tokens.
        context: u32,
    },
    /// Too many requests are waiting.
    #[error("{waiting} requests wait already")]
    QueueFull {
        /// How many.
        waiting: u32,
    },
    /// The engine has died.
    #[error("the engine is dead")]
    Dead,
}
