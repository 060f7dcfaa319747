//! What routers send each other, in bytes. A first byte names the version; what cannot be read is refused.
//!
//! A table is MessagePack. Questions and answers about imprints, all numbers little endian:
//!
//! ```text
//! open:   0, worker u64, rank u16, process u64     ->  not known: 0 | opened: 1, loan u64, chunks u32, first chunk
//! chunk:  1, loan u64, place u32                   ->  chunk: 2, bytes | gone: 3
//!                                                      busy: 4
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use vocabulary::{DpRank, Incarnation, WorkerId};
use workers_shim::fleet::InFlightTable;

const VERSION: u8 = 1;
/// Longest table that is read, and most flows in it.
const LONGEST_TABLE: usize = 1 << 20;
const MOST_FLOWS: usize = 1 << 14;

/// A table in bytes; none when it cannot be written, which no table of numbers can.
pub(super) fn write_table(table: &InFlightTable) -> Option<Bytes> {
    let mut bytes = vec![VERSION];
    rmp_serde::encode::write(&mut bytes, table).ok()?;
    Some(bytes.into())
}

pub(super) fn read_table(bytes: &[u8]) -> Option<InFlightTable> {
    let (&VERSION, content) = bytes.split_first()? else { return None };
    if content.len() > LONGEST_TABLE {
        return None;
    }
    let table: InFlightTable = rmp_serde::from_slice(content).ok()?;
    (table.flows.len() <= MOST_FLOWS).then_some(table)
}

/// What is asked about imprints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Question {
    /// Begin: everything that is known of this rank of this process.
    Open { worker: WorkerId, rank: DpRank, process: Incarnation },
    /// A later chunk.
    Chunk { loan: u64, place: u32 },
}

/// What is answered.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Answer {
    /// Not all of it is known there.
    NotKnown,
    /// The first of so many chunks.
    Opened { loan: u64, chunks: u32, first: Bytes },
    /// A later one.
    Chunk(Bytes),
    /// It was not asked for in time.
    Gone,
    /// Too many ask.
    Busy,
}

impl Question {
    pub(super) fn write(self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(24);
        bytes.put_u8(VERSION);
        match self {
            Question::Open { worker, rank, process } => {
                bytes.put_u8(0);
                bytes.put_u64_le(worker.0);
                bytes.put_u16_le(rank.0);
                bytes.put_u64_le(process.0);
            }
            Question::Chunk { loan, place } => {
                bytes.put_u8(1);
                bytes.put_u64_le(loan);
                bytes.put_u32_le(place);
            }
        }
        bytes.freeze()
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<2>()?;
        match (head, rest.len()) {
            ([VERSION, 0], 18) => Some(Question::Open {
                worker: WorkerId(u64_at(rest, 0)?),
                rank: DpRank(u16::from_le_bytes(rest.get(8..10)?.try_into().ok()?)),
                process: Incarnation(u64_at(rest, 10)?),
            }),
            ([VERSION, 1], 12) => Some(Question::Chunk { loan: u64_at(rest, 0)?, place: u32_at(rest, 8)? }),
            _ => None,
        }
    }
}

impl Answer {
    pub(super) fn write(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_u8(VERSION);
        match self {
            Answer::NotKnown => bytes.put_u8(0),
            Answer::Opened { loan, chunks, first } => {
                bytes.reserve(13 + first.len());
                bytes.put_u8(1);
                bytes.put_u64_le(*loan);
                bytes.put_u32_le(*chunks);
                bytes.put_slice(first);
            }
            Answer::Chunk(chunk) => {
                bytes.reserve(1 + chunk.len());
                bytes.put_u8(2);
                bytes.put_slice(chunk);
            }
            Answer::Gone => bytes.put_u8(3),
            Answer::Busy => bytes.put_u8(4),
        }
        bytes.freeze()
    }

    pub(super) fn read(bytes: &Bytes) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<2>()?;
        match (head, rest.len()) {
            ([VERSION, 0], 0) => Some(Answer::NotKnown),
            ([VERSION, 1], 12..) => {
                let first = bytes.slice(14..);
                Some(Answer::Opened { loan: u64_at(rest, 0)?, chunks: u32_at(rest, 8)?, first })
            }
            ([VERSION, 2], _) => Some(Answer::Chunk(bytes.slice(2..))),
            ([VERSION, 3], 0) => Some(Answer::Gone),
            ([VERSION, 4], 0) => Some(Answer::Busy),
            _ => None,
        }
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vocabulary::Tokens;
    use workers_shim::fleet::Flow;

    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let questions = [
            Question::Open { worker: WorkerId(u64::MAX), rank: DpRank(7), process: Incarnation(3) },
            Question::Chunk { loan: 5, place: u32::MAX },
        ];
        for question in questions {
            assert_eq!(Question::read(&question.write()), Some(question));
        }
        let chunk = Bytes::from_static(b"a chunk");
        let answers = [
            Answer::NotKnown,
            Answer::Opened { loan: 9, chunks: 3, first: chunk.clone() },
            Answer::Chunk(chunk),
            Answer::Chunk(Bytes::new()),
            Answer::Gone,
            Answer::Busy,
        ];
        for answer in answers {
            assert_eq!(Answer::read(&answer.write()), Some(answer));
        }
        let flow =
            Flow { worker: WorkerId(1), rank: DpRank(2), dispatched: 3, begun: 4, finished: 5, pending: Tokens(6) };
        let table = InFlightTable { boot: 7, sequence: 8, flows: vec![flow; 64] };
        let written = write_table(&table).unwrap();
        assert_eq!(read_table(&written), Some(table));
        assert!(written.len() < 64 * 40, "{} bytes for 64 workers", written.len());
    }

    #[test]
    fn another_version_and_too_many_flows_are_refused() {
        let flow =
            Flow { worker: WorkerId(1), rank: DpRank(0), dispatched: 0, begun: 0, finished: 0, pending: Tokens(0) };
        let table = |flows| InFlightTable { boot: 1, sequence: 1, flows: vec![flow; flows] };
        assert!(read_table(&write_table(&table(MOST_FLOWS)).unwrap()).is_some());
        assert_eq!(read_table(&write_table(&table(MOST_FLOWS + 1)).unwrap()), None);
        let mut other = write_table(&table(1)).unwrap().to_vec();
        other[0] = 2;
        assert_eq!(read_table(&other), None);
        let mut question = Question::Chunk { loan: 5, place: 0 }.write().to_vec();
        question[0] = 2;
        assert_eq!(Question::read(&question), None);
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = bytes;
            for version in [None, Some(VERSION)] {
                if let (Some(version), Some(first)) = (version, bytes.first_mut()) {
                    *first = version;
                }
                let _ = read_table(&bytes);
                if let Some(question) = Question::read(&bytes) {
                    prop_assert!(question.write() == bytes);
                }
                if let Some(answer) = Answer::read(&Bytes::copy_from_slice(&bytes)) {
                    prop_assert!(answer.write() == bytes);
                }
            }
        }
    }
}
