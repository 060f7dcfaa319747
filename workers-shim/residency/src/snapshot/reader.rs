//! Reads chunks of a snapshot. No chunk is used before its digest is verified.

use vocabulary::{DpRank, Incarnation, PrefixId, WorkerId};

use super::wire::{ChunkCursor, ORPHAN, PLACED};
use super::{
    DIGEST, MAGIC, MAX_CHUNK_BYTES, ResidencySnapshot, ResidencySnapshotError, ResidencySnapshotHeader, VERSION,
    chain_digest, rules_digest,
};
use crate::block_tree::BlocksByEnd;
use crate::index::ResidencyChange;
use crate::source::{BlockMappingRules, SourceBlocks};

/// A partially read snapshot.
pub struct ResidencySnapshotReader {
    worker: WorkerId,
    rank: DpRank,
    process: Incarnation,
    head: Option<(ResidencySnapshotHeader, RecordCounts)>,
    source: SourceBlocks,
    ends: BlocksByEnd,
    changes: Vec<ResidencyChange>,
    next_chunk: u32,
    digest: PrefixId,
}

/// Numbers of records according to the header.
#[derive(Clone, Copy)]
struct RecordCounts {
    blocks: u64,
    orphans: u64,
}

/// Result of reading a chunk.
pub enum ReadProgress {
    /// More chunks are needed.
    More(ResidencySnapshotReader),
    /// The snapshot is complete.
    Complete(ResidencySnapshot),
}

impl ResidencySnapshotReader {
    /// Creates a reader for a source, with the rules that apply here and the current process.
    pub fn new((worker, rank): (WorkerId, DpRank), incarnation: Incarnation, rules: BlockMappingRules) -> Self {
        let (source, digest) = (SourceBlocks::new(rules), PrefixId(0));
        let (ends, changes) = (BlocksByEnd::default(), Vec::new());
        Self { worker, rank, process: incarnation, head: None, source, ends, changes, next_chunk: 0, digest }
    }

    /// Reads the next chunk.
    pub fn take(mut self, chunk: &[u8]) -> Result<ReadProgress, ResidencySnapshotError> {
        let mut wire = self.verify_chunk(chunk)?;
        let is_last = match wire.u8()? {
            0 => false,
            1 => true,
            _ => return Err(ResidencySnapshotError::Damaged),
        };
        let found = wire.u32()?;
        if found != self.next_chunk {
            return Err(ResidencySnapshotError::Place { expected: self.next_chunk, found });
        }
        self.next_chunk += 1;
        let (head, promised) = match self.head {
            Some(head) => head,
            None => *self.head.insert(self.head(&mut wire)?),
        };
        while !wire.0.is_empty() {
            self.record(&mut wire)?;
        }
        let is_whole = (self.source.len() as u64, self.source.orphans() as u64) == (promised.blocks, promised.orphans);
        match (is_last, is_whole) {
            (false, _) => Ok(ReadProgress::More(self)),
            (true, true) => {
                Ok(ReadProgress::Complete(ResidencySnapshot { head, source: self.source, changes: self.changes }))
            }
            (true, false) => Err(ResidencySnapshotError::Damaged),
        }
    }

    /// Verifies a chunk; returns it without digest, magic and version.
    fn verify_chunk<'a>(&mut self, chunk: &'a [u8]) -> Result<ChunkCursor<'a>, ResidencySnapshotError> {
        if chunk.len() > MAX_CHUNK_BYTES {
            return Err(ResidencySnapshotError::TooMuch);
        }
        let (content, digest) =
            chunk.split_at_checked(chunk.len().saturating_sub(DIGEST)).ok_or(ResidencySnapshotError::Damaged)?;
        let mut wire = ChunkCursor(content);
        if wire.take(MAGIC.len())? != MAGIC {
            return Err(ResidencySnapshotError::Damaged);
        }
        let version = wire.u16()?;
        if version != VERSION {
            return Err(ResidencySnapshotError::Version(version));
        }
        let place = ChunkCursor(wire.0.get(1..).unwrap_or_default()).u32()?;
        if place != self.next_chunk {
            return Err(ResidencySnapshotError::Place { expected: self.next_chunk, found: place });
        }
        let expected = chain_digest(self.digest, content);
        if digest != expected.0.to_le_bytes() {
            return Err(ResidencySnapshotError::Damaged);
        }
        self.digest = expected;
        Ok(wire)
    }

    fn head(
        &self,
        wire: &mut ChunkCursor<'_>,
    ) -> Result<(ResidencySnapshotHeader, RecordCounts), ResidencySnapshotError> {
        let head = ResidencySnapshotHeader {
            worker: WorkerId(wire.u64()?),
            rank: DpRank(wire.u16()?),
            process: Incarnation(wire.u64()?),
            next: wire.u64()?,
        };
        let (rules, blocks, orphans) = (wire.u128()?, wire.u64()?, wire.u64()?);
        let ours = self.source.rules();
        if (head.worker, head.rank) != (self.worker, self.rank) {
            return Err(ResidencySnapshotError::OtherSource);
        }
        if head.process != self.process {
            return Err(ResidencySnapshotError::OtherProcess);
        }
        if rules != rules_digest(ours).0 {
            return Err(ResidencySnapshotError::OtherRules);
        }
        if blocks > ours.max_blocks as u64 || orphans > ours.max_orphans as u64 {
            return Err(ResidencySnapshotError::TooMuch);
        }
        Ok((head, RecordCounts { blocks, orphans }))
    }

    /// Reads one block. Rejects more blocks than announced, and repeated ones.
    fn record(&mut self, wire: &mut ChunkCursor<'_>) -> Result<(), ResidencySnapshotError> {
        let promised = self.head.map_or(RecordCounts { blocks: 0, orphans: 0 }, |(_, promised)| promised);
        let is_new = match wire.u8()? {
            PLACED if (self.source.len() as u64) < promised.blocks => {
                self.source.adopt_placed(wire.placed()?, &mut self.ends, &mut self.changes)
            }
            ORPHAN if (self.source.orphans() as u64) < promised.orphans => {
                let (name, orphan) = wire.orphan()?;
                self.source.adopt_orphan(name, orphan)
            }
            _ => return Err(ResidencySnapshotError::Damaged),
        };
        if is_new { Ok(()) } else { Err(ResidencySnapshotError::Damaged) }
    }
}
