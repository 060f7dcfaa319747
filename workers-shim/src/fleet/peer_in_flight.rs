//! Requests that other routers have in flight at this fleet's workers, as they report them. Pure; time is an argument.
//!
//! Every report contains all of a router's counters: requests sent, those with a first token, those finished, and the
//! prompt tokens still to be computed. So a lost report loses nothing, and nothing is counted twice. The engines' own
//! metrics already include most of these requests; [`super::in_flight`] adds only what changed since the last scrape.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, NodeId, Tokens, WorkerId};

/// A router without reports for this long counts as having nothing in flight.
pub const SILENCE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of routers; further ones are ignored.
const MAX_ROUTERS: usize = 256;

/// One router's counters at one rank of one worker, since that router started.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RankInFlightCounts {
    /// The worker.
    pub worker: WorkerId,
    /// The data-parallel rank.
    pub rank: DpRank,
    /// Requests sent.
    pub dispatched: u64,
    /// Requests of these that got a first token, or ended without one.
    pub begun: u64,
    /// Requests of these that ended.
    pub finished: u64,
    /// Prompt tokens of the others that are not known to be computed.
    pub pending: Tokens,
}

/// All counters of one router at one time.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct InFlightReport {
    /// Identifies the run of the router: its start time, on its own clock. A later run replaces an earlier one.
    pub boot: u64,
    /// Increases with every report of a run.
    pub sequence: u64,
    /// One entry for each rank to which anything was ever sent.
    pub flows: Vec<RankInFlightCounts>,
}

/// Result of merging a report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MergeOutcome {
    /// The report was stored.
    Changed,
    /// A newer one was stored before.
    Stale,
    /// Too many routers report.
    TooMany,
}

/// Sum over all other routers, at one worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct PeerInFlight {
    /// Sums can be compared only within one generation: they cover the same runs of the same routers.
    pub(super) generation: u64,
    pub(super) dispatched: u64,
    pub(super) begun: u64,
    pub(super) finished: u64,
    pub(super) pending: Tokens,
}

impl PeerInFlight {
    /// Returns the unfinished requests.
    pub(super) fn in_flight(&self) -> u64 {
        self.dispatched.saturating_sub(self.finished)
    }

    /// Returns the requests without a first token.
    pub(super) fn prefilling(&self) -> u64 {
        self.dispatched.saturating_sub(self.begun)
    }

    /// Returns the requests whose answers are being generated.
    pub(super) fn decoding(&self) -> u64 {
        self.begun.saturating_sub(self.finished)
    }

    /// Returns the requests sent and finished since `earlier`; zeros if the two sums cover different routers or runs.
    pub(super) fn change_since(&self, earlier: &Self) -> (u64, u64) {
        if self.generation != earlier.generation {
            return (0, 0);
        }
        (self.dispatched.saturating_sub(earlier.dispatched), self.finished.saturating_sub(earlier.finished))
    }

    fn add(&mut self, flow: &RankInFlightCounts) {
        self.dispatched = self.dispatched.saturating_add(flow.dispatched);
        self.begun = self.begun.saturating_add(flow.begun);
        self.finished = self.finished.saturating_add(flow.finished);
        self.pending += flow.pending;
    }
}

/// The newest report of each reporting router.
#[derive(Debug, Default)]
pub(super) struct PeerInFlightTables {
    routers: BTreeMap<NodeId, ReceivedTable>,
    generation: u64,
}

#[derive(Debug)]
struct ReceivedTable {
    table: InFlightReport,
    received: Instant,
}

impl PeerInFlightTables {
    /// Stores a router's report.
    pub(super) fn merge(&mut self, node: NodeId, table: InFlightReport, now: Instant) -> MergeOutcome {
        self.expire(now);
        let known = self.routers.get(&node).map(|known| (known.table.boot, known.table.sequence));
        if known.is_some_and(|known| (table.boot, table.sequence) <= known) {
            return MergeOutcome::Stale;
        }
        if known.is_none() && self.routers.len() >= MAX_ROUTERS {
            return MergeOutcome::TooMany;
        }
        self.generation += u64::from(known.is_none_or(|(boot, _)| boot != table.boot));
        self.routers.insert(node, ReceivedTable { table, received: now });
        MergeOutcome::Changed
    }

