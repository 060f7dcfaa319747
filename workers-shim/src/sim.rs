//! Simulated worker: the engine model behind real sockets, compatible with vLLM on the wire. It does not identify its
//! callers and knows nothing about the router in front of it.

mod bootstrap_rooms;
mod clock;
mod codec;
mod detokenizer;
mod driver;
mod event_frames;
mod http;
mod publisher;
mod side_channel;
mod sim_options;

use std::net::SocketAddr;

/// Why a simulated worker does not start.
#[derive(Debug, thiserror::Error)]
pub enum SimStartError {
    /// The profile or the vocabulary is invalid.
    #[error(transparent)]
    Model(#[from] engine_model::EngineBuildError),
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

#[cfg(test)]
mod tests;
mod worker;

pub use codec::{AddSpecialTokens, ConversationApi, TextCodec, TextCodecError};
pub use engine_model::EngineProfile;
pub use sim_options::{
    EventFault, EventFaultError, EventOptions, SimOptions, TransferFault, TransferFaultError, TransferOptions,
};
pub use worker::{SimWorker, WORKER_HEADER};
