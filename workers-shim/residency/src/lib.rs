//! Who holds what: the residency index and what a stream of an engine's KV events means for it.
//!
//! Pure: no IO, no clock, no lock. What an engine says is untrusted: it is bounded, checked and counted, and never
//! panics. Engines' block hashes are opaque here; they are keyed per engine and turned into our own chain.
//!
//! The way of an event: [`decode`] bytes to a [`Batch`], [`Stream`] says whether its turn has come, [`Feed`] turns it
//! into [`Change`]s outside any lock and settles them into the shared [`Index`] in bounded portions.

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

pub use closure::Shape;
pub use decode::{DecodeError, Limits, decode};
pub use event::{Batch, EngineHash, Event, ExtraKey, Removed, SpecKind, Stored};
pub use feed::{Feed, Settled};
pub use imprint::{Imprint, ImprintError, ImprintHead, ImprintReader, ImprintWriter, LONGEST_CHUNK, Taken};
pub use index::{Change, Index, Slot, TooManySources};
pub use near::Near;
pub use routed::{Routed, RoutedLimits};
pub use source::{Removal, Source, SourceCounts, SourceRules};
pub use stream::{Gap, Hearing, Met, Stream, Verdict, turned_over};
