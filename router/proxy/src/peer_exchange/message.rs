//! Wire format of the messages between routers. The first byte is the version; a message that cannot be parsed is
//! refused.
//!
//! A report of requests in flight is MessagePack. Questions and answers about residency snapshots, all numbers little
//! endian:
//!
//! ```text
//! open:   0, worker u64, rank u16, process u64     ->  not known: 0 | opened: 1, transfer u64, chunks u32, first chunk
//! chunk:  1, transfer u64, index u32               ->  chunk: 2, bytes | expired: 3
//!                                                      busy: 4
//! ```

use bytes::{BufMut as _, Bytes, BytesMut};
use vocabulary::{DpRank, Incarnation, WorkerId};
use workers_shim::fleet::InFlightReport;

const VERSION: u8 = 1;
/// Largest report that is read, in bytes, and its maximum number of entries.
const MAX_TABLE_BYTES: usize = 1 << 20;
const MAX_FLOWS: usize = 1 << 14;

/// Encodes a report; `None` when that fails, which a report of numbers never does.
pub(super) fn write_table(table: &InFlightReport) -> Option<Bytes> {
    let mut bytes = vec![VERSION];
    rmp_serde::encode::write(&mut bytes, table).ok()?;
    Some(bytes.into())
}

pub(super) fn read_table(bytes: &[u8]) -> Option<InFlightReport> {
    let (&VERSION, content) = bytes.split_first()? else { return None };
    if content.len() > MAX_TABLE_BYTES {
        return None;
    }
    let table: InFlightReport = rmp_serde::from_slice(content).ok()?;
    (table.flows.len() <= MAX_FLOWS).then_some(table)
}

/// Request of a snapshot transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SnapshotTransferRequest {
    /// Opens a transfer of everything that is known of this rank of this process.
    Open { worker: WorkerId, rank: DpRank, process: Incarnation },
    /// Requests a later chunk.
    Chunk { transfer: u64, index: u32 },
}

/// Reply to a request of a snapshot transfer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum SnapshotTransferReply {
    /// The peer does not know all of it.
    NotKnown,
    /// The first of `chunks` chunks.
    Opened { transfer: u64, chunks: u32, first: Bytes },
    /// A later chunk.
    Chunk(Bytes),
    /// The transfer has expired.
    Expired,
    /// The peer has too many transfers.
    Busy,
}

impl SnapshotTransferRequest {
    pub(super) fn write(self) -> Bytes {
        let mut bytes = BytesMut::with_capacity(24);
        bytes.put_u8(VERSION);
        match self {
            SnapshotTransferRequest::Open { worker, rank, process } => {
                bytes.put_u8(0);
                bytes.put_u64_le(worker.0);
                bytes.put_u16_le(rank.0);
                bytes.put_u64_le(process.0);
            }
            SnapshotTransferRequest::Chunk { transfer, index } => {
                bytes.put_u8(1);
                bytes.put_u64_le(transfer);
                bytes.put_u32_le(index);
            }
        }
        bytes.freeze()
    }

    pub(super) fn read(bytes: &[u8]) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<2>()?;
        match (head, rest.len()) {
            ([VERSION, 0], 18) => Some(SnapshotTransferRequest::Open {
                worker: WorkerId(u64_at(rest, 0)?),
                rank: DpRank(u16::from_le_bytes(rest.get(8..10)?.try_into().ok()?)),
                process: Incarnation(u64_at(rest, 10)?),
            }),
            ([VERSION, 1], 12) => {
                Some(SnapshotTransferRequest::Chunk { transfer: u64_at(rest, 0)?, index: u32_at(rest, 8)? })
            }
            _ => None,
        }
    }
}

impl SnapshotTransferReply {
    pub(super) fn write(&self) -> Bytes {
        let mut bytes = BytesMut::new();
        bytes.put_u8(VERSION);
        match self {
            SnapshotTransferReply::NotKnown => bytes.put_u8(0),
            SnapshotTransferReply::Opened { transfer: loan, chunks, first } => {
                bytes.reserve(13 + first.len());
                bytes.put_u8(1);
                bytes.put_u64_le(*loan);
                bytes.put_u32_le(*chunks);
                bytes.put_slice(first);
            }
            SnapshotTransferReply::Chunk(chunk) => {
                bytes.reserve(1 + chunk.len());
                bytes.put_u8(2);
                bytes.put_slice(chunk);
            }
            SnapshotTransferReply::Expired => bytes.put_u8(3),
            SnapshotTransferReply::Busy => bytes.put_u8(4),
        }
        bytes.freeze()
    }

