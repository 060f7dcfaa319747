//! What routers with the same workers exchange: requests in flight, and residency snapshots.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vocabulary::{DpRank, NodeId, WorkerId};

use super::Fleet;
use super::peer_in_flight::{InFlightReport, MergeOutcome, RankInFlightCounts};
use crate::events::EncodedSnapshot;

impl Fleet {
    /// Returns this router's counters, one entry for each rank to which anything was ever sent.
    pub fn in_flight(&self) -> Vec<RankInFlightCounts> {
        let flows = |member: &std::sync::Arc<super::worker_handle::WorkerHandle>| {
            let worker = member.id;
            member.in_flight.entries().into_iter().map(move |flow| RankInFlightCounts { worker, ..flow })
        };
        let table = self.registry.load();
        table.members.iter().chain(&table.leaving).flat_map(flows).collect()
    }

    /// Stores another router's report of its requests in flight. It counts as load of the workers until that router is
    /// silent for [`super::SILENCE_TIMEOUT`].
    pub fn merge_peer_table(&self, node: NodeId, table: InFlightReport, now: Instant) -> MergeOutcome {
        let mut overlay = self.peers.lock();
        let merged = overlay.merge(node, table, now);
        if merged == MergeOutcome::Changed {
            self.update_peer_in_flight(&overlay);
        }
        merged
    }

    /// Removes silent routers. Must be called periodically.
    pub fn expire_peers(&self, now: Instant) {
        let mut overlay = self.peers.lock();
        if overlay.expire(now) {
            self.update_peer_in_flight(&overlay);
        }
    }

    /// Returns the number of reporting routers.
    pub fn peer_count(&self) -> usize {
        self.peer_count.load(Ordering::Relaxed)
    }

    /// Returns the reporting routers and the ages of their reports.
    pub fn peer_ages(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.peers.lock().ages(now)
    }

    /// Returns a snapshot of a rank's blocks for another router; None unless they are known exactly.
    pub fn residency_snapshot(
        &self,
        worker: WorkerId,
        rank: DpRank,
    ) -> impl Future<Output = Option<EncodedSnapshot>> + Send + 'static {
        let requests = self.member(worker).map(|member| member.exports.request(rank));
        async move { requests?.await }
    }

    fn update_peer_in_flight(&self, overlay: &super::peer_in_flight::PeerInFlightTables) {
        self.peer_count.store(overlay.live_routers(), Ordering::Relaxed);
        let sums = overlay.sums();
        let table = self.registry.load();
        for member in table.members.iter().chain(&table.leaving) {
            let others = sums.get(&member.id).copied().unwrap_or(overlay.empty_sum());
            if member.in_flight.counters.set_peer_in_flight(others) {
                member.invalidate_views();
            }
        }
    }
}
