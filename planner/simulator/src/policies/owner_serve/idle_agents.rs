//! Idle sessions: which of their prefixes are worth replicating ahead of the next step.
//!
//! A replication only makes a copy. Ownership changes with the commit of the next step, as always.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use engine_model::runs::PromptTierDepths;
use planner::{ChosenReplication, ReplicationLimits, StepFootprint};
use vocabulary::SessionId;

use super::{FleetView, OwnerServe, PlacementRequest, ReplicationOrder, StepRef, micros, owner, worker_index};
use crate::trace::TraceStep;

/// Agents that are idle and whose next step is expected.
#[derive(Default)]
pub(super) struct IdleAgents(BTreeMap<(usize, u32), IdleAgent>);

#[derive(Clone)]
pub(super) struct IdleAgent {
    after: StepRef,
    /// Expected next step: the last prompt and its answer, of which only the length is known.
    expected: TraceStep,
    is_sent: bool,
}

impl IdleAgents {
    pub(super) fn insert(&mut self, after: StepRef, step: &TraceStep) {
        let expected = TraceStep { prompt: step.prompt + step.answer, ..step.clone() };
        self.0.insert((after.session, step.agent), IdleAgent { after, expected, is_sent: false });
    }

    /// Removes an agent whose next step has arrived.
    pub(super) fn remove(&mut self, session: usize, agent: u32) {
        self.0.remove(&(session, agent));
    }

    pub(super) fn session_finished(&mut self, session: usize) {
        self.0.retain(|(own, _), _| *own != session);
    }
}

impl OwnerServe {
    /// Returns the replications that pay, best first. Nothing is sent twice while an agent is idle.
    pub(super) fn worthwhile_replications(
        &mut self,
        fleet: &FleetView<'_>,
    ) -> Vec<((IdleAgent, SessionId), ChosenReplication)> {
        let unsent: Vec<_> = self.idle_agents.0.values().filter(|agent| !agent.is_sent).cloned().collect();
        let bounds = ReplicationLimits::default();
        let mut moves = Vec::new();
        for agent in unsent {
            let resident = resident_depths(&agent.expected, fleet);
            let request = PlacementRequest {
                at: agent.after,
                step: &agent.expected,
                is_independent: false,
                memory_by_worker: &resident,
            };
            let (chosen, located) =
                self.with_inputs(&request, fleet, |inputs| planner::plan_prefix_replication(inputs, &bounds));
            moves.extend(chosen.ok().map(|chosen| ((agent, located.session.id), chosen)));
        }
        moves.sort_by_key(|((agent, _), chosen)| (Reverse(chosen.saves - chosen.costs), agent.after));
        moves
    }

    /// Records that a replication has started.
    pub(super) fn record_replication(
        &mut self,
        fleet: &FleetView<'_>,
        ((agent, id), chosen): ((IdleAgent, SessionId), ChosenReplication),
    ) -> ReplicationOrder {
        let IdleAgent { after, expected, .. } = agent;
        if let Some(agent) = self.idle_agents.0.get_mut(&(after.session, expected.agent)) {
            agent.is_sent = true;
        }
        let (from, to) = (worker_index(chosen.from), worker_index(chosen.to));
        let until = chosen.blocks.tokens(fleet.block);
        let cached = fleet.workers[to].cached_depths(fleet.runs, &expected.path).device;
        let footprint = StepFootprint { tokens: until, cached, capacity: fleet.spec.sizes.device };
        self.occupancy.prefix_replicated(owner(to), id, footprint, micros(fleet.now.0));
        ReplicationOrder { after, path: expected.path, from, to, until }
    }
}

fn resident_depths(step: &TraceStep, fleet: &FleetView<'_>) -> Vec<PromptTierDepths> {
    fleet.workers.iter().map(|engine| engine.cached_depths(fleet.runs, &step.path)).collect()
}
