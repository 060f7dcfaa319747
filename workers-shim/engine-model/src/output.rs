//! Outputs of an engine, each with the engine time at which it happened.

use std::sync::Arc;

use vocabulary::Micros;

use crate::{EngineRequestId, HandoffOffer, RemoteBlocks};

/// One output.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineOutput {
    /// The engine time.
    pub at: Micros,
    /// What happened.
    pub kind: EngineOutputKind,
}

/// Kinds of outputs.
#[derive(Clone, PartialEq, Debug)]
pub enum EngineOutputKind {
    /// A token was generated; the end-of-sequence token counts as one.
    Token {
        /// The request.
        request: EngineRequestId,
        /// The token.
        token: u32,
    },
    /// A request ended.
    Finished {
        /// The request.
        request: EngineRequestId,
        /// How it ended.
        finish: FinishedRequest,
    },
    /// The driver must fetch these blocks, and then call `pull_arrived` or `pull_failed`.
    Pull {
        /// The request.
        request: EngineRequestId,
        /// The source, with only the blocks that are missing here.
        source: RemoteBlocks,
    },
    /// A transfer has finished; the driver must tell the producer, which frees the blocks.
    Pulled {
        /// The request.
        request: EngineRequestId,
        /// The source.
        source: RemoteBlocks,
    },
    /// Changes to the prefix cache in one step.
    Events(Vec<PrefixCacheChange>),
}

/// How a request ended, with its token counts.
#[derive(Clone, PartialEq, Debug)]
pub struct FinishedRequest {
    /// The reason.
    pub reason: FinishReason,
    /// Prompt tokens.
    pub prompt: u32,
    /// Prompt tokens found in the cache.
    pub cached: u32,
    /// Prompt tokens pulled from a producer.
    pub external: u32,
    /// Prompt tokens whose blocks this request added to the cache.
    pub created: u32,
    /// Generated tokens.
    pub generated: u32,
    /// Arrival time.
    pub arrived: Micros,
    /// Time of its first token; its end, if it generated none.
    pub first_token: Micros,
    /// Offer for a consumer or for the next turn's producer, if the blocks are held.
    pub handoff: Option<HandoffOffer>,
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// An end-of-sequence or stop token.
    Stop,
    /// The length limit.
    Length,
    /// Cancelled by the client.
    Abort,
    /// A failed KV transfer, or the death of the engine.
    Error,
}

/// A change of the prefix cache, as published in KV events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrefixCacheChange {
    /// Blocks were stored; a hash that is already stored gets one more copy.
    Stored(StoredBlocks),
    /// One copy of a block was removed.
    Removed(u64),
    /// All blocks were removed.
    Cleared,
}

/// Consecutive blocks of one sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredBlocks {
    /// Their hashes, which are opaque outside of this engine.
    pub hashes: Vec<u64>,
    /// The block before the first one.
    pub parent: Option<u64>,
    /// All their tokens.
    pub tokens: Vec<u32>,
    /// The salt, if the blocks are at the start of their sequence.
    pub salt: Option<Arc<str>>,
    /// The adapter.
    pub adapter: Option<Arc<str>>,
}
