//! Errors of the benchmark.

/// Errors that end the benchmark without a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LedgerBenchError {
    /// Wrong command line, or wrong use of a system.
    #[error("{0}")]
    Usage(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The attempted action.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// An HTTP/2 call failed.
    #[error("{what}: {source}")]
    Call {
        /// The call.
        what: &'static str,
        /// The cause.
        source: h2::Error,
    },
    /// Our own node failed.
    #[error(transparent)]
    Ledger(ownership::LedgerNodeError),
    /// A system sent an unexpected response.
    #[error("{target} answered {got}")]
    Answer {
        /// The system.
        target: String,
        /// The response.
        got: String,
    },
}

impl LedgerBenchError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> LedgerBenchError {
        let what = what.into();
        move |source| LedgerBenchError::System { what, source }
    }

    pub(crate) fn call(what: &'static str) -> impl FnOnce(h2::Error) -> LedgerBenchError {
        move |source| LedgerBenchError::Call { what, source }
    }

    pub(crate) fn ledger(error: ownership::LedgerNodeError) -> LedgerBenchError {
        LedgerBenchError::Ledger(error)
    }
}
