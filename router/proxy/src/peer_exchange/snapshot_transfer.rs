//! Serves residency snapshots to peers: written by the follower of an event source, kept until all chunks were fetched.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ownership::PeerError;
use parking_lot::Mutex;
use tokio::time::timeout;
use workers_shim::events::EncodedSnapshot;
use workers_shim::fleet::Fleet;

use super::message::{SnapshotTransferReply, SnapshotTransferRequest};
use crate::telemetry::peer_exchange_metrics::ExchangeMetrics;

/// Timeout for the follower's export, which it does between two messages of its engine.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long an outgoing snapshot is kept without being requested.
const TRANSFER_TTL: Duration = Duration::from_secs(10);
/// Limits for outgoing snapshots: their number, and the bytes of all of them.
const MAX_TRANSFERS: usize = 8;
const MAX_BYTES: usize = 512 << 20;

/// Snapshots that peers are fetching.
#[derive(Default)]
pub(super) struct SnapshotServer(Mutex<OutgoingSnapshots>);

#[derive(Default)]
struct OutgoingSnapshots {
    open: HashMap<u64, OutgoingSnapshot>,
    last_id: u64,
}

struct OutgoingSnapshot {
    chunks: Vec<Bytes>,
    last_used: Instant,
}

impl SnapshotServer {
    pub(super) async fn answer(
        &self,
        fleet: &Fleet,
        metrics: &ExchangeMetrics,
        question: &[u8],
    ) -> Result<Bytes, PeerError> {
        let answer = match SnapshotTransferRequest::read(question)
            .ok_or_else(|| PeerError::Garbled("a question about snapshots".into()))?
        {
            SnapshotTransferRequest::Chunk { transfer, index } => self.0.lock().chunk(transfer, index),
            SnapshotTransferRequest::Open { .. } if self.0.lock().is_full(Instant::now()) => {
                SnapshotTransferReply::Busy
            }
            SnapshotTransferRequest::Open { worker, rank, process } => {
                let written = timeout(EXPORT_TIMEOUT, fleet.residency_snapshot(worker, rank)).await.ok().flatten();
                let written = written.filter(|written| written.head.process == process);
                written.map_or(SnapshotTransferReply::NotKnown, |written| self.0.lock().begin(written, Instant::now()))
            }
        };
        if matches!(answer, SnapshotTransferReply::Opened { .. }) {
            metrics.residency_snapshots.with_label_values(&["sent"]).inc();
        }
        Ok(answer.write())
    }
}

impl OutgoingSnapshots {
    fn is_full(&mut self, now: Instant) -> bool {
        self.open.retain(|_, transfer| now.saturating_duration_since(transfer.last_used) < TRANSFER_TTL);
        let bytes: usize = self.open.values().flat_map(|transfer| &transfer.chunks).map(Bytes::len).sum();
        self.open.len() >= MAX_TRANSFERS || bytes >= MAX_BYTES
    }

    fn begin(&mut self, written: EncodedSnapshot, now: Instant) -> SnapshotTransferReply {
        let Some(first) = written.chunks.first().cloned() else { return SnapshotTransferReply::NotKnown };
        let Ok(chunks) = u32::try_from(written.chunks.len()) else { return SnapshotTransferReply::NotKnown };
        if chunks == 1 {
            return SnapshotTransferReply::Opened { transfer: 0, chunks, first };
        }
        if self.is_full(now) {
            return SnapshotTransferReply::Busy;
        }
        self.last_id += 1;
        self.open.insert(self.last_id, OutgoingSnapshot { chunks: written.chunks, last_used: now });
        SnapshotTransferReply::Opened { transfer: self.last_id, chunks, first }
    }

    fn chunk(&mut self, id: u64, index: u32) -> SnapshotTransferReply {
        let Some(transfer) = self.open.get_mut(&id) else { return SnapshotTransferReply::Expired };
        let Some(chunk) = transfer.chunks.get(index as usize).cloned() else { return SnapshotTransferReply::Expired };
        transfer.last_used = Instant::now();
        if index as usize + 1 == transfer.chunks.len() {
            self.open.remove(&id);
        }
        SnapshotTransferReply::Chunk(chunk)
    }
}

#[cfg(test)]
mod tests {
    use residency::ResidencySnapshotHeader;
    use vocabulary::{DpRank, Incarnation, WorkerId};

    use super::*;

    fn written(chunks: usize) -> EncodedSnapshot {
        let head = ResidencySnapshotHeader { worker: WorkerId(1), rank: DpRank(0), process: Incarnation(1), next: 0 };
        let chunks = (0..chunks).map(|index| Bytes::from(vec![index as u8])).collect();
        EncodedSnapshot { head, chunks }
    }

    fn transfer_of(answer: SnapshotTransferReply) -> u64 {
        let SnapshotTransferReply::Opened { transfer, .. } = answer else { panic!("{answer:?}") };
        transfer
    }

    #[test]
    fn transfer_closes_after_its_last_chunk() {
        let (mut transfers, now) = (OutgoingSnapshots::default(), Instant::now());
        let id = transfer_of(transfers.begin(written(3), now));
        assert_eq!(transfers.chunk(id, 1), SnapshotTransferReply::Chunk(Bytes::from_static(&[1])));
        assert_eq!(transfers.chunk(id, 1), SnapshotTransferReply::Chunk(Bytes::from_static(&[1])), "asked again");
        assert_eq!(transfers.chunk(id, 2), SnapshotTransferReply::Chunk(Bytes::from_static(&[2])));
        assert_eq!((transfers.chunk(id, 2), transfers.open.len()), (SnapshotTransferReply::Expired, 0));
        assert_eq!(
            transfers.begin(written(1), now),
            SnapshotTransferReply::Opened { transfer: 0, chunks: 1, first: Bytes::from_static(&[0]) }
        );
        assert_eq!((transfers.begin(written(0), now), transfers.open.len()), (SnapshotTransferReply::NotKnown, 0));
    }

    #[test]
    fn outgoing_snapshots_are_bounded_and_expire() {
        let (mut transfers, now) = (OutgoingSnapshots::default(), Instant::now());
        for _ in 0..MAX_TRANSFERS {
            transfer_of(transfers.begin(written(2), now));
        }
        assert_eq!(transfers.begin(written(2), now), SnapshotTransferReply::Busy);
        assert!(transfers.is_full(now + TRANSFER_TTL / 2) && !transfers.is_full(now + TRANSFER_TTL));
        assert_eq!(transfers.chunk(1, 0), SnapshotTransferReply::Expired);
    }
}
