//! What an engine says, each at the engine time it happened.

use std::sync::Arc;

use vocabulary::Micros;

use crate::{HandoffOffer, RemoteBlocks, SequenceId};

/// One thing that happened.
#[derive(Clone, PartialEq, Debug)]
pub struct EngineOutput {
    /// When.
    pub at: Micros,
    /// What.
    pub kind: EngineOutputKind,
}

/// What happened.
#[derive(Clone, PartialEq, Debug)]
pub enum EngineOutputKind {
    /// A token was generated; the end-of-sequence token counts as one.
    Token {
        /// For whom.
        request: SequenceId,
        /// Which.
        token: u32,
    },
    /// A request is over.
    Finished {
        /// Which.
        request: SequenceId,
        /// How.
        finish: FinishedRequest,
    },
    /// The driver is to fetch these blocks and call `arrived` or `pull_failed`.
    Pull {
        /// For whom.
        request: SequenceId,
        /// From where; only the blocks that lack here.
        source: RemoteBlocks,
    },
    /// The transfer is over; the driver tells the producer, which frees the blocks.
    Pulled {
        /// For whom.
        request: SequenceId,
        /// From where.
        source: RemoteBlocks,
    },
    /// A step's changes to the prefix cache.
    Events(Vec<PrefixCacheChange>),
}

/// How a request ended, with its counts.
#[derive(Clone, PartialEq, Debug)]
pub struct FinishedRequest {
    /// Why.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Of these, found in the cache.
    pub cached: u32,
    /// Of these, pulled from a producer.
    pub external: u32,
    /// Tokens of the prompt whose blocks this request added to the cache.
    pub created: u32,
    /// Tokens of the answer.
    pub generated: u32,
    /// When it came.
    pub arrived: Micros,
    /// When its first token was there; when it ended, without one.
    pub first_token: Micros,
    /// For a consumer, where this request was a producer's and ended by length.
    pub handoff: Option<HandoffOffer>,
}

/// Why a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FinishReason {
    /// The model ended it, or a stop token.
    Stop,
    /// The length ended it.
    Length,
    /// The client ended it.
    Abort,
    /// Its KV could not be had, or the engine died.
    Error,
}

/// One change to the prefix cache, for whoever tracks it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PrefixCacheChange {
    /// Blocks were stored; a hash that is stored already has one more copy.
    Stored(StoredBlocks),
    /// One copy of a block was removed.
    Removed(u64),
    /// All are gone.
    Cleared,
}

/// Neighbouring blocks of one sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct StoredBlocks {
    /// Their hashes, which mean something to this engine only.
    pub hashes: Vec<u64>,
    /// The block before the first.
    pub parent: Option<u64>,
    /// All their tokens.
    pub tokens: Vec<u32>,
    /// The salt, if the first of them is the first of its sequence.
    pub salt: Option<Arc<str>>,
    /// The adapter.
    pub adapter: Option<Arc<str>>,
}
