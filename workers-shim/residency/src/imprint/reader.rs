//! From chunks to a source, none of them believed before its digest was.

use vocabulary::{DpRank, Incarnation, PrefixId, WorkerId};

use super::wire::{ORPHAN, PLACED, Wire};
use super::{DIGEST, Imprint, ImprintError, ImprintHead, LONGEST_CHUNK, MAGIC, VERSION, digest_after, digest_of};
use crate::blocks::Ends;
use crate::index::Change;
use crate::source::{Source, SourceRules};

/// An imprint of which some chunks are read.
pub struct ImprintReader {
    worker: WorkerId,
    rank: DpRank,
    process: Incarnation,
    head: Option<(ImprintHead, Promised)>,
    source: Source,
    ends: Ends,
    changes: Vec<Change>,
    place: u32,
    digest: PrefixId,
}

/// How many records the head says there are.
#[derive(Clone, Copy)]
struct Promised {
    blocks: u64,
    orphans: u64,
}

/// What a chunk made of a reader.
pub enum Taken {
    /// More chunks are needed.
    More(ImprintReader),
    /// That was all.
    Whole(Imprint),
}

impl ImprintReader {
    /// Of a source as it is known here: the rules by which its blocks are named, and the process that is behind it now.
    pub fn new((worker, rank): (WorkerId, DpRank), process: Incarnation, rules: SourceRules) -> Self {
        let (source, digest) = (Source::new(rules), PrefixId(0));
        let (ends, changes) = (Ends::default(), Vec::new());
        Self { worker, rank, process, head: None, source, ends, changes, place: 0, digest }
    }

    /// Reads the next chunk.
    pub fn take(mut self, chunk: &[u8]) -> Result<Taken, ImprintError> {
        let mut wire = self.checked(chunk)?;
        let is_last = match wire.u8()? {
            0 => false,
            1 => true,
            _ => return Err(ImprintError::Damaged),
        };
        let found = wire.u32()?;
        if found != self.place {
            return Err(ImprintError::Place { expected: self.place, found });
        }
        self.place += 1;
        let (head, promised) = match self.head {
            Some(head) => head,
            None => *self.head.insert(self.head(&mut wire)?),
        };
        while !wire.0.is_empty() {
            self.record(&mut wire)?;
        }
        let is_whole = (self.source.len() as u64, self.source.orphans() as u64) == (promised.blocks, promised.orphans);
        match (is_last, is_whole) {
            (false, _) => Ok(Taken::More(self)),
            (true, true) => Ok(Taken::Whole(Imprint { head, source: self.source, changes: self.changes })),
            (true, false) => Err(ImprintError::Damaged),
        }
    }

    /// The chunk without its digest, if that is right, and without magic and version.
    fn checked<'a>(&mut self, chunk: &'a [u8]) -> Result<Wire<'a>, ImprintError> {
        if chunk.len() > LONGEST_CHUNK {
            return Err(ImprintError::TooMuch);
        }
        let (content, digest) =
            chunk.split_at_checked(chunk.len().saturating_sub(DIGEST)).ok_or(ImprintError::Damaged)?;
        let mut wire = Wire(content);
        if wire.take(MAGIC.len())? != MAGIC {
            return Err(ImprintError::Damaged);
        }
        let version = wire.u16()?;
        if version != VERSION {
            return Err(ImprintError::Version(version));
        }
        let place = Wire(wire.0.get(1..).unwrap_or_default()).u32()?;
        if place != self.place {
            return Err(ImprintError::Place { expected: self.place, found: place });
        }
        let expected = digest_after(self.digest, content);
        if digest != expected.0.to_le_bytes() {
            return Err(ImprintError::Damaged);
        }
        self.digest = expected;
        Ok(wire)
    }

    fn head(&self, wire: &mut Wire<'_>) -> Result<(ImprintHead, Promised), ImprintError> {
        let head = ImprintHead {
            worker: WorkerId(wire.u64()?),
            rank: DpRank(wire.u16()?),
            process: Incarnation(wire.u64()?),
            next: wire.u64()?,
        };
        let (rules, blocks, orphans) = (wire.u128()?, wire.u64()?, wire.u64()?);
        let ours = self.source.rules();
        if (head.worker, head.rank) != (self.worker, self.rank) {
            return Err(ImprintError::OtherSource);
        }
        if head.process != self.process {
            return Err(ImprintError::OtherProcess);
        }
        if rules != digest_of(ours).0 {
            return Err(ImprintError::OtherRules);
        }
        if blocks > ours.most_blocks as u64 || orphans > ours.most_orphans as u64 {
            return Err(ImprintError::TooMuch);
        }
        Ok((head, Promised { blocks, orphans }))
    }

    /// One block. More than were promised are refused, and so is one that comes twice.
    fn record(&mut self, wire: &mut Wire<'_>) -> Result<(), ImprintError> {
        let promised = self.head.map_or(Promised { blocks: 0, orphans: 0 }, |(_, promised)| promised);
        let is_new = match wire.u8()? {
            PLACED if (self.source.len() as u64) < promised.blocks => {
                self.source.adopt_placed(wire.placed()?, &mut self.ends, &mut self.changes)
            }
            ORPHAN if (self.source.orphans() as u64) < promised.orphans => {
                let (name, orphan) = wire.orphan()?;
                self.source.adopt_orphan(name, orphan)
            }
            _ => return Err(ImprintError::Damaged),
        };
        if is_new { Ok(()) } else { Err(ImprintError::Damaged) }
    }
}
