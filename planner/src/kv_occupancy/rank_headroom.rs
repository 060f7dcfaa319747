//! Occupancy as a step of one session sees it: the free memory of a rank, and whose KV would be evicted.

use serde::{Deserialize, Serialize};
use vocabulary::{Micros, Owner, SessionId, Tokens};

use super::eviction_order::{IdleResident, MAX_VICTIMS};
use super::rank_occupancy::ResidentSession;
use super::{OccupancyModel, RankMemorySnapshot, RecentPrefillLoad};
use crate::return_model;

/// View of the occupancy model for one session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionLookup<'a> {
    pub(super) occupancy: &'a OccupancyModel,
    pub(super) session: SessionId,
    pub(super) now: Micros,
    /// KV that the session has, by rank.
    pub(super) sessions: &'a [(Owner, ResidentSession)],
}

/// Memory of one rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RankHeadroom<'a> {
    pub(crate) free: Tokens,
    /// Tokens that the session itself has there.
    pub(crate) session_tokens: Tokens,
    pub(crate) others_idle: Tokens,
    /// Part of `session_tokens` that the step does not reuse, because the history was rewritten. It is evicted in its
    /// turn, at no cost.
    pub(crate) stale: Tokens,
    /// Other sessions that are being served or had a step recently; at most 16 idle ones are counted.
    pub(crate) active: u32,
    /// Prefill load of the rank's worker.
    pub(crate) inflow: RecentPrefillLoad,
    /// Idle sessions that would be evicted first.
    pub(super) oldest: &'a [IdleResident],
    /// Recorded victims, used instead of `oldest` when replaying a decision.
    pub(super) recorded_victims: &'a [EvictionVictim],
}

/// KV of an idle session that may be evicted.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub struct EvictionVictim {
    /// Tokens that it holds.
    pub tokens: Tokens,
    /// Chance, 0 to 1, that its session comes back for it soon, rounded to millionths.
    pub return_probability: f64,
}

impl<'a> SessionLookup<'a> {
    /// Returns the memory of a rank where the step finds `cached` leading tokens. An unknown rank counts as empty.
    pub(crate) fn headroom(&self, at: Owner, capacity: Tokens, cached: Tokens) -> RankHeadroom<'a> {
        if let Some(recorded) = &self.occupancy.recorded {
            let recorded = recorded.iter().find(|recorded| (recorded.worker, recorded.rank) == (at.worker, at.rank));
            return recorded.map_or(RankHeadroom::unknown(capacity), RankMemorySnapshot::headroom);
        }
        let Some(worker) = self.occupancy.known_worker(at) else { return RankHeadroom::unknown(capacity) };
        let mut headroom = match worker.ranks.iter().find(|(rank, _)| *rank == at.rank) {
            Some((_, rank)) => {
                let own = self.sessions.iter().find(|(place, _)| *place == at).map(|(_, resident)| resident);
                rank.headroom((self.session, own), (capacity, cached), self.now)
            }
            None => RankHeadroom::unknown(capacity),
        };
        headroom.inflow = worker.prefill_load.load_at(self.now);
        headroom
    }

    /// Returns the first few victims in eviction order: other sessions' KV, and the session's own stale KV.
    pub(crate) fn victims(self, headroom: &RankHeadroom<'a>) -> impl Iterator<Item = EvictionVictim> + use<'a> {
        self.victims_by(headroom, return_model::ReturnModel::return_probability)
    }

    /// Returns the same victims with the chance that their sessions come back within 15 s.
    pub(crate) fn short_term_victims(
        self,
        headroom: &RankHeadroom<'a>,
    ) -> impl Iterator<Item = EvictionVictim> + use<'a> {
        self.victims_by(headroom, return_model::ReturnModel::short_term_return_probability)
    }

    fn victims_by<F>(self, headroom: &RankHeadroom<'a>, chance: F) -> impl Iterator<Item = EvictionVictim> + use<'a, F>
    where
        F: Fn(&return_model::ReturnModel, return_model::ReturnPattern, return_model::GapBucket) -> f64,
    {
        // Least recently used first: idle time never increases along the iteration.
        let mut gap_class = return_model::GapBucket::MAX;
        let stale = headroom.stale;
        let victims = headroom.oldest.iter().map(move |idle| {
            if idle.session == self.session {
                return EvictionVictim { tokens: stale, return_probability: 0.0 };
            }
            gap_class = gap_class.at_most(self.now - idle.last);
            let chance = idle.return_pattern.map_or(0.0, |pattern| chance(&self.occupancy.returns, pattern, gap_class));
            EvictionVictim { tokens: idle.tokens, return_probability: chance }
        });
        let victims = victims.filter(|victim| victim.tokens > Tokens::ZERO);
        victims.chain(headroom.recorded_victims.iter().copied()).take(MAX_VICTIMS)
    }
}

impl RankHeadroom<'_> {
    /// Returns the tokens that can be evicted.
    pub(crate) fn evictable(&self) -> Tokens {
        self.others_idle + self.stale
    }

    /// Memory of a rank about which nothing is known.
    pub(super) fn unknown(capacity: Tokens) -> Self {
        let none = Tokens::ZERO;
        let (own, others_idle, stale, inflow) = (none, none, none, RecentPrefillLoad::default());
        Self {
            free: capacity,
            session_tokens: own,
            others_idle,
            stale,
            active: 0,
            inflow,
            oldest: &[],
            recorded_victims: &[],
        }
    }
}
