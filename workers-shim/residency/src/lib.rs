//! The residency index, which knows which worker holds which blocks, and the processing of engines' KV events for it.
//!
//! Pure: no IO, no clock, no lock. Input from engines is untrusted: it is limited, checked and counted, and never
//! causes a panic. Engines' block hashes are opaque here; they are keyed per engine and mapped to the router's own hash
//! chain.
//!
//! The path of an event: [`decode`] parses bytes to a [`KvEventBatch`], [`SequenceTracker`] decides whether it is next
//! in sequence, [`ResidencyFeed`] converts it to [`ResidencyChange`]s without holding a lock and applies them to the
//! shared [`ResidencyIndex`] in limited batches. What workers without events are assumed to hold is in the
//! [`RoutedIndex`].

mod block_tree;
mod bucket_table;
mod copies;
mod decode;
mod depth_hint;
mod event_sequence;
mod fold_hash;
mod holder_sets;
mod index;
mod kv_event;
mod msgpack;
mod orphans;
mod prefix_closure;
mod residency_feed;
mod routed_blocks;
mod routed_index;
mod shard;
mod snapshot;
mod source;
#[cfg(test)]
mod tests;

pub use decode::{DecodeError, DecodeLimits, decode};
pub use depth_hint::DepthHint;
pub use event_sequence::{
    KnowledgeGap, LiveSocketHealth, MessageAction, ProcessMatch, SequenceTracker, turnover_blocks,
};
pub use index::{ResidencyChange, ResidencyIndex, SourceSlot, TooManySources};
pub use kv_event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvCacheEvent, KvCacheSpecKind, KvEventBatch};
pub use prefix_closure::PrefixClosure;
pub use residency_feed::{ApplyProgress, ResidencyFeed};
pub use routed_blocks::RoutedBlockLimits;
pub use routed_index::{RemovedRank, RoutedIndex, RoutedRankSlot};
pub use snapshot::{
    MAX_CHUNK_BYTES, ReadProgress, ResidencySnapshot, ResidencySnapshotError, ResidencySnapshotHeader,
    ResidencySnapshotReader, ResidencySnapshotWriter,
};
pub use source::{BlockMappingRules, RemovalSemantics, SourceAnomalies, SourceBlocks};
