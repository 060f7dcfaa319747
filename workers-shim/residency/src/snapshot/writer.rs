//! Writes a source to chunks, one at a time, so that the caller can do other work in between.

use std::collections::hash_map::Iter;

use vocabulary::PrefixId;

use super::{CHUNK_BYTES, MAGIC, ResidencySnapshotHeader, VERSION, chain_digest, rules_digest, wire};
use crate::block_tree::PlacedBlock;
use crate::kv_event::EngineHash;
use crate::orphans::Orphan;
use crate::source::SourceBlocks;

type PlacedBlockIter<'a> = Box<dyn Iterator<Item = (EngineHash, PlacedBlock)> + Send + Sync + 'a>;

/// Iterator over the chunks of a snapshot. It borrows the source, which therefore cannot change in the meantime.
pub struct ResidencySnapshotWriter<'a> {
    head: ResidencySnapshotHeader,
    first: Option<Vec<u8>>,
    blocks: PlacedBlockIter<'a>,
    orphans: Iter<'a, EngineHash, Orphan>,
    next_chunk: u32,
    digest: PrefixId,
    is_finished: bool,
}

impl<'a> ResidencySnapshotWriter<'a> {
    pub(crate) fn new(source: &'a SourceBlocks, head: ResidencySnapshotHeader) -> Self {
        let mut bytes = Vec::with_capacity(CHUNK_BYTES);
        bytes.extend_from_slice(&head.worker.0.to_le_bytes());
        bytes.extend_from_slice(&head.rank.0.to_le_bytes());
        bytes.extend_from_slice(&head.process.0.to_le_bytes());
        bytes.extend_from_slice(&head.next.to_le_bytes());
        bytes.extend_from_slice(&rules_digest(source.rules()).0.to_le_bytes());
        bytes.extend_from_slice(&(source.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(source.orphans() as u64).to_le_bytes());
        Self {
            head,
            first: Some(bytes),
            blocks: Box::new(source.placed()),
            orphans: source.orphan_entries(),
            next_chunk: 0,
            digest: PrefixId(0),
            is_finished: false,
        }
    }

    /// Returns the header.
    pub fn head(&self) -> ResidencySnapshotHeader {
        self.head
    }

    /// Adds records until the chunk is full; returns whether all were written.
    fn fill_chunk(&mut self, chunk: &mut Vec<u8>) -> bool {
        while chunk.len() < CHUNK_BYTES {
            if let Some((name, block)) = self.blocks.next() {
                wire::put_placed(chunk, name, &block);
            } else if let Some((name, orphan)) = self.orphans.next() {
                wire::put_orphan(chunk, *name, orphan);
            } else {
                return true;
            }
        }
        false
    }
}

impl Iterator for ResidencySnapshotWriter<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.is_finished {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK_BYTES + (CHUNK_BYTES >> 4));
        chunk.extend_from_slice(&MAGIC);
        chunk.extend_from_slice(&VERSION.to_le_bytes());
        let end = chunk.len();
        chunk.push(0);
        chunk.extend_from_slice(&self.next_chunk.to_le_bytes());
        chunk.extend(self.first.take().unwrap_or_default());
        self.is_finished = self.fill_chunk(&mut chunk);
        chunk[end] = u8::from(self.is_finished);
        self.digest = chain_digest(self.digest, &chunk);
        chunk.extend_from_slice(&self.digest.0.to_le_bytes());
        self.next_chunk += 1;
        Some(chunk)
    }
}
