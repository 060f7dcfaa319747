//! Why a simulated worker does not start.

use std::net::SocketAddr;

/// Why a simulated worker does not start.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The profile or the vocabulary is invalid.
    #[error(transparent)]
    Model(#[from] engine_model::ModelError),
    /// An option is outside its range.
    #[error("{option} must be {must}")]
    Option {
        /// Its name.
        option: &'static str,
        /// The valid range.
        must: &'static str,
    },
    /// Listening on an address failed.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error.
        source: std::io::Error,
    },
    /// An event socket could not be bound.
    #[error("cannot bind {endpoint}: {source}")]
    Bind {
        /// The endpoint.
        endpoint: String,
        /// The error.
        source: std::io::Error,
    },
}
