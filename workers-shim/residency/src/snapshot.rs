//! Residency snapshot: what is known of one source at one sequence number, for transfer between routers.
//!
//! A snapshot is a list of chunks, each with a version, its position in the list, and a digest over itself and all
//! chunks before it. The reader trusts nothing: another process, other rules, a missing or modified chunk, or too many
//! blocks reject the whole snapshot, and none of it is used.
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

use vocabulary::{DpRank, HashSeed, Incarnation, PrefixId, RequestNamespace, WorkerId};

use crate::index::ResidencyChange;
use crate::source::{BlockMappingRules, RemovalSemantics, SourceBlocks};

const MAGIC: [u8; 4] = *b"OSIM";
/// Version of the format. Others are rejected: a router that cannot read a snapshot uses the engine's replay.
const VERSION: u16 = 1;
/// Size in bytes at which a chunk is closed.
const CHUNK_BYTES: usize = 256 << 10;
/// Maximum size of a chunk that is read, in bytes: a full chunk and the largest record.
pub const MAX_CHUNK_BYTES: usize = 1 << 20;
const DIGEST: usize = 16;

/// The source and the position of a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ResidencySnapshotHeader {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank.
    pub rank: DpRank,
    /// The engine process.
    pub process: Incarnation,
    /// The first sequence number that is not included.
    pub next: u64,
}

/// Everything that a source held before `head.next`.
pub struct ResidencySnapshot {
    /// The source and the position.
    pub head: ResidencySnapshotHeader,
    pub(crate) source: SourceBlocks,
    /// Changes to apply to the index.
    pub(crate) changes: Vec<ResidencyChange>,
}

/// Why a snapshot is rejected.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ResidencySnapshotError {
    /// Truncated, modified, or not a snapshot.
    #[error("it is damaged")]
    #[strum(serialize = "corrupt")]
    Damaged,
    /// Another version of the format.
    #[error("its format is version {0}, and {VERSION} is read here")]
    Version(u16),
    /// A chunk is missing or repeated.
    #[error("chunk {found} came where {expected} was expected")]
    Place {
        /// The expected position.
        expected: u32,
        /// The actual position.
        found: u32,
    },
    /// It is of another worker or rank.
    #[error("it is of another source")]
    OtherSource,
    /// It is of another incarnation of the worker.
    #[error("it is of another process")]
    OtherProcess,
    /// Its writer uses other rules for hash chains.
    #[error("its blocks are of another model, seed or block size")]
    OtherRules,
    /// It has more blocks than may be kept of one source.
    #[error("it holds more than is kept of one source")]
    TooMuch,
}

impl ResidencySnapshotError {
    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        self.into()
    }
}

/// Returns a digest that is equal for routers that hash blocks alike.
fn rules_digest(rules: &BlockMappingRules) -> PrefixId {
    let root = rules.namespace.root(rules.seed, RequestNamespace::default());
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