    /// Removes silent routers; returns whether there were any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.routers.len();
        self.routers.retain(|_, spoken| now.saturating_duration_since(spoken.received) < SILENCE_TIMEOUT);
        let gone = self.routers.len() < before;
        self.generation += u64::from(gone);
        gone
    }

    /// Returns the number of reporting routers.
    pub(super) fn live_routers(&self) -> usize {
        self.routers.len()
    }

    /// Returns the reporting routers and the ages of their reports.
    pub(super) fn ages(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.routers.iter().map(|(router, spoken)| (*router, now.saturating_duration_since(spoken.received))).collect()
    }

    pub(super) fn sums(&self) -> BTreeMap<WorkerId, PeerInFlight> {
        let mut sums = BTreeMap::new();
        for flow in self.routers.values().flat_map(|spoken| &spoken.table.flows) {
            let none = PeerInFlight { generation: self.generation, ..PeerInFlight::default() };
            sums.entry(flow.worker).or_insert(none).add(flow);
        }
        sums
    }

    /// Returns the sum for a worker to which nobody has sent anything.
    pub(super) fn empty_sum(&self) -> PeerInFlight {
        PeerInFlight { generation: self.generation, ..PeerInFlight::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);

    fn table(boot: u64, sequence: u64, dispatched: u64) -> InFlightReport {
        let flow = RankInFlightCounts {
            worker: WORKER,
            rank: DpRank(0),
            dispatched,
            begun: 0,
            finished: 0,
            pending: Tokens(10) * dispatched,
        };
        InFlightReport { boot, sequence, flows: vec![flow, RankInFlightCounts { rank: DpRank(1), ..flow }] }
    }

    fn sum(overlay: &PeerInFlightTables) -> (u64, u64) {
        overlay.sums().get(&WORKER).map_or((0, 0), |others| (others.in_flight(), others.pending.0))
    }

    #[test]
    fn newest_table_of_each_router_counts_in_full() {
        let (mut overlay, now) = (PeerInFlightTables::default(), Instant::now());
        assert_eq!(overlay.merge(NodeId(1), table(5, 1, 3), now), MergeOutcome::Changed);
        assert_eq!(overlay.merge(NodeId(1), table(5, 1, 3), now), MergeOutcome::Stale);
        assert_eq!(sum(&overlay), (6, 60), "over both ranks");
        assert_eq!(overlay.merge(NodeId(2), table(9, 1, 1), now), MergeOutcome::Changed);
        assert_eq!(overlay.merge(NodeId(1), table(5, 3, 2), now), MergeOutcome::Changed);
        assert_eq!(overlay.merge(NodeId(1), table(5, 2, 9), now), MergeOutcome::Stale, "it was overtaken");
        assert_eq!(sum(&overlay), (6, 60));
    }

    #[test]
    fn silent_router_expires() {
        let (mut overlay, now) = (PeerInFlightTables::default(), Instant::now());
        overlay.merge(NodeId(1), table(5, 1, 3), now);
        overlay.merge(NodeId(2), table(5, 1, 1), now + SILENCE_TIMEOUT / 2);
        assert!(!overlay.expire(now + SILENCE_TIMEOUT / 2));
        assert!(overlay.expire(now + SILENCE_TIMEOUT));
        assert_eq!(sum(&overlay), (2, 20));
        assert_eq!(overlay.ages(now + SILENCE_TIMEOUT), [(NodeId(2), SILENCE_TIMEOUT / 2)]);
    }

    #[test]
    fn restarted_router_starts_a_new_baseline() {
        let (mut overlay, now) = (PeerInFlightTables::default(), Instant::now());
        overlay.merge(NodeId(1), table(5, 70, 300), now);
        let before = overlay.sums()[&WORKER];
        assert_eq!(overlay.merge(NodeId(1), table(6, 1, 2), now), MergeOutcome::Changed);
        let after = overlay.sums()[&WORKER];
        assert_eq!((after.in_flight(), after.change_since(&before)), (4, (0, 0)));
        assert_eq!(overlay.merge(NodeId(1), table(5, 71, 300), now), MergeOutcome::Stale, "a message of the last life");
        overlay.merge(NodeId(1), table(6, 2, 5), now);
        assert_eq!(overlay.sums()[&WORKER].change_since(&after), (6, 0));
    }

    #[test]
    fn overflowing_counts_saturate_and_routers_are_bounded() {
        let (mut overlay, now) = (PeerInFlightTables::default(), Instant::now());
        for router in 0..300 {
            let expected = if router < MAX_ROUTERS as u64 { MergeOutcome::Changed } else { MergeOutcome::TooMany };
            assert_eq!(overlay.merge(NodeId(router), table(1, 1, u64::MAX / 8), now), expected);
        }
        assert_eq!(sum(&overlay).0, u64::MAX);
    }
}
