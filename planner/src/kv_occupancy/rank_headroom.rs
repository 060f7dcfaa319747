//! The account as a step of one session finds it: what is free at a rank, and whose KV would be pushed out.

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Owner, SessionId, Tokens};

use super::eviction_order::IdleResident;
use super::rank_occupancy::ResidentSession;
use super::{MAX_VICTIMS, OccupancyModel, PrefillLoad, RankMemory};
use crate::return_model;

/// One session's look at the account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionLookup<'a> {
    pub(super) occupancy: &'a OccupancyModel,
    pub(super) session: SessionId,
    pub(super) now: Micros,
    /// What it has, and where.
    pub(super) own: &'a [(Owner, ResidentSession)],
}

/// One rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankHeadroom<'a> {
    pub(crate) free: Tokens,
    /// What the session itself has there.
    pub(crate) own: Tokens,
    pub(crate) others_idle: Tokens,
    /// Of `own`, what the step does not find again: of a history that was rewritten. It is evicted when its turn comes, and
    /// nobody misses it.
    pub(crate) stale: Tokens,
    /// Other sessions that are served or stepped lately; of idle ones 16 at most.
    pub(crate) active: u32,
    /// Prompts that its worker is given to compute.
    pub(crate) inflow: PrefillLoad,
    /// The idle ones that would be evicted first.
    pub(super) oldest: &'a [IdleResident],
    /// In place of these, victims as they were told at another time.
    pub(super) recorded_victims: &'a [Victim],
}

/// An idle session's KV.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct Victim {
    /// How much.
    pub tokens: Tokens,
    /// The chance, 0 to 1, that its session comes back for it soon, in millionths.
    pub chance: f64,
}

impl<'a> SessionLookup<'a> {
    /// The memory of a rank at which the step finds so many leading tokens. Where nothing is known all of it is free.
    pub(crate) fn headroom(&self, at: Owner, capacity: Tokens, found: Tokens) -> RankHeadroom<'a> {
        if let Some(told) = &self.occupancy.recorded {
            let told = told.iter().find(|told| (told.worker, told.rank) == (at.worker, at.rank));
            return told.map_or(RankHeadroom::unknown(capacity), RankMemory::headroom);
        }
        let Some(worker) = self.occupancy.known_worker(at) else { return RankHeadroom::unknown(capacity) };
        let mut room = match worker.ranks.iter().find(|(rank, _)| *rank == at.rank) {
            Some((_, rank)) => {
                let own = self.own.iter().find(|(place, _)| *place == at).map(|(_, tenant)| tenant);
                rank.headroom((self.session, own), (capacity, found), self.now)
            }
            None => RankHeadroom::unknown(capacity),
        };
        room.inflow = worker.prefill_load.load_at(self.now);
        room
    }

    /// KV in the order in which it would be evicted, of the first few sessions: that of others, and what is stale of its own.
    pub(crate) fn victims(self, room: &RankHeadroom<'a>) -> impl Iterator<Item = Victim> + use<'a> {
        self.victims_by(room, return_model::ReturnModel::return_probability)
    }

    /// The same with the chances that they come back within 15 s.
    pub(crate) fn short_term_victims(self, room: &RankHeadroom<'a>) -> impl Iterator<Item = Victim> + use<'a> {
        self.victims_by(room, return_model::ReturnModel::short_term_return_probability)
    }

    fn victims_by<F>(self, room: &RankHeadroom<'a>, chance: F) -> impl Iterator<Item = Victim> + use<'a, F>
    where
        F: Fn(&return_model::ReturnModel, return_model::ReturnPattern, return_model::IdleClass) -> f64,
    {
        // Least recently used first: none has been idle for longer than the one before.
        let mut time = return_model::IdleClass::MAX;
        let stale = room.stale;
        let victims = room.oldest.iter().map(move |idle| {
            if idle.session == self.session {
                return Victim { tokens: stale, chance: 0.0 };
            }
            time = time.at_most(self.now - idle.last);
            let chance = idle.return_pattern.map_or(0.0, |habit| chance(&self.occupancy.returns, habit, time));
            Victim { tokens: idle.tokens, chance }
        });
        let victims = victims.filter(|victim| victim.tokens > Tokens::ZERO);
        victims.chain(room.recorded_victims.iter().copied()).take(MAX_VICTIMS)
    }
}

impl RankHeadroom<'_> {
    /// What can be pushed out.
    pub(crate) fn evictable(&self) -> Tokens {
        self.others_idle + self.stale
    }

    /// One of which nothing is known.
    pub(super) fn unknown(capacity: Tokens) -> Self {
        let none = Tokens::ZERO;
        let (own, others_idle, stale, inflow) = (none, none, none, PrefillLoad::default());
        Self { free: capacity, own, others_idle, stale, active: 0, inflow, oldest: &[], recorded_victims: &[] }
    }
}
