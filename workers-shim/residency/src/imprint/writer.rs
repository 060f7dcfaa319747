//! From a source to chunks, one at a time, so that whoever writes them can do something else in between.

use std::collections::hash_map::Iter;

use vocabulary::PrefixId;

use super::{CHUNK, ImprintHead, MAGIC, VERSION, digest_after, digest_of, wire};
use crate::blocks::Placed;
use crate::event::EngineHash;
use crate::orphans::Orphan;
use crate::source::Source;

type Placing<'a> = Box<dyn Iterator<Item = (EngineHash, Placed)> + Send + Sync + 'a>;

/// The chunks of an imprint, first one first. The source must not change meanwhile, which the borrow sees to.
pub struct ImprintWriter<'a> {
    head: ImprintHead,
    first: Option<Vec<u8>>,
    blocks: Placing<'a>,
    orphans: Iter<'a, EngineHash, Orphan>,
    place: u32,
    digest: PrefixId,
    is_over: bool,
}

impl<'a> ImprintWriter<'a> {
    pub(crate) fn new(source: &'a Source, head: ImprintHead) -> Self {
        let mut bytes = Vec::with_capacity(CHUNK);
        bytes.extend_from_slice(&head.worker.0.to_le_bytes());
        bytes.extend_from_slice(&head.rank.0.to_le_bytes());
        bytes.extend_from_slice(&head.process.0.to_le_bytes());
        bytes.extend_from_slice(&head.next.to_le_bytes());
        bytes.extend_from_slice(&digest_of(source.rules()).0.to_le_bytes());
        bytes.extend_from_slice(&(source.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(source.orphans() as u64).to_le_bytes());
        Self {
            head,
            first: Some(bytes),
            blocks: Box::new(source.placed()),
            orphans: source.waiting(),
            place: 0,
            digest: PrefixId(0),
            is_over: false,
        }
    }

    /// Of what it is.
    pub fn head(&self) -> ImprintHead {
        self.head
    }

    /// Adds records until the chunk is full; whether there was nothing left to add.
    fn fill(&mut self, chunk: &mut Vec<u8>) -> bool {
        while chunk.len() < CHUNK {
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

impl Iterator for ImprintWriter<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        if self.is_over {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK + (CHUNK >> 4));
        chunk.extend_from_slice(&MAGIC);
        chunk.extend_from_slice(&VERSION.to_le_bytes());
        let end = chunk.len();
        chunk.push(0);
        chunk.extend_from_slice(&self.place.to_le_bytes());
        chunk.extend(self.first.take().unwrap_or_default());
        self.is_over = self.fill(&mut chunk);
        chunk[end] = u8::from(self.is_over);
        self.digest = digest_after(self.digest, &chunk);
        chunk.extend_from_slice(&self.digest.0.to_le_bytes());
        self.place += 1;
        Some(chunk)
    }
}
