//! Errors of a run.

/// Errors that end the run without a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NemesisError {
    /// The command line is wrong.
    #[error("{0}; usage: nemesis [--quick] [--seed N] [--minutes M] [--only NAME]... [-o FILE] [--bin OWNERSERVE]")]
    Usage(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The attempted action.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// Unexpected response or behaviour.
    #[error("{who}: {got}")]
    Answer {
        /// Who responded.
        who: String,
        /// What it responded.
        got: String,
    },
    /// A timeout expired.
    #[error("waited too long for {what}")]
    Late {
        /// The awaited event.
        what: String,
    },
}

impl NemesisError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> NemesisError {
        let what = what.into();
        move |source| NemesisError::System { what, source }
    }

    pub(crate) fn usage(what: impl Into<String>) -> NemesisError {
        NemesisError::Usage(what.into())
    }
}
