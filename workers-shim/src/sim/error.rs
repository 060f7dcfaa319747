//! Why a simulated worker does not start.

use std::net::SocketAddr;

/// Why a simulated worker does not start.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The profile or the vocabulary makes no engine.
    #[error(transparent)]
    Model(#[from] engine_model::ModelError),
    /// An option is outside its range.
    #[error("{option} must be {must}")]
    Option {
        /// Which.
        option: &'static str,
        /// What it must be.
        must: &'static str,
    },
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// An event socket cannot be bound.
    #[error("cannot bind {endpoint}: {source}")]
    Bind {
        /// Which.
        endpoint: String,
        /// Why.
        source: std::io::Error,
    },
}
