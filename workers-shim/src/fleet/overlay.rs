//! What the other routers have in flight at this fleet's workers, as they say it. Pure; time is an argument.
//!
//! Every router tells all of its own numbers every time: what it sent, what of that has a first token, what is over, and
//! the prompt tokens that are still to be computed. So nothing is lost with a lost message, and nothing counts twice. The
//! engines' own figures hold most of these requests already; [`super::flight`] counts only what came since they spoke.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, NodeId, Tokens, WorkerId};

/// A router that is silent for so long has nothing in flight any more, as far as anybody knows.
pub const SILENCE: Duration = Duration::from_secs(1);
/// Routers that are heard at once; more are left out.
const MOST_ROUTERS: usize = 256;

/// One router's requests at one rank of one worker since that router started.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Flow {
    /// Where.
    pub worker: WorkerId,
    /// At which rank.
    pub rank: DpRank,
    /// Requests that were sent.
    pub dispatched: u64,
    /// Of those, the ones that have a first token, or ended without.
    pub begun: u64,
    /// Of those, the ones that are over.
    pub finished: u64,
    /// Prompt tokens of the others that are not known to be computed.
    pub pending: Tokens,
}

/// All flows of one router, at one moment of one of its lives.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
pub struct InFlightTable {
    /// The router's life: its start, on its own clock. A later one replaces an earlier one.
    pub boot: u64,
    /// Grows with every table of a life.
    pub sequence: u64,
    /// One for each rank that anything was ever sent to.
    pub flows: Vec<Flow>,
}

/// What became of a table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Heard {
    /// It counts from now on.
    News,
    /// A newer one is known already.
    Old,
    /// Too many routers are heard.
    TooMany,
}

/// The sum over all other routers, at one worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Others {
    /// Sums of one generation can be compared: they are over the same lives of the same routers.
    pub(super) generation: u64,
    pub(super) dispatched: u64,
    pub(super) begun: u64,
    pub(super) finished: u64,
    pub(super) pending: Tokens,
}

impl Others {
    /// Requests that are not over.
    pub(super) fn in_flight(&self) -> u64 {
        self.dispatched.saturating_sub(self.finished)
    }

    /// Requests without a first token.
    pub(super) fn prefilling(&self) -> u64 {
        self.dispatched.saturating_sub(self.begun)
    }

    /// Requests whose answers are being generated.
    pub(super) fn decoding(&self) -> u64 {
        self.begun.saturating_sub(self.finished)
    }

    /// Sent and ended since `earlier`; nothing is known of that when other routers were summed up then.
    pub(super) fn since(&self, earlier: &Self) -> (u64, u64) {
        if self.generation != earlier.generation {
            return (0, 0);
        }
        (self.dispatched.saturating_sub(earlier.dispatched), self.finished.saturating_sub(earlier.finished))
    }

    fn add(&mut self, flow: &Flow) {
        self.dispatched = self.dispatched.saturating_add(flow.dispatched);
        self.begun = self.begun.saturating_add(flow.begun);
        self.finished = self.finished.saturating_add(flow.finished);
        self.pending += flow.pending;
    }
}

/// The newest table of each router that is heard.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    routers: BTreeMap<NodeId, Spoken>,
    generation: u64,
}

#[derive(Debug)]
struct Spoken {
    table: InFlightTable,
    at: Instant,
}

impl Overlay {
    /// A router's table arrived.
    pub(super) fn hear(&mut self, router: NodeId, table: InFlightTable, now: Instant) -> Heard {
        self.expire(now);
        let known = self.routers.get(&router).map(|known| (known.table.boot, known.table.sequence));
        if known.is_some_and(|known| (table.boot, table.sequence) <= known) {
            return Heard::Old;
        }
        if known.is_none() && self.routers.len() >= MOST_ROUTERS {
            return Heard::TooMany;
        }
        self.generation += u64::from(known.is_none_or(|(boot, _)| boot != table.boot));
        self.routers.insert(router, Spoken { table, at: now });
        Heard::News
    }