    pub(super) fn read(bytes: &Bytes) -> Option<Self> {
        let (head, rest) = bytes.split_first_chunk::<2>()?;
        match (head, rest.len()) {
            ([VERSION, 0], 0) => Some(SnapshotTransferReply::NotKnown),
            ([VERSION, 1], 12..) => {
                let first = bytes.slice(14..);
                Some(SnapshotTransferReply::Opened { transfer: u64_at(rest, 0)?, chunks: u32_at(rest, 8)?, first })
            }
            ([VERSION, 2], _) => Some(SnapshotTransferReply::Chunk(bytes.slice(2..))),
            ([VERSION, 3], 0) => Some(SnapshotTransferReply::Expired),
            ([VERSION, 4], 0) => Some(SnapshotTransferReply::Busy),
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
    use workers_shim::fleet::RankInFlightCounts;

    use super::*;

    #[test]
    fn messages_round_trip() {
        let questions = [
            SnapshotTransferRequest::Open { worker: WorkerId(u64::MAX), rank: DpRank(7), process: Incarnation(3) },
            SnapshotTransferRequest::Chunk { transfer: 5, index: u32::MAX },
        ];
        for question in questions {
            assert_eq!(SnapshotTransferRequest::read(&question.write()), Some(question));
        }
        let chunk = Bytes::from_static(b"a chunk");
        let answers = [
            SnapshotTransferReply::NotKnown,
            SnapshotTransferReply::Opened { transfer: 9, chunks: 3, first: chunk.clone() },
            SnapshotTransferReply::Chunk(chunk),
            SnapshotTransferReply::Chunk(Bytes::new()),
            SnapshotTransferReply::Expired,
            SnapshotTransferReply::Busy,
        ];
        for answer in answers {
            assert_eq!(SnapshotTransferReply::read(&answer.write()), Some(answer));
        }
        let flow = RankInFlightCounts {
            worker: WorkerId(1),
            rank: DpRank(2),
            dispatched: 3,
            begun: 4,
            finished: 5,
            pending: Tokens(6),
        };
        let table = InFlightReport { boot: 7, sequence: 8, flows: vec![flow; 64] };
        let written = write_table(&table).unwrap();
        assert_eq!(read_table(&written), Some(table));
        assert!(written.len() < 64 * 40, "{} bytes for 64 workers", written.len());
    }

    #[test]
    fn unknown_versions_and_oversized_tables_are_rejected() {
        let flow = RankInFlightCounts {
            worker: WorkerId(1),
            rank: DpRank(0),
            dispatched: 0,
            begun: 0,
            finished: 0,
            pending: Tokens(0),
        };
        let table = |flows| InFlightReport { boot: 1, sequence: 1, flows: vec![flow; flows] };
        assert!(read_table(&write_table(&table(MAX_FLOWS)).unwrap()).is_some());
        assert_eq!(read_table(&write_table(&table(MAX_FLOWS + 1)).unwrap()), None);
        let mut other = write_table(&table(1)).unwrap().to_vec();
        other[0] = 2;
        assert_eq!(read_table(&other), None);
        let mut question = SnapshotTransferRequest::Chunk { transfer: 5, index: 0 }.write().to_vec();
        question[0] = 2;
        assert_eq!(SnapshotTransferRequest::read(&question), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_parse_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let mut bytes = bytes;
            for version in [None, Some(VERSION)] {
                if let (Some(version), Some(first)) = (version, bytes.first_mut()) {
                    *first = version;
                }
                let _ = read_table(&bytes);
                if let Some(question) = SnapshotTransferRequest::read(&bytes) {
                    prop_assert!(question.write() == bytes);
                }
                if let Some(answer) = SnapshotTransferReply::read(&Bytes::copy_from_slice(&bytes)) {
                    prop_assert!(answer.write() == bytes);
                }
            }
        }
    }
}
