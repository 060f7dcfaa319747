//! What is known of one source at one sequence number, on its way from one router to another.
//!
//! An imprint is a list of chunks, each with a version, its place in the list and a digest over itself and all before
//! it. Who reads it believes nothing: another process, other rules, a missing or a changed chunk, and more than may be
//! kept all refuse the whole of it, and nothing of it is used.
//!
//! A chunk, all numbers little endian:
//!
//! ```text
//! "OSIM", version u16, end u8 (1 in the last chunk), place u32
//! in the first one: worker u64, rank u16, process u64, next u64, rules u128, blocks u64, orphans u64
//! records: kind u8, then
//!   0, a placed block: name u64, before 0 | 1 u64, end u128, inner u32 x u64, copies
//!   1, an orphan:      name u64, parent 0 | 1 u64, extra u32 x u8, tokens u32 x u32, copies
//!   copies: u32 x (tier u8, group u32, attention u8, count u32)
//! digest u128: xxh3 over the digest of the chunk before (0 before the first) and all bytes above
//! ```

mod reader;
mod wire;
mod writer;

pub use reader::{ReadProgress, ResidencySnapshotReader};
pub use writer::ResidencySnapshotWriter;

use vocabulary::{DpRank, HashSeed, Incarnation, PrefixId, RootKeys, WorkerId};

use crate::index::ResidencyChange;
use crate::source::{RemovalSemantics, SourceBlocks, SourceRules};

const MAGIC: [u8; 4] = *b"OSIM";
/// Of the format. Another one is refused: whoever cannot read an imprint asks the engine.
const VERSION: u16 = 1;
/// A chunk is closed once it is that long.
const CHUNK_BYTES: usize = 256 << 10;
/// Longest chunk that is read: a full one and the longest record.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
const DIGEST: usize = 16;

/// Of what an imprint is, and how far it goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResidencySnapshotHeader {
    /// The engine.
    pub worker: WorkerId,
    /// Its rank.
    pub rank: DpRank,
    /// The process that spoke.
    pub process: Incarnation,
    /// The first sequence number that is not in it.
    pub next: u64,
}

/// Everything that a source held before `head.next`.
pub struct ResidencySnapshot {
    /// Of what it is.
    pub head: ResidencySnapshotHeader,
    pub(crate) source: SourceBlocks,
    /// What the index is to be told.
    pub(crate) changes: Vec<ResidencyChange>,
}

/// Why an imprint is of no use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ResidencySnapshotError {
    /// Cut off, changed on its way, or not an imprint.
    #[error("it is damaged")]
    Damaged,
    /// Written in another format.
    #[error("its format is version {0}, and {VERSION} is read here")]
    Version(u16),
    /// A chunk is missing, or comes twice.
    #[error("chunk {found} came where {expected} was expected")]
    Place {
        /// The one that was due.
        expected: u32,
        /// The one that came.
        found: u32,
    },
    /// Of another worker or rank.
    #[error("it is of another source")]
    OtherSource,
    /// Of another life of the worker.
    #[error("it is of another process")]
    OtherProcess,
    /// Written by a router whose chains are not ours.
    #[error("its blocks are of another model, seed or block size")]
    OtherRules,
    /// More than is kept of one source.
    #[error("it holds more than is kept of one source")]
    TooMuch,
}

impl ResidencySnapshotError {
    /// The word for metrics.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

/// Equal where blocks are named alike.
fn rules_digest(rules: &SourceRules) -> PrefixId {
    let root = rules.namespace.root(rules.seed, RootKeys::default());
    let removal = match rules.removal {
        RemovalSemantics::PerCopy => 0,
        RemovalSemantics::LastCopy => 1,
    };
    root.extend_bytes(rules.seed, &rules.block.0.to_le_bytes()).extend_bytes(rules.seed, &[removal])
}

fn chain_digest(before: PrefixId, chunk: &[u8]) -> PrefixId {
    before.extend_bytes(HashSeed(u64::from(VERSION)), chunk)
}

#[cfg(test)]
mod tests;
