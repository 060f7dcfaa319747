//! Sans-IO model of an inference engine: paged KV memory with a prefix cache, continuous batching with chunked prefill,
//! preemption by recompute, KV transfer and timing. It opens no socket and reads no clock: time is an argument, so the
//! same engine runs behind a server and in a simulation's virtual time.
//!
//! The generated text is a function of the KV from which it was computed: a wrong or missing block changes the answer.

mod engine;
mod engine_stats;
mod error;
mod output;
mod pool;
mod profile;
mod request;
pub mod runs;
mod sequence;
#[cfg(test)]
mod tests;
mod token_generator;
mod transfer;

pub use engine::Engine;
pub use engine_stats::{EngineStats, FinishCounts, PromptTokensBySource, TransferStats};
pub use error::{EngineBuildError, RequestRejection};
pub use output::{EngineOutput, EngineOutputKind, FinishReason, FinishedRequest, PrefixCacheChange, StoredBlocks};
pub use profile::EngineProfile;
pub use request::{
    CacheKeys, CacheReadPolicy, EngineRequest, EngineRequestId, EosPolicy, KvEventMode, RemoteBlocks, SamplingParams,
    TransferRole,
};
pub use token_generator::{KvFingerprint, TokenGenerator};
pub use transfer::{BlockImage, HandoffOffer, HoldPurpose};
