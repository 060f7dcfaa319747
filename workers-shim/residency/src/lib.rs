//! Who holds what: the residency index and what a stream of an engine's KV events means for it.
//!
//! Pure: no IO, no clock, no lock. What an engine says is untrusted: it is bounded, checked and counted, and never
//! panics. Engines' block hashes are opaque here; they are keyed per engine and turned into our own chain.
//!
//! The way of an event: [`decode`] bytes to a [`KvEventBatch`], [`SequenceTracker`] says whether its turn has come, [`ResidencyFeed`] turns it
//! into [`ResidencyChange`]s outside any lock and settles them into the shared [`ResidencyIndex`] in bounded portions.

mod block_tree;
mod bucket_table;
mod copies;
mod decode;
mod depth_hint;
mod event;
mod feed;
mod fold_hash;
mod holder_sets;
mod index;
mod msgpack;
mod orphans;
mod prefix_closure;
mod routed_blocks;
mod sequence;
mod shard;
mod snapshot;
mod source;
#[cfg(test)]
mod tests;

pub use decode::{DecodeError, DecodeLimits, decode};
pub use depth_hint::DepthHint;
pub use event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvCacheEvent, KvCacheSpecKind, KvEventBatch};
pub use feed::{ResidencyFeed, SettleProgress};
pub use index::{ResidencyChange, ResidencyIndex, SourceSlot, TooManySources};
pub use prefix_closure::PrefixClosure;
pub use routed_blocks::{RoutedBlockLimits, RoutedBlocks};
pub use sequence::{KnowledgeGap, LiveSocketHealth, ProcessMatch, SequenceAction, SequenceTracker, turnover_blocks};
pub use snapshot::{
    MAX_CHUNK_BYTES, ReadProgress, ResidencySnapshot, ResidencySnapshotError, ResidencySnapshotHeader,
    ResidencySnapshotReader, ResidencySnapshotWriter,
};
pub use source::{RemovalSemantics, SourceAnomalies, SourceBlocks, SourceRules};
