//! The account as a step of one session finds it: what is free at a rank, and whose KV would be pushed out.

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Owner, SessionId, Tokens};

use super::line::Idle;
use super::rank::Tenant;
use super::{Inflow, MOST_VICTIMS, RankMemory, Tenancy};
use crate::returns;

/// One session's look at the account.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit<'a> {
    pub(super) tenancy: &'a Tenancy,
    pub(super) session: SessionId,
    pub(super) now: Micros,
    /// What it has, and where.
    pub(super) own: &'a [(Owner, Tenant)],
}

/// One rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room<'a> {
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
    pub(crate) inflow: Inflow,
    /// The idle ones that would be evicted first.
    pub(super) oldest: &'a [Idle],
    /// In place of these, victims as they were told at another time.
    pub(super) told: &'a [Victim],
}

/// An idle session's KV.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct Victim {
    /// How much.
    pub tokens: Tokens,
    /// The chance, 0 to 1, that its session comes back for it soon, in millionths.
    pub chance: f64,
}

impl<'a> Visit<'a> {
    /// The memory of a rank at which the step finds so many leading tokens. Where nothing is known all of it is free.
    pub(crate) fn room(&self, at: Owner, capacity: Tokens, found: Tokens) -> Room<'a> {
        if let Some(told) = &self.tenancy.told {
            let told = told.iter().find(|told| (told.worker, told.rank) == (at.worker, at.rank));
            return told.map_or(Room::empty(capacity), RankMemory::room);
        }
        let Some(worker) = self.tenancy.known_worker(at) else { return Room::empty(capacity) };
        let mut room = match worker.ranks.iter().find(|(rank, _)| *rank == at.rank) {
            Some((_, rank)) => {
                let own = self.own.iter().find(|(place, _)| *place == at).map(|(_, tenant)| tenant);
                rank.room((self.session, own), (capacity, found), self.now)
            }
            None => Room::empty(capacity),
        };
        room.inflow = worker.lately.inflow(self.now);
        room
    }

    /// KV in the order in which it would be evicted, of the first few sessions: that of others, and what is stale of its own.
    pub(crate) fn victims(self, room: &Room<'a>) -> impl Iterator<Item = Victim> + use<'a> {
        self.victims_by(room, returns::Returns::chance)
    }

    /// The same with the chances that they come back within 15 s.
    pub(crate) fn victims_shortly(self, room: &Room<'a>) -> impl Iterator<Item = Victim> + use<'a> {
        self.victims_by(room, returns::Returns::chance_shortly)
    }

    fn victims_by<F>(self, room: &Room<'a>, chance: F) -> impl Iterator<Item = Victim> + use<'a, F>
    where
        F: Fn(&returns::Returns, returns::Habit, returns::Idle) -> f64,
    {
        // Least recently used first: none has been idle for longer than the one before.
        let mut time = returns::Idle::LONGEST;
        let stale = room.stale;
        let victims = room.oldest.iter().map(move |idle| {
            if idle.session == self.session {
                return Victim { tokens: stale, chance: 0.0 };
            }
            time = time.at_most(self.now - idle.last);
            let chance = idle.wanted.map_or(0.0, |habit| chance(&self.tenancy.returns, habit, time));
            Victim { tokens: idle.tokens, chance }
        });
        let victims = victims.filter(|victim| victim.tokens > Tokens::ZERO);
        victims.chain(room.told.iter().copied()).take(MOST_VICTIMS)
    }
}

impl Room<'_> {
    /// What can be pushed out.
    pub(crate) fn evictable(&self) -> Tokens {
        self.others_idle + self.stale
    }

    /// One of which nothing is known.
    pub(super) fn empty(capacity: Tokens) -> Self {
        let none = Tokens::ZERO;
        let (own, others_idle, stale, inflow) = (none, none, none, Inflow::default());
        Self { free: capacity, own, others_idle, stale, active: 0, inflow, oldest: &[], told: &[] }
    }
}
