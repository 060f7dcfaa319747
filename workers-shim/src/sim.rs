//! Simulated worker: the engine model behind real sockets, compatible with vLLM on the wire. It does not identify its
//! callers and knows nothing about the router in front of it.

mod bootstrap_rooms;
mod clock;
mod codec;
mod detokenizer;
mod driver;
mod error;
mod event_frames;
mod histogram;
mod http;
mod options;
mod publisher;
mod side_channel;
#[cfg(test)]
mod tests;
mod worker;

pub use codec::{AddSpecialTokens, CodecError, ConversationApi, TextCodec};
pub use engine_model::EngineProfile;
pub use error::SimError;
pub use options::{
    EventFault, EventFaultError, EventOptions, SimOptions, TransferFault, TransferFaultError, TransferOptions,
};
pub use worker::{SimWorker, WORKER_HEADER};
