//! Exports a rank's residency snapshot to other routers, and adopts one from them.

use bytes::Bytes;
use vocabulary::{Incarnation, KvIndexState};

use super::rank::RankFollower;
use crate::events::snapshot_provider::{EncodedSnapshot, SnapshotRequest, SnapshotSender};

impl RankFollower {
    /// Writes a snapshot, if the blocks are known exactly. Events wait in the socket meanwhile.
    pub(super) async fn export_snapshot(&self, reply: SnapshotSender) {
        let exact = self.stream.kv_index_state() == KvIndexState::Exact && self.worker.incarnation != Incarnation(0);
        let mut chunks = Vec::new();
        let mut writer = self.feed.snapshot(self.worker.incarnation, self.stream.next());
        let head = writer.head();
        while exact && !reply.is_closed() {
            let Some(chunk) = writer.next() else { break };
            chunks.push(Bytes::from(chunk));
            // Lets other tasks run between chunks.
            tokio::task::yield_now().await;
        }
        // The requester may be gone.
        let _ = reply.send(exact.then_some(EncodedSnapshot { head, chunks }));
    }

    /// Adopts a snapshot of another router, unless the blocks are known exactly here.
    pub(super) async fn adopt_snapshot(&mut self) {
        let process = self.worker.incarnation;
        if self.stream.kv_index_state() == KvIndexState::Exact || process == Incarnation(0) {
            return;
        }
        let Some(snapshots) = &self.worker.environment.snapshots else { return };
        let (worker, rank) = (self.worker.member.id, self.source.rank);
        let request = SnapshotRequest { worker, rank, process, rules: self.feed.rules().clone() };
        let Some(snapshot) = snapshots.fetch(request).await else { return };
        // Messages received since the snapshot have to be applied again, from a replay.
        if snapshot.head.next < self.stream.next() && self.source.replay.is_none() {
            return;
        }
        let (endpoint, next) = (&self.worker.member.spec.endpoint, snapshot.head.next);
        tracing::debug!(worker = %endpoint, next, "a snapshot of another router is taken over");
        self.worker.member.events.counts.lock().peer_snapshots += 1;
        self.stream.adopt(process, next);
        self.feed.adopt(snapshot);
    }
}
