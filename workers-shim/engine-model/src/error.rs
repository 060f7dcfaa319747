//! What can be wrong with an engine's making and with a request.

/// Why an engine cannot be made.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum ModelError {
    /// A profile field is outside what makes sense.
    #[error("profile: {field} must be {must}")]
    Profile {
        /// Its name.
        field: &'static str,
        /// What it must be.
        must: &'static str,
    },
    /// A voice needs something to say.
    #[error("a voice needs at least two words that are not special tokens")]
    NoWords,
}

/// Why a request was not taken. The client's fault, except for the last two.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RequestRejection {
    /// There is nothing to compute.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt and one token of answer do not fit.
    #[error("the prompt has {prompt} tokens, the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        prompt: u32,
        /// Tokens of the context.
        context: u32,
    },
    /// Too many requests wait already.
    #[error("{waiting} requests wait already")]
    QueueFull {
        /// How many.
        waiting: u32,
    },
    /// The engine has died and answers nobody.
    #[error("the engine is dead")]
    Dead,
}