    /// Forgets routers that are silent; whether there were any.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let before = self.routers.len();
        self.routers.retain(|_, spoken| now.saturating_duration_since(spoken.at) < SILENCE);
        let gone = self.routers.len() < before;
        self.generation += u64::from(gone);
        gone
    }

    /// How many routers are heard.
    pub(super) fn heard(&self) -> usize {
        self.routers.len()
    }

    /// The routers that are heard, and how old their tables are.
    pub(super) fn ages(&self, now: Instant) -> Vec<(NodeId, Duration)> {
        self.routers.iter().map(|(router, spoken)| (*router, now.saturating_duration_since(spoken.at))).collect()
    }

    pub(super) fn sums(&self) -> BTreeMap<WorkerId, Others> {
        let mut sums = BTreeMap::new();
        for flow in self.routers.values().flat_map(|spoken| &spoken.table.flows) {
            let none = Others { generation: self.generation, ..Others::default() };
            sums.entry(flow.worker).or_insert(none).add(flow);
        }
        sums
    }

    /// The sum for a worker that nobody has sent anything to.
    pub(super) fn none(&self) -> Others {
        Others { generation: self.generation, ..Others::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);

    fn table(boot: u64, sequence: u64, dispatched: u64) -> InFlightTable {
        let flow = Flow {
            worker: WORKER,
            rank: DpRank(0),
            dispatched,
            begun: 0,
            finished: 0,
            pending: Tokens(10) * dispatched,
        };
        InFlightTable { boot, sequence, flows: vec![flow, Flow { rank: DpRank(1), ..flow }] }
    }

    fn sum(overlay: &Overlay) -> (u64, u64) {
        overlay.sums().get(&WORKER).map_or((0, 0), |others| (others.in_flight(), others.pending.0))
    }

    #[test]
    fn tables_are_absolute_and_the_newest_of_each_router_counts() {
        let (mut overlay, now) = (Overlay::default(), Instant::now());
        assert_eq!(overlay.hear(NodeId(1), table(5, 1, 3), now), Heard::News);
        assert_eq!(overlay.hear(NodeId(1), table(5, 1, 3), now), Heard::Old);
        assert_eq!(sum(&overlay), (6, 60), "over both ranks");
        assert_eq!(overlay.hear(NodeId(2), table(9, 1, 1), now), Heard::News);
        assert_eq!(overlay.hear(NodeId(1), table(5, 3, 2), now), Heard::News);
        assert_eq!(overlay.hear(NodeId(1), table(5, 2, 9), now), Heard::Old, "it was overtaken");
        assert_eq!(sum(&overlay), (6, 60));
    }

    #[test]
    fn a_silent_router_no_longer_counts() {
        let (mut overlay, now) = (Overlay::default(), Instant::now());
        overlay.hear(NodeId(1), table(5, 1, 3), now);
        overlay.hear(NodeId(2), table(5, 1, 1), now + SILENCE / 2);
        assert!(!overlay.expire(now + SILENCE / 2));
        assert!(overlay.expire(now + SILENCE));
        assert_eq!(sum(&overlay), (2, 20));
        assert_eq!(overlay.ages(now + SILENCE), [(NodeId(2), SILENCE / 2)]);
    }

    #[test]
    fn another_life_of_a_router_begins_anew_and_is_not_compared_with_the_last() {
        let (mut overlay, now) = (Overlay::default(), Instant::now());
        overlay.hear(NodeId(1), table(5, 70, 300), now);
        let before = overlay.sums()[&WORKER];
        assert_eq!(overlay.hear(NodeId(1), table(6, 1, 2), now), Heard::News);
        let after = overlay.sums()[&WORKER];
        assert_eq!((after.in_flight(), after.since(&before)), (4, (0, 0)));
        assert_eq!(overlay.hear(NodeId(1), table(5, 71, 300), now), Heard::Old, "a message of the last life");
        overlay.hear(NodeId(1), table(6, 2, 5), now);
        assert_eq!(overlay.sums()[&WORKER].since(&after), (6, 0));
    }

    #[test]
    fn numbers_beyond_all_bounds_saturate() {
        let (mut overlay, now) = (Overlay::default(), Instant::now());
        for router in 0..300 {
            let expected = if router < MOST_ROUTERS as u64 { Heard::News } else { Heard::TooMany };
            assert_eq!(overlay.hear(NodeId(router), table(1, 1, u64::MAX / 8), now), expected);
        }
        assert_eq!(sum(&overlay).0, u64::MAX);
    }
}
