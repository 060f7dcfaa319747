//! What routers in front of one fleet tell each other of it: requests in flight, and imprints of what engines hold.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use vocabulary::{DpRank, NodeId, WorkerId};

use super::Fleet;
use super::overlay::{Flow, Heard, InFlightTable};
use crate::events::Exported;

impl Fleet {
    /// What this router has in flight, one line for each rank that anything was ever sent to.
    pub fn in_flight(&self) -> Vec<Flow> {
        let flows = |member: &std::sync::Arc<super::member::Member>| {
            let worker = member.id;
            member.desk.flows().into_iter().map(move |flow| Flow { worker, ..flow })
        };
        let table = self.roll.load();
        table.members.iter().chain(&table.leaving).flat_map(flows).collect()
    }

    /// Another router told what it has in flight. It counts in the workers' load until it is silent for
    /// [`super::SILENCE`].
    pub fn hear(&self, router: NodeId, table: InFlightTable, now: Instant) -> Heard {
        let mut overlay = self.overlay.lock();
        let heard = overlay.hear(router, table, now);
        if heard == Heard::News {
            self.spread(&overlay);
        }
        heard
    }

    /// Forgets routers that are silent. To be called now and then.
    pub fn forget_silent(&self, now: Instant) {
        let mut overlay = self.overlay.lock();
        if overlay.expire(now) {
            self.spread(&overlay);
        }
    }

    /// How many other routers are heard.
    pub fn routers(&self) -> usize {
        self.routers.load(Ordering::Relaxed)
    }

    /// The routers that are heard, and how old their tables are.
    pub fn heard(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.overlay.lock().ages(now)
    }

    /// What is known of a rank's blocks, for another router; none unless all of it is known.
    pub fn imprint(&self, worker: WorkerId, rank: DpRank) -> impl Future<Output = Option<Exported>> + Send + 'static {
        let asked = self.member(worker).map(|member| member.exports.ask(rank));
        async move { asked?.await }
    }

    fn spread(&self, overlay: &super::overlay::Overlay) {
        self.routers.store(overlay.heard(), Ordering::Relaxed);
        let sums = overlay.sums();
        let table = self.roll.load();
        for member in table.members.iter().chain(&table.leaving) {
            let others = sums.get(&member.id).copied().unwrap_or(overlay.none());
            if member.desk.counters.overlay(others) {
                member.changed();
            }
        }
    }
}
