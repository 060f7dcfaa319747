//! Who holds what: the residency index and what a stream of an engine's KV events means for it.
//!
//! Pure: no IO, no clock, no lock. What an engine says is untrusted: it is bounded, checked and counted, and never
//! panics. Engines' block hashes are opaque here; they are keyed per engine and turned into our own chain.
//!
//! The way of an event: [`decode`] bytes to a [`KvEventBatch`], [`SequenceTracker`] says whether its turn has come, [`ResidencyFeed`] turns it
//! into [`ResidencyChange`]s outside any lock and settles them into the shared [`ResidencyIndex`] in bounded portions.

mod blocks;
mod closure;
mod copies;
mod cursor;
mod decode;
mod event;
mod feed;
mod holders;
mod imprint;
mod index;
mod mix;
mod near;
mod orphans;
mod routed;
mod shard;
mod source;
mod stream;
mod table;
#[cfg(test)]
mod tests;

pub use closure::PrefixClosure;
pub use decode::{DecodeError, DecodeLimits, decode};
pub use event::{BlockRemoved, BlockStored, EngineHash, ExtraKey, KvCacheEvent, KvCacheSpecKind, KvEventBatch};
pub use feed::{ResidencyFeed, SettleProgress};
pub use imprint::{
    MAX_CHUNK_BYTES, ReadProgress, ResidencySnapshot, ResidencySnapshotError, ResidencySnapshotHeader,
    ResidencySnapshotReader, ResidencySnapshotWriter,
};
pub use index::{ResidencyChange, ResidencyIndex, SourceSlot, TooManySources};
pub use near::DepthHint;
pub use routed::{RoutedBlockLimits, RoutedBlocks};
pub use source::{RemovalSemantics, SourceAnomalies, SourceBlocks, SourceRules};
pub use stream::{KnowledgeGap, LiveSocketHealth, ProcessMatch, SequenceAction, SequenceTracker, turnover_blocks};
