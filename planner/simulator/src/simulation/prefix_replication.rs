//! Replication of prefixes ahead of a step, and whether the step then uses them.

use engine_model::runs::{OutgoingTransfer, Seconds};
use vocabulary::Tokens;

use super::replication_tracker::{AwaitedReplication, ReplicationState, ReplicationTransfer};
use super::{Simulation, WorldEvent};
use crate::policies::ReplicationOrder;

/// Most replications in flight at once.
const MAX_CONCURRENT: usize = 4;

impl Simulation<'_> {
    /// Asks the policy for replications, as long as more events will follow.
    pub(super) fn start_replications(&mut self, period: Seconds) {
        let most = MAX_CONCURRENT.saturating_sub(self.links.replication.in_flight.len());
        if most > 0 {
            let moves = self.ask_policy(|policy, fleet| policy.replications(most, fleet));
            moves.into_iter().for_each(|chosen| self.start_replication(chosen));
        }
        if !self.events.is_empty() {
            self.events.add(self.now + period, WorldEvent::PollReplication);
        }
    }

    fn start_replication(&mut self, ReplicationOrder { after, path, from, to, until }: ReplicationOrder) {
        let runs = &self.trace.runs;
        let (source, target) = (&self.engines[from].engine, &self.engines[to].engine);
        let until = until.min(source.cached_depths(runs, &path).with_disk);
        let needed = path.iter().take_while(|run| runs.depth(**run) <= until);
        let missing: Vec<_> = needed.copied().filter(|run| !target.has(*run)).collect();
        if missing.is_empty() {
            return;
        }
        let tokens: Tokens = missing.iter().map(|run| runs.device_size(*run)).sum();
        let OutgoingTransfer { pinned: kept, load_seconds: loads } =
            self.engines[from].engine.pin_for_transfer(runs, &missing);
        let arrives = self.links.send(self.now + Seconds(loads), (from, to), tokens);
        let for_whom = (after.session, self.trace.sessions[after.session].steps[after.step].agent);
        let number = self.links.replication.figures.moves;
        self.links.replication.figures.moves += 1;
        self.links.replication.figures.tokens += tokens.0;
        self.links
            .replication
            .expected
            .insert(for_whom, AwaitedReplication { number, to, state: ReplicationState::InFlight });
        self.links
            .replication
            .in_flight
            .insert(number, ReplicationTransfer { from, to, agent: for_whom, runs: missing, pinned_runs: kept });
        self.events.add(arrives, WorldEvent::ReplicationArrived(number));
    }

    pub(super) fn replication_arrived(&mut self, number: usize) {
        let Some(ReplicationTransfer { from, to, agent: for_whom, runs: sent, pinned_runs: lent }) =
            self.links.replication.in_flight.remove(&number)
        else {
            return;
        };
        let runs = &self.trace.runs;
        self.engines[from].engine.transfer_sent(runs, &lent);
        let state = if self.engines[to].engine.cache_received(runs, &sent) {
            ReplicationState::Arrived
        } else {
            ReplicationState::Dropped
        };
        if let Some(awaited) =
            self.links.replication.expected.get_mut(&for_whom).filter(|awaited| awaited.number == number)
        {
            awaited.state = state;
        }
        self.wake_engine(from);
        self.wake_engine(to);
    }
}
