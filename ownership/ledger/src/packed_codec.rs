//! Compact binary encoding of records: varints for numbers, sixteen bytes for ids.
//!
//! Reads only what this process wrote, so an invalid byte is a bug and panics.

use vocabulary::{Blocks, DpRank, Epoch, Incarnation, Owner, PrefixId, WorkerId};

use crate::PrefixPoint;

/// Growing byte buffer.
pub(crate) struct PackedWriter(pub(crate) Vec<u8>);

impl PackedWriter {
    /// Writes a varint: seven bits per byte, lowest first.
    pub(crate) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    pub(crate) fn id(&mut self, id: u128) {
        self.0.extend(id.to_le_bytes());
    }

    pub(crate) fn epoch(&mut self, epoch: Epoch) {
        self.number(u64::from(epoch.generation));
        self.number(epoch.index);
        self.number(u64::from(epoch.position));
    }

    pub(crate) fn owner(&mut self, owner: Owner) {
        self.0.extend(owner.worker.0.to_le_bytes());
        self.number(owner.incarnation.0);
        self.number(u64::from(owner.rank.0));
    }

    pub(crate) fn point(&mut self, point: PrefixPoint) {
        self.number(point.blocks.0);
        self.id(point.id.0);
    }
}

/// Bytes that are left to read.
pub(crate) struct PackedReader<'a>(pub(crate) &'a [u8]);

impl PackedReader<'_> {
    pub(crate) fn skip(&mut self, bytes: usize) {
        self.0 = &self.0[bytes..];
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let (fixed, rest) = self.0.split_first_chunk().expect("packed records are whole");
        self.0 = rest;
        *fixed
    }

    pub(crate) fn number(&mut self) -> u64 {
        let (mut number, mut shift) = (0, 0);
        loop {
            let [byte] = self.array();
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return number;
            }
            shift += 7;
        }
    }

    pub(crate) fn id(&mut self) -> u128 {
        u128::from_le_bytes(self.array())
    }

    pub(crate) fn epoch(&mut self) -> Epoch {
        Epoch { generation: self.number() as u32, index: self.number(), position: self.number() as u32 }
    }

    pub(crate) fn owner(&mut self) -> Owner {
        let worker = WorkerId(u64::from_le_bytes(self.array()));
        Owner { worker, incarnation: Incarnation(self.number()), rank: DpRank(self.number() as u16) }
    }

    pub(crate) fn point(&mut self) -> PrefixPoint {
        PrefixPoint { blocks: Blocks(self.number()), id: PrefixId(self.id()) }
    }
}
