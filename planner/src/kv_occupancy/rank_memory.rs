//! Recorded occupancy at planning time: enough for a decision log to plan the step again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, Owner, Tokens, WorkerId, WorkerView};

use super::rank_headroom::{RankHeadroom, Victim};
use super::{OccupancyModel, PrefillLoad};
use crate::{Decision, Leg, PlanningInputs};

/// Memory of one rank at planning time.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct RankMemory {
    /// Worker of the rank.
    pub worker: WorkerId,
    /// Rank within the worker.
    #[serde(default)]
    pub rank: DpRank,
    /// Free tokens.
    pub free: Tokens,
    /// Tokens that the step's session has there.
    pub own: Tokens,
    /// Evictable tokens: those of other, idle sessions, and stale ones of the step's session.
    pub idle: Tokens,
    /// Other sessions that are being served or had a step recently.
    pub active: u32,
    /// Prefill load of the rank's worker.
    #[serde(default, skip_serializing_if = "PrefillLoad::is_none")]
    pub inflow: PrefillLoad,
    /// Sessions that would be evicted first, as far as the step could reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Victim>,
}

impl RankMemory {
    pub(super) fn headroom(&self) -> RankHeadroom<'_> {
        let Self { free, own, idle, active, inflow, .. } = *self;
        RankHeadroom {
            own,
            others_idle: idle,
            active,
            inflow,
            recorded_victims: &self.victims,
            ..RankHeadroom::unknown(free)
        }
    }
}

impl OccupancyModel {
    /// Returns what the planner read of the model for a step, rank by rank; unknown ranks are left out.
    pub fn recorded_memory(&self, inputs: &PlanningInputs<'_>, decision: &Decision) -> Vec<RankMemory> {
        let visit = self.session_lookup(inputs.session.id, inputs.occupancy.now);
        let views: BTreeMap<WorkerId, &WorkerView> = inputs.workers.iter().map(|view| (view.id, view)).collect();
        let mut all: Vec<RankMemory> = Vec::with_capacity(views.len());
        for &Leg { worker, rank, tokens_cached: found, .. } in decision.local_legs() {
            let Some(view) = views.get(&worker) else { continue };
            let at = Owner { worker, incarnation: view.incarnation, rank };
            if !self.knows(at) {
                continue;
            }
            let capacity = view.capacity.kv;
            let room = visit.headroom(at, capacity, found);
            // Upper bound of the tokens that a plan can need there, including the session's expected growth.
            let need = inputs.request.prompt + inputs.request.answer + Tokens(capacity.0 / 8);
            let mut left = need - room.free;
            let within = |victim: &Victim| {
                let reached = left > Tokens::ZERO;
                left -= victim.tokens;
                reached
            };
            let victims = visit.victims(&room).take_while(within).collect();
            let (RankHeadroom { free, own, active, inflow, .. }, idle) = (room, room.evictable());
            all.push(RankMemory { worker, rank, free, own, idle, active, inflow, victims });
        }
        all
    }

    /// Builds a read-only model that returns recorded occupancy.
    pub fn from_recorded(memory: &[RankMemory]) -> Self {
        Self { recorded: Some(memory.to_vec()), ..Self::default() }
    }

    fn knows(&self, at: Owner) -> bool {
        match &self.recorded {
            Some(told) => told.iter().any(|told| (told.worker, told.rank) == (at.worker, at.rank)),
            None => self.known_worker(at).is_some(),
        }
    }
}
