//! Errors of the benchmark.

/// Errors that end the benchmark without a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyBenchError {
    /// The command line is wrong.
    #[error(
        "{0}; usage: bench [--quick] [--check] [--json FILE] [--bin OWNERSERVE] [--before OWNERSERVE] [--sizes KIB,...] [--streams COUNT,...] [--targets NAME,...] [--windows COUNT]"
    )]
    Usage(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The attempted action.
        what: String,
        /// The cause.
        source: std::io::Error,
    },
    /// A server sent an unexpected response.
    #[error("{target} answered {got}")]
    Answer {
        /// The server.
        target: String,
        /// The response.
        got: String,
    },
}

impl ProxyBenchError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> ProxyBenchError {
        let what = what.into();
        move |source| ProxyBenchError::System { what, source }
    }
}
