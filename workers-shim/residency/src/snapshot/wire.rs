//! Encodes and decodes numbers in a chunk. Every length is checked against the remaining bytes before it is used.

use vocabulary::{BlockHash, PrefixId, Tier};

use super::ResidencySnapshotError;
use crate::block_tree::PlacedBlock;
use crate::copies::{BlockCopies, EngineCopyCount, EngineCopyLocation};
use crate::holder_sets::{plane, tier};
use crate::kv_event::{EngineHash, KvCacheSpecKind};
use crate::orphans::Orphan;

pub(super) const PLACED: u8 = 0;
pub(super) const ORPHAN: u8 = 1;

pub(super) fn put_placed(out: &mut Vec<u8>, name: EngineHash, block: &PlacedBlock) {
    out.push(PLACED);
    out.extend_from_slice(&name.0.to_le_bytes());
    put_option(out, block.parent.map(|before| before.0));
    out.extend_from_slice(&block.end.0.to_le_bytes());
    put_length(out, block.inner_hashes.len());
    block.inner_hashes.iter().for_each(|hash| out.extend_from_slice(&hash.0.to_le_bytes()));
    put_copies(out, &block.copies);
}

pub(super) fn put_orphan(out: &mut Vec<u8>, hash: EngineHash, orphan: &Orphan) {
    out.push(ORPHAN);
    out.extend_from_slice(&hash.0.to_le_bytes());
    put_option(out, orphan.parent.map(|parent| parent.0));
    put_length(out, orphan.extra.len());
    out.extend_from_slice(&orphan.extra);
    put_length(out, orphan.tokens.len());
    orphan.tokens.iter().for_each(|token| out.extend_from_slice(&token.to_le_bytes()));
    put_copies(out, &orphan.copies);
}

fn put_copies(out: &mut Vec<u8>, copies: &BlockCopies) {
    put_length(out, copies.counts().count());
    for EngineCopyCount { location: place, count } in copies.counts() {
        let attention = match place.kind {
            KvCacheSpecKind::Full => 0,
            KvCacheSpecKind::Window => 1,
        };
        out.push(plane(place.tier) as u8);
        out.extend_from_slice(&place.group.to_le_bytes());
        out.push(attention);
        out.extend_from_slice(&count.to_le_bytes());
    }
}

fn put_option(out: &mut Vec<u8>, value: Option<u64>) {
    out.push(u8::from(value.is_some()));
    if let Some(value) = value {
        out.extend_from_slice(&value.to_le_bytes());
    }
}

fn put_length(out: &mut Vec<u8>, length: usize) {
    // A longer one results in a chunk that readers reject.
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
}

/// A position in a chunk.
pub(super) struct ChunkCursor<'a>(pub(super) &'a [u8]);

impl<'a> ChunkCursor<'a> {
    pub(super) fn take(&mut self, count: usize) -> Result<&'a [u8], ResidencySnapshotError> {
        let (head, rest) = self.0.split_at_checked(count).ok_or(ResidencySnapshotError::Damaged)?;
        self.0 = rest;
        Ok(head)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], ResidencySnapshotError> {
        self.take(N)?.try_into().map_err(|_| ResidencySnapshotError::Damaged)
    }

    pub(super) fn u8(&mut self) -> Result<u8, ResidencySnapshotError> {
        Ok(self.bytes::<1>()?[0])
    }

    pub(super) fn u16(&mut self) -> Result<u16, ResidencySnapshotError> {
        self.bytes().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, ResidencySnapshotError> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, ResidencySnapshotError> {
        self.bytes().map(u64::from_le_bytes)
    }

    pub(super) fn u128(&mut self) -> Result<u128, ResidencySnapshotError> {
        self.bytes().map(u128::from_le_bytes)
    }

    fn option(&mut self) -> Result<Option<u64>, ResidencySnapshotError> {
        match self.u8()? {
            0 => Ok(None),
            1 => self.u64().map(Some),
            _ => Err(ResidencySnapshotError::Damaged),
        }
    }

    /// Reads a number of entries, and the bytes of these entries, `each` per entry.
    fn entries(&mut self, each: usize) -> Result<std::slice::ChunksExact<'a, u8>, ResidencySnapshotError> {
        let length = (self.u32()? as usize).checked_mul(each).ok_or(ResidencySnapshotError::Damaged)?;
        Ok(self.take(length)?.chunks_exact(each))
    }

    pub(super) fn placed(&mut self) -> Result<(EngineHash, PlacedBlock), ResidencySnapshotError> {
        let name = EngineHash(self.u64()?);
        let before = self.option()?.map(BlockHash);
        let end = PrefixId(self.u128()?);
        let inner = self.entries(8)?.map(|hash| BlockHash(little_endian(hash))).collect();
        Ok((name, PlacedBlock { parent: before, end, inner_hashes: inner, copies: self.copies()? }))
    }

    pub(super) fn orphan(&mut self) -> Result<(EngineHash, Orphan), ResidencySnapshotError> {
        let name = EngineHash(self.u64()?);
        let parent = self.option()?.map(EngineHash);
        let extra = self.entries(1)?.map(|byte| byte[0]).collect();
        let tokens = self.entries(4)?.map(|token| little_endian(token) as u32).collect();
        Ok((name, Orphan::new(parent, extra, tokens, self.copies()?)))
    }

    /// Reads copies: at least one, each location once, with counts above 0.
    fn copies(&mut self) -> Result<BlockCopies, ResidencySnapshotError> {
        const ENTRY_BYTES: usize = 10;
        let mut copies = BlockCopies::default();
        for counted in self.entries(ENTRY_BYTES)? {
            let mut counted = ChunkCursor(counted);
            let tier = tier_of(counted.u8()?)?;
            let group = counted.u32()?;
            let kind = match counted.u8()? {
                0 => KvCacheSpecKind::Full,
                1 => KvCacheSpecKind::Window,
                _ => return Err(ResidencySnapshotError::Damaged),
            };
            if !copies.insert_location(EngineCopyCount {
                location: EngineCopyLocation { tier, group, kind },
                count: counted.u32()?,
            }) {
                return Err(ResidencySnapshotError::Damaged);
            }
        }
        if copies.is_empty() { Err(ResidencySnapshotError::Damaged) } else { Ok(copies) }
    }
}

fn tier_of(number: u8) -> Result<Tier, ResidencySnapshotError> {
    if number < 3 { Ok(tier(usize::from(number))) } else { Err(ResidencySnapshotError::Damaged) }
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}
