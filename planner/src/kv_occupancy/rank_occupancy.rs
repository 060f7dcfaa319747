//! Memory of one rank: how much of it each session has, least recently used first, as the engine evicts.

use std::collections::HashMap;

use vocabulary::{Micros, Owner, SessionId, Tokens, WorkerId};

use super::KvFootprint;
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

pub(super) struct RankUpdate<'a> {
    pub(super) at: Owner,
    pub(super) rank: &'a mut RankOccupancy,
    pub(super) tenants: &'a mut ResidentSessions,
}

impl ResidentSessions {
    pub(super) fn of(&self, session: SessionId) -> &[(Owner, ResidentSession)] {
        self.0.get(&session).map_or(&[], Vec::as_slice)
    }

    /// Removes all KV at a worker.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.0.retain(|_, places| {
            places.retain(|(at, _)| at.worker != worker);
            !places.is_empty()
        });
    }

    fn insert(&mut self, at: Owner, session: SessionId, tenant: ResidentSession) {
        self.0.entry(session).or_default().push((at, tenant));
    }

    fn remove(&mut self, at: Owner, session: SessionId) -> Option<ResidentSession> {
        let places = self.0.get_mut(&session)?;
        let place = places.iter().position(|(place, _)| *place == at)?;
        let (_, tenant) = places.swap_remove(place);
        if places.is_empty() {
            self.0.remove(&session);
        }
        Some(tenant)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl RankUpdate<'_> {
    pub(super) fn step_started(&mut self, session: SessionId, footprint: KvFootprint, now: Micros) {
        let before = self.take(session);
        let shared = before.map_or(footprint.cached, |tenant| tenant.shared.min(footprint.cached));
        self.put(
            session,
            ResidentSession {
                tokens: footprint.tokens - shared,
                shared,
                steps: before.map_or(0, |tenant| tenant.steps) + 1,
                last: now,
                return_pattern: Some(ReturnPattern::New),
            },
        );
        self.evict_down_to(footprint.capacity);
    }

    pub(super) fn step_ended(&mut self, session: SessionId, (tokens, habit): (Tokens, ReturnPattern), now: Micros) {
        let Some(tenant) = self.take(session) else { return };
        let steps = tenant.steps.saturating_sub(1);
        let tokens = tokens - tenant.shared;
        self.put(session, ResidentSession { tokens, steps, last: now, return_pattern: Some(habit), ..tenant });
    }

    pub(super) fn step_failed(&mut self, session: SessionId) {
        let Some(tenant) = self.take(session) else { return };
        if tenant.steps > 1 {
            self.put(session, ResidentSession { steps: tenant.steps - 1, ..tenant });
        }
    }

    pub(super) fn session_moved(&mut self, session: SessionId) {
        let Some(tenant) = self.take(session) else { return };
        self.put(session, ResidentSession { return_pattern: None, ..tenant });
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
            let Some(tenant) = self.take(session) else { return };
            if tokens > over {
                self.put(session, ResidentSession { tokens: tokens - over, ..tenant });
            }
        }
    }

    /// Stores a session's KV; an idle session without tokens is dropped.
    fn put(&mut self, session: SessionId, tenant: ResidentSession) {
        let ResidentSession { tokens, steps, last, return_pattern: wanted, .. } = tenant;
        if steps > 0 {
            self.rank.in_use += tokens;
            self.rank.served += 1;
        } else if tokens > Tokens::ZERO {
            self.rank.idle.insert(IdleResident { session, last, tokens, return_pattern: wanted });
        } else {
            return;
        }
        self.rank.used += tokens;
        self.tenants.insert(self.at, session, tenant);
    }

    fn take(&mut self, session: SessionId) -> Option<ResidentSession> {
        let tenant = self.tenants.remove(self.at, session)?;
        self.rank.used -= tenant.tokens;
        if tenant.steps > 0 {
            self.rank.in_use -= tenant.tokens;
            self.rank.served -= 1;
        } else {
            self.rank.idle.remove(tenant.last, session);
        }
        Some(tenant)
    }
}

impl RankOccupancy {
    /// Returns the memory as a step sees it whose session has `own` there and finds `found` leading tokens of its
    /// prompt.
    pub(super) fn headroom(
        &self,
        (session, own): (SessionId, Option<&ResidentSession>),
        (capacity, found): (Tokens, Tokens),
        now: Micros,
    ) -> RankHeadroom<'_> {
        let has = own.map_or(Tokens::ZERO, |tenant| tenant.tokens);
        let idle = own.filter(|tenant| tenant.steps == 0);
        let served = self.served - u32::from(own.is_some_and(|tenant| tenant.steps > 0));
        RankHeadroom {
            free: capacity - self.used,
            session_tokens: has,
            others_idle: self.used - self.in_use - idle.map_or(Tokens::ZERO, |_| has),
            stale: idle.map_or(Tokens::ZERO, |tenant| has.min(tenant.shared + has - found)),
            active: served + self.idle.active_count(now, idle.map(|tenant| (tenant.last, session))),
            oldest: self.idle.oldest(),
            ..RankHeadroom::unknown(capacity)
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.used == Tokens::ZERO && self.served == 0
    }
}
