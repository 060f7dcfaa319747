//! Memory of one rank: how much of it each session has, least recently used first, as the engine evicts.

use std::collections::HashMap;

use vocabulary::{Micros, Owner, SessionId, Tokens, WorkerId};

use super::StepFootprint;
use super::eviction_order::{EvictionOrder, IdleResident};
use super::rank_headroom::RankHeadroom;
use crate::return_model::ReturnPattern;

/// KV of every session, by rank: few sessions have KV at more than one.
#[derive(Clone, Debug, Default)]
pub(super) struct ResidentSessions(HashMap<SessionId, Vec<(Owner, ResidentSession)>>);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ResidentSession {
    /// Tokens without the `shared` ones.
    tokens: Tokens,
    /// Leading tokens of its prompts that other sessions had cached there before.
    shared: Tokens,
    /// Running steps.
    steps: u32,
    last: Micros,
    /// Return pattern of the session; none when it now lives elsewhere.
    return_pattern: Option<ReturnPattern>,
}

/// Totals of one rank, and the eviction order of its idle sessions.
#[derive(Clone, Debug, Default)]
pub(super) struct RankOccupancy {
    used: Tokens,
    /// Part of `used` that belongs to sessions with running steps: engines do not evict it.
    in_use: Tokens,
    /// Number of sessions with running steps.
    served: u32,
    idle: EvictionOrder,
}

pub(super) struct RankOccupancyMut<'a> {
    pub(super) at: Owner,
    pub(super) rank: &'a mut RankOccupancy,
    pub(super) residents: &'a mut ResidentSessions,
}

impl ResidentSessions {
    pub(super) fn of(&self, session: SessionId) -> &[(Owner, ResidentSession)] {
        self.0.get(&session).map_or(&[], Vec::as_slice)
    }

    /// Removes all KV at a worker.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.0.retain(|_, residents| {
            residents.retain(|(at, _)| at.worker != worker);
            !residents.is_empty()
        });
    }

    fn insert(&mut self, at: Owner, session: SessionId, resident: ResidentSession) {
        self.0.entry(session).or_default().push((at, resident));
    }

    fn remove(&mut self, at: Owner, session: SessionId) -> Option<ResidentSession> {
        let residents = self.0.get_mut(&session)?;
        let index = residents.iter().position(|(owner, _)| *owner == at)?;
        let (_, resident) = residents.swap_remove(index);
        if residents.is_empty() {
            self.0.remove(&session);
        }
        Some(resident)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl RankOccupancyMut<'_> {
    pub(super) fn step_started(&mut self, session: SessionId, footprint: StepFootprint, now: Micros) {
        let before = self.take(session);
        let shared = before.map_or(footprint.cached, |resident| resident.shared.min(footprint.cached));
        self.put(
            session,
            ResidentSession {
                tokens: footprint.tokens - shared,
                shared,
                steps: before.map_or(0, |resident| resident.steps) + 1,
                last: now,
                return_pattern: Some(ReturnPattern::New),
            },
        );
        self.evict_down_to(footprint.capacity);
    }

    pub(super) fn step_ended(&mut self, session: SessionId, (tokens, pattern): (Tokens, ReturnPattern), now: Micros) {
        let Some(resident) = self.take(session) else { return };
        let steps = resident.steps.saturating_sub(1);
        let tokens = tokens - resident.shared;
        self.put(session, ResidentSession { tokens, steps, last: now, return_pattern: Some(pattern), ..resident });
    }

    pub(super) fn step_failed(&mut self, session: SessionId) {
        let Some(resident) = self.take(session) else { return };
        if resident.steps > 1 {
            self.put(session, ResidentSession { steps: resident.steps - 1, ..resident });
        }
    }

    pub(super) fn session_moved(&mut self, session: SessionId) {
        let Some(resident) = self.take(session) else { return };
        self.put(session, ResidentSession { return_pattern: None, ..resident });
    }

    pub(super) fn observe_held_tokens(&mut self, tokens: Tokens) {
        if tokens * 2 < self.rank.used - self.rank.in_use {
            self.evict_down_to(self.rank.in_use + tokens);
        }
    }

    /// Evicts as the engine does: least recently used first, and nothing that is in use.
    fn evict_down_to(&mut self, most: Tokens) {
        while self.rank.used > most {
            let Some(&IdleResident { session, tokens, .. }) = self.rank.idle.least_recently_used() else { return };
            let over = self.rank.used - most;
            let Some(resident) = self.take(session) else { return };
            if tokens > over {
                self.put(session, ResidentSession { tokens: tokens - over, ..resident });
            }
        }
    }

    /// Stores a session's KV; an idle session without tokens is dropped.
    fn put(&mut self, session: SessionId, resident: ResidentSession) {
        let ResidentSession { tokens, steps, last, return_pattern, .. } = resident;
        if steps > 0 {
            self.rank.in_use += tokens;
            self.rank.served += 1;
        } else if tokens > Tokens::ZERO {
            self.rank.idle.insert(IdleResident { session, last, tokens, return_pattern });
        } else {
            return;
        }
        self.rank.used += tokens;
        self.residents.insert(self.at, session, resident);
    }

    fn take(&mut self, session: SessionId) -> Option<ResidentSession> {
        let resident = self.residents.remove(self.at, session)?;
        self.rank.used -= resident.tokens;
        if resident.steps > 0 {
            self.rank.in_use -= resident.tokens;
            self.rank.served -= 1;
        } else {
            self.rank.idle.remove(resident.last, session);
        }
        Some(resident)
    }
}

impl RankOccupancy {
    /// Returns the memory as a step sees it whose session has `own` there and finds `cached` leading tokens of its
    /// prompt.
    pub(super) fn headroom(
        &self,
        (session, own): (SessionId, Option<&ResidentSession>),
        (capacity, cached): (Tokens, Tokens),
        now: Micros,
    ) -> RankHeadroom<'_> {
        let session_tokens = own.map_or(Tokens::ZERO, |resident| resident.tokens);
        let idle = own.filter(|resident| resident.steps == 0);
        let served = self.served - u32::from(own.is_some_and(|resident| resident.steps > 0));
        RankHeadroom {
            free: capacity - self.used,
            session_tokens,
            others_idle: self.used - self.in_use - idle.map_or(Tokens::ZERO, |_| session_tokens),
            stale: idle.map_or(Tokens::ZERO, |resident| session_tokens.min(resident.shared + session_tokens - cached)),
            active: served + self.idle.active_count(now, idle.map(|resident| (resident.last, session))),
            oldest: self.idle.oldest(),
            ..RankHeadroom::unknown(capacity)
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.used == Tokens::ZERO && self.served == 0
    }
}
