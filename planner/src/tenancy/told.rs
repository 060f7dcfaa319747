//! What the account said when a step was planned: enough of it, for a decision log, to plan the step again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, Owner, Tokens, WorkerId, WorkerView};

use super::room::{Room, Victim};
use super::{Inflow, Tenancy};
use crate::{Decision, Inputs, Leg};

/// One rank's memory as a step found it.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct RankMemory {
    /// Whose.
    pub worker: WorkerId,
    /// Which.
    #[serde(default)]
    pub rank: DpRank,
    /// What nobody has.
    pub free: Tokens,
    /// What the step's session has there.
    pub own: Tokens,
    /// What can be pushed out: what other sessions have that are idle, and its own session does not find again.
    pub idle: Tokens,
    /// Other sessions that are served or stepped lately.
    pub active: u32,
    /// Prompts that its worker is given to compute.
    #[serde(default, skip_serializing_if = "Inflow::is_none")]
    pub inflow: Inflow,
    /// Who would be evicted first, as far as the step could reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub victims: Vec<Victim>,
}

impl RankMemory {
    pub(super) fn room(&self) -> Room<'_> {
        let Self { free, own, idle, active, inflow, .. } = *self;
        Room { own, others_idle: idle, active, inflow, told: &self.victims, ..Room::empty(free) }
    }
}

impl Tenancy {
    /// What a step's planner read of the account, rank by rank; those of which nothing is known are left out.
    pub fn told_of(&self, inputs: &Inputs<'_>, decision: &Decision) -> Vec<RankMemory> {
        let visit = self.visit(inputs.session.id, inputs.account.now);
        let views: BTreeMap<WorkerId, &WorkerView> = inputs.workers.iter().map(|view| (view.id, view)).collect();
        let mut all: Vec<RankMemory> = Vec::with_capacity(views.len());
        for &Leg { worker, rank, tokens_cached: found, .. } in decision.alone() {
            let Some(view) = views.get(&worker) else { continue };
            let at = Owner { worker, incarnation: view.incarnation, rank };
            if !self.knows(at) {
                continue;
            }
            let capacity = view.capacity.kv;
            let room = visit.room(at, capacity, found);
            // The most that a plan can need there: with what the session is expected to grow by.
            let need = inputs.ask.prompt + inputs.ask.answer + Tokens(capacity.0 / 8);
            let mut left = need - room.free;
            let within = |victim: &Victim| {
                let reached = left > Tokens::ZERO;
                left -= victim.tokens;
                reached
            };
            let victims = visit.victims(&room).take_while(within).collect();
            let (Room { free, own, active, inflow, .. }, idle) = (room, room.evictable());
            all.push(RankMemory { worker, rank, free, own, idle, active, inflow, victims });
        }
        all
    }

    /// An account that says again what was told; nothing can be noted in it.
    pub fn retold(memory: &[RankMemory]) -> Self {
        Self { told: Some(memory.to_vec()), ..Self::default() }
    }

    fn knows(&self, at: Owner) -> bool {
        match &self.told {
            Some(told) => told.iter().any(|told| (told.worker, told.rank) == (at.worker, at.rank)),
            None => self.known_worker(at).is_some(),
        }
    }
}
