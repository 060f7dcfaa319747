//! Recorded occupancy at planning time: enough for a decision log to plan the step again.

use serde::{Deserialize, Serialize};
use vocabulary::{DpRank, Owner, Tokens, WorkerId};

use super::rank_headroom::{EvictionVictim, RankHeadroom};
use super::{OccupancyModel, RecentPrefillLoad};

/// Memory of one rank at planning time.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
pub struct RankMemorySnapshot {
    /// Worker of the rank.
    pub worker: WorkerId,
    /// Rank within the worker.
    #[serde(default)]
    pub rank: DpRank,
    /// Free tokens.
    pub free_tokens: Tokens,
    /// Tokens that the step's session has there.
    pub session_tokens: Tokens,
    /// Evictable tokens: those of other, idle sessions, and stale ones of the step's session.
    pub idle_tokens: Tokens,
    /// Other sessions that are being served or had a step recently.
    pub active_sessions: u32,
    /// Prefill load of the rank's worker.
    #[serde(default, skip_serializing_if = "RecentPrefillLoad::is_none")]
    pub prefill_load: RecentPrefillLoad,
    /// Sessions that would be evicted first, as far as the step could reach.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub eviction_candidates: Vec<EvictionVictim>,
}

impl RankMemorySnapshot {
    pub(super) fn headroom(&self) -> RankHeadroom<'_> {
        let Self {
            free_tokens: free,
            session_tokens: own,
            idle_tokens: idle,
            active_sessions: active,
            prefill_load: inflow,
            ..
        } = *self;
        RankHeadroom {
            session_tokens: own,
            others_idle: idle,
            active,
            inflow,
            recorded_victims: &self.eviction_candidates,
            ..RankHeadroom::unknown(free)
        }
    }
}

impl OccupancyModel {
    /// Builds a read-only model that returns recorded occupancy.
    pub fn from_recorded(memory: &[RankMemorySnapshot]) -> Self {
        Self { recorded: Some(memory.to_vec()), ..Self::default() }
    }

    pub(crate) fn knows(&self, at: Owner) -> bool {
        match &self.recorded {
            Some(recorded) => recorded.iter().any(|recorded| (recorded.worker, recorded.rank) == (at.worker, at.rank)),
            None => self.known_worker(at).is_some(),
        }
    }
}
