//! What an engine is asked.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::Tokens;

/// A request within one engine's life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SequenceId(pub u64);

/// One prompt and how to go on from it.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineRequest {
    /// Its name on the wire; a consumer names a producer's request by it. Unique among live requests.
    pub name: Arc<str>,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How to go on.
    pub sampling: SamplingParams,
    /// What else a block's identity depends on.
    pub keys: CacheKeys,
    /// Whether KV comes or goes.
    pub transfer: TransferRole,
    /// What of its prompt may come from the prefix cache.
    pub cache_reads: CacheReadPolicy,
    /// What listeners are told of it.
    pub kv_report: KvReportMode,
}

/// What of a request's prompt may come from the prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheReadPolicy {
    /// All that is there.
    #[default]
    Cached,
    /// Nothing: log probabilities of the prompt want all of it computed. What is computed goes into the cache as ever.
    Ignored,
}

/// What listeners are told of a request's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KvReportMode {
    /// Those that it adds to the prefix cache.
    #[default]
    New,
    /// Those that it found there too, as if they were stored once more. They are not.
    Full,
}

/// How an answer is drawn and when it ends.
#[derive(Clone, PartialEq, Eq, Debug, SmartDefault)]
pub struct SamplingParams {
    /// At most so many tokens.
    #[default(16)]
    pub max_tokens: u32,
    /// No end before so many tokens.
    pub min_tokens: u32,
    /// Whether the model may end the answer.
    #[default(EosPolicy::Natural)]
    pub eos_policy: EosPolicy,
    /// Stands for seed and temperature; none is greedy.
    pub salt: Option<u64>,
    /// Tokens that end the answer too.
    pub stop: Vec<u32>,
}

/// Whether the model may end the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EosPolicy {
    /// At its end-of-sequence token.
    #[default]
    Natural,
    /// Only the length ends it.
    Ignored,
}

/// What a block's identity depends on besides its tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheKeys {
    /// Separates tenants; part of the first block's key.
    pub salt: Option<Arc<str>>,
    /// The adapter; part of every block's key, and of the text.
    pub adapter: Option<Arc<str>>,
}

/// Whether KV comes or goes with a request.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum TransferRole {
    /// Neither.
    #[default]
    None,
    /// Keep the blocks for a consumer, under a lease.
    Produce,
    /// Pull the prompt's KV from a producer.
    Consume(RemoteBlocks),
    /// The same, and keep the blocks of prompt and answer for the next turn's producer: NIXL's bidirectional mode.
    Exchange(RemoteBlocks),
    /// Pull what a consumer has computed of the prompt, compute the rest, and keep the blocks as a producer does.
    ReversePull(RemoteBlocks, Tokens),
    /// Parameters that no engine survives: waits until cancelled, then the engine is dead.
    Hang,
}

impl TransferRole {
    /// From where blocks are pulled, if they are.
    pub(crate) fn source(&self) -> Option<&RemoteBlocks> {
        match self {
            Self::Consume(source) | Self::Exchange(source) | Self::ReversePull(source, _) => Some(source),
            Self::None | Self::Produce | Self::Hang => None,
        }
    }
}

/// Where a producer keeps blocks. Host and port mean nothing to the model; they are handed back to its driver.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RemoteBlocks {
    /// The producer's engine id.
    pub engine: Arc<str>,
    /// The producer's request.
    pub request: Arc<str>,
    /// Its blocks, first block first.
    pub blocks: Vec<u32>,
    /// Its side channel's host.
    pub host: Arc<str>,
    /// And port.
    pub port: u16,
}
