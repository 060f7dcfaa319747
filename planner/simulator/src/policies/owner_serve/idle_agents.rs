//! Sessions between two steps: what of them is worth sending ahead of the next one.
//!
//! What is sent is a copy, whatever becomes of ownership: the next step's commit moves that, as it always does.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use engine_model::runs::TierDepths;
use planner::{Footprint, PrefixReplication, ReplicationLimits};
use vocabulary::SessionId;

use super::{FleetView, OwnerServe, PlacementRequest, ReplicationOrder, StepRef, micros, owner, worker_index};
use crate::trace::TraceStep;

/// Agents of sessions whose next step is awaited.
#[derive(Default)]
pub(super) struct IdleAgents(BTreeMap<(usize, u32), ExpectedStep>);

#[derive(Clone)]
pub(super) struct ExpectedStep {
    after: StepRef,
    /// The next step as far as it is known: the last one's prompt with its answer. Of the answer only the length counts.
    expected: TraceStep,
    is_sent: bool,
}

impl IdleAgents {
    pub(super) fn insert(&mut self, after: StepRef, step: &TraceStep) {
        let expected = TraceStep { prompt: step.prompt + step.answer, ..step.clone() };
        self.0.insert((after.session, step.agent), ExpectedStep { after, expected, is_sent: false });
    }

    /// The next one is on its way.
    pub(super) fn remove(&mut self, session: usize, agent: u32) {
        self.0.remove(&(session, agent));
    }

    pub(super) fn session_finished(&mut self, session: usize) {
        self.0.retain(|(own, _), _| *own != session);
    }
}

impl OwnerServe {
    /// What pays, the most first. Nothing is sent twice in a gap.
    pub(super) fn worthwhile_replications(
        &mut self,
        fleet: &FleetView<'_>,
    ) -> Vec<((ExpectedStep, SessionId), PrefixReplication)> {
        let waiting: Vec<_> = self.idle_agents.0.values().filter(|waiting| !waiting.is_sent).cloned().collect();
        let bounds = ReplicationLimits::default();
        let mut moves = Vec::new();
        for waiting in waiting {
            let held = held(&waiting.expected, fleet);
            let ask = PlacementRequest {
                at: waiting.after,
                step: &waiting.expected,
                is_independent: false,
                memory_by_worker: &held,
            };
            let (chosen, located) =
                self.with_inputs(&ask, fleet, |inputs| planner::plan_prefix_replication(inputs, &bounds));
            moves.extend(chosen.ok().map(|chosen| ((waiting, located.session.id), chosen)));
        }
        moves.sort_by_key(|((waiting, _), chosen)| (Reverse(chosen.saves - chosen.costs), waiting.after));
        moves
    }

    /// Notes that it is on its way.
    pub(super) fn record_replication(
        &mut self,
        fleet: &FleetView<'_>,
        ((waiting, id), chosen): ((ExpectedStep, SessionId), PrefixReplication),
    ) -> ReplicationOrder {
        let ExpectedStep { after, expected, .. } = waiting;
        if let Some(noted) = self.idle_agents.0.get_mut(&(after.session, expected.agent)) {
            noted.is_sent = true;
        }
        let (from, to) = (worker_index(chosen.from), worker_index(chosen.to));
        let until = chosen.blocks.tokens(fleet.block);
        let found = fleet.workers[to].cached_depths(fleet.runs, &expected.path).device;
        let stay = Footprint { tokens: until, found, capacity: fleet.spec.sizes.device };
        self.occupancy.prefix_replicated(owner(to), id, stay, micros(fleet.now.0));
        ReplicationOrder { after, path: expected.path, from, to, until }
    }
}

fn held(step: &TraceStep, fleet: &FleetView<'_>) -> Vec<TierDepths> {
    fleet.workers.iter().map(|engine| engine.cached_depths(fleet.runs, &step.path)).collect()
}
