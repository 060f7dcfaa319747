//! What routers in front of one fleet tell each other of it: requests in flight, and imprints of what engines hold.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vocabulary::{DpRank, NodeId, WorkerId};

use super::Fleet;
use super::peer_in_flight::{InFlightEntry, InFlightTable, MergeOutcome};
use crate::events::EncodedSnapshot;

impl Fleet {
    /// What this router has in flight, one line for each rank that anything was ever sent to.
    pub fn in_flight(&self) -> Vec<InFlightEntry> {
        let flows = |member: &std::sync::Arc<super::worker_handle::WorkerHandle>| {
            let worker = member.id;
            member.in_flight.entries().into_iter().map(move |flow| InFlightEntry { worker, ..flow })
        };
        let table = self.registry.load();
        table.members.iter().chain(&table.leaving).flat_map(flows).collect()
    }

    /// Another router told what it has in flight. It counts in the workers' load until it is silent for
    /// [`super::SILENCE`].
    pub fn merge_peer_table(&self, router: NodeId, table: InFlightTable, now: Instant) -> MergeOutcome {
        let mut overlay = self.peers.lock();
        let heard = overlay.merge(router, table, now);
        if heard == MergeOutcome::Changed {
            self.update_peer_in_flight(&overlay);
        }
        heard
    }

    /// Forgets routers that are silent. To be called now and then.
    pub fn expire_peers(&self, now: Instant) {
        let mut overlay = self.peers.lock();
        if overlay.expire(now) {
            self.update_peer_in_flight(&overlay);
        }
    }

    /// How many other routers are heard.
    pub fn peer_count(&self) -> usize {
        self.peer_count.load(Ordering::Relaxed)
    }

    /// The routers that are heard, and how old their tables are.
    pub fn peer_ages(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.peers.lock().ages(now)
    }

    /// What is known of a rank's blocks, for another router; none unless all of it is known.
    pub fn residency_snapshot(
        &self,
        worker: WorkerId,
        rank: DpRank,
    ) -> impl Future<Output = Option<EncodedSnapshot>> + Send + 'static {
        let asked = self.member(worker).map(|member| member.exports.request(rank));
        async move { asked?.await }
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
