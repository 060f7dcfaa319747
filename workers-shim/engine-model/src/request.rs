//! Requests to an engine.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::Tokens;

/// Id of a request, unique within one engine process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EngineRequestId(pub u64);

/// A prompt, and how to continue it.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineRequest {
    /// Name by which a consumer refers to a producer's request. Unique among live requests.
    pub name: Arc<str>,
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Sampling parameters.
    pub sampling: SamplingParams,
    /// Further inputs of the block hashes.
    pub keys: CacheKeys,
    /// Its role in a KV transfer.
    pub transfer: TransferRole,
    /// Which part of the prompt may come from the prefix cache.
    pub cache_reads: CacheReadPolicy,
    /// Which blocks its KV events report.
    pub kv_report: KvEventMode,
}

/// Which part of a request's prompt may come from the prefix cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheReadPolicy {
    /// Everything that is cached.
    #[default]
    Cached,
    /// Nothing: log probabilities of the prompt require that all of it is computed. The computed blocks are cached as
    /// usual.
    Ignored,
}

/// Which blocks a request's KV events report.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum KvEventMode {
    /// Blocks that it adds to the prefix cache.
    #[default]
    New,
    /// Also blocks that it found there, reported as if stored once more although they are not.
    Full,
}

/// How an answer is sampled and when it ends.
#[derive(Clone, PartialEq, Eq, Debug, SmartDefault)]
pub struct SamplingParams {
    /// Maximum number of tokens.
    #[default(16)]
    pub max_tokens: u32,
    /// Minimum number of tokens.
    pub min_tokens: u32,
    /// Whether the model may end the answer.
    #[default(EosPolicy::Natural)]
    pub eos_policy: EosPolicy,
    /// Stands for seed and temperature; None is greedy.
    pub salt: Option<u64>,
    /// Stop tokens.
    pub stop: Vec<u32>,
}

/// Whether the model may end the answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum EosPolicy {
    /// At its end-of-sequence token.
    #[default]
    Natural,
    /// Only the length limit ends it.
    Ignored,
}

/// Inputs of a block's hash besides its tokens.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CacheKeys {
    /// Separates tenants; part of the first block's hash.
    pub salt: Option<Arc<str>>,
    /// The adapter; part of every block's hash, and it changes the text.
    pub adapter: Option<Arc<str>>,
}

/// A request's role in a KV transfer.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum TransferRole {
    /// None.
    #[default]
    None,
    /// Holds the blocks for a consumer, under a lease.
    Produce,
    /// Pulls the prompt's KV from a producer.
    Consume(RemoteBlocks),
    /// Pulls the prompt's KV, and holds the blocks of prompt and answer for the next turn's producer: NIXL's
    /// bidirectional mode.
    Exchange(RemoteBlocks),
    /// Pulls the part of the prompt that a consumer has computed (at most this many tokens), computes the rest, and
    /// holds the blocks as a producer does.
    ReversePull(RemoteBlocks, Tokens),
    /// Parameters that kill an engine: the request waits until it is cancelled, then the engine dies.
    Hang,
}

impl TransferRole {
    /// Returns the source of a pull, if there is one.
    pub(crate) fn source(&self) -> Option<&RemoteBlocks> {
        match self {
            Self::Consume(source) | Self::Exchange(source) | Self::ReversePull(source, _) => Some(source),
            Self::None | Self::Produce | Self::Hang => None,
        }
    }
}

/// Address of blocks that a producer holds. The model ignores host and port; it passes them back to its driver.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RemoteBlocks {
    /// The producer's engine id.
    pub engine: Arc<str>,
    /// The producer's request.
    pub request: Arc<str>,
    /// Its blocks, from first to last.
    pub blocks: Vec<u32>,
    /// Host of its side channel.
    pub host: Arc<str>,
    /// Port of its side channel.
    pub port: u16,
}
