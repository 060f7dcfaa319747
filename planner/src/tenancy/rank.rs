//! One rank's memory: who has how much of it, least recently used first, as the engine evicts.

use std::collections::HashMap;

use vocabulary::{Micros, Owner, SessionId, Tokens, WorkerId};

use super::Stay;
use super::line::{Idle, Line};
use super::room::Room;
use crate::returns::Habit;

/// Who has what at any rank, by session: few have more than one place.
#[derive(Clone, Debug, Default)]
pub(super) struct Tenants(HashMap<SessionId, Vec<(Owner, Tenant)>>);

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tenant {
    /// Without what others had there before.
    tokens: Tokens,
    /// Leading tokens of its prompts that others had there before.
    shared: Tokens,
    /// Steps under way.
    steps: u32,
    last: Micros,
    /// How its session comes back; none when it lives elsewhere.
    wanted: Option<Habit>,
}

/// The sums of one rank, and the order of its idle tenants.
#[derive(Clone, Debug, Default)]
pub(super) struct Rank {
    taken: Tokens,
    /// Of it, what sessions have that are being served: engines do not evict that.
    in_use: Tokens,
    /// How many of these there are.
    served: u32,
    idle: Line,
}

pub(super) struct Place<'a> {
    pub(super) at: Owner,
    pub(super) rank: &'a mut Rank,
    pub(super) tenants: &'a mut Tenants,
}

impl Tenants {
    pub(super) fn of(&self, session: SessionId) -> &[(Owner, Tenant)] {
        self.0.get(&session).map_or(&[], Vec::as_slice)
    }

    /// Whoever has something at a worker loses it.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.0.retain(|_, places| {
            places.retain(|(at, _)| at.worker != worker);
            !places.is_empty()
        });
    }

    fn insert(&mut self, at: Owner, session: SessionId, tenant: Tenant) {
        self.0.entry(session).or_default().push((at, tenant));
    }

    fn remove(&mut self, at: Owner, session: SessionId) -> Option<Tenant> {
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

impl Place<'_> {
    pub(super) fn begins(&mut self, session: SessionId, stay: Stay, now: Micros) {
        let before = self.take(session);
        let shared = before.map_or(stay.found, |tenant| tenant.shared.min(stay.found));
        self.put(
            session,
            Tenant {
                tokens: stay.tokens - shared,
                shared,
                steps: before.map_or(0, |tenant| tenant.steps) + 1,
                last: now,
                wanted: Some(Habit::New),
            },
        );
        self.shrink_to(stay.capacity);
    }

    pub(super) fn ends(&mut self, session: SessionId, (tokens, habit): (Tokens, Habit), now: Micros) {
        let Some(tenant) = self.take(session) else { return };
        let steps = tenant.steps.saturating_sub(1);
        let tokens = tokens - tenant.shared;
        self.put(session, Tenant { tokens, steps, last: now, wanted: Some(habit), ..tenant });
    }

    pub(super) fn fails(&mut self, session: SessionId) {
        let Some(tenant) = self.take(session) else { return };
        if tenant.steps > 1 {
            self.put(session, Tenant { steps: tenant.steps - 1, ..tenant });
        }
    }

    pub(super) fn leaves(&mut self, session: SessionId) {
        let Some(tenant) = self.take(session) else { return };
        self.put(session, Tenant { wanted: None, ..tenant });
    }

    pub(super) fn seen_to_hold(&mut self, tokens: Tokens) {
        if tokens * 2 < self.rank.taken - self.rank.in_use {
            self.shrink_to(self.rank.in_use + tokens);
        }
    }

    /// As the engine does: what was used least recently goes first, but nothing that is in use.
    fn shrink_to(&mut self, most: Tokens) {
        while self.rank.taken > most {
            let Some(&Idle { session, tokens, .. }) = self.rank.idle.first() else { return };
            let over = self.rank.taken - most;
            let Some(tenant) = self.take(session) else { return };
            if tokens > over {
                self.put(session, Tenant { tokens: tokens - over, ..tenant });
            }
        }
    }

    /// Tenants of nothing are not kept.
    fn put(&mut self, session: SessionId, tenant: Tenant) {
        let Tenant { tokens, steps, last, wanted, .. } = tenant;
        if steps > 0 {
            self.rank.in_use += tokens;
            self.rank.served += 1;
        } else if tokens > Tokens::ZERO {
            self.rank.idle.insert(Idle { session, last, tokens, wanted });
        } else {
            return;
        }
        self.rank.taken += tokens;
        self.tenants.insert(self.at, session, tenant);
    }

    fn take(&mut self, session: SessionId) -> Option<Tenant> {
        let tenant = self.tenants.remove(self.at, session)?;
        self.rank.taken -= tenant.tokens;
        if tenant.steps > 0 {
            self.rank.in_use -= tenant.tokens;
            self.rank.served -= 1;
        } else {
            self.rank.idle.remove(tenant.last, session);
        }
        Some(tenant)
    }
}

impl Rank {
    /// As a step of a session finds it that has `own` there, and finds so many leading tokens of its prompt.
    pub(super) fn room(
        &self,
        (session, own): (SessionId, Option<&Tenant>),
        (capacity, found): (Tokens, Tokens),
        now: Micros,
    ) -> Room<'_> {
        let has = own.map_or(Tokens::ZERO, |tenant| tenant.tokens);
        let idle = own.filter(|tenant| tenant.steps == 0);
        let served = self.served - u32::from(own.is_some_and(|tenant| tenant.steps > 0));
        Room {
            free: capacity - self.taken,
            own: has,
            others_idle: self.taken - self.in_use - idle.map_or(Tokens::ZERO, |_| has),
            stale: idle.map_or(Tokens::ZERO, |tenant| has.min(tenant.shared + has - found)),
            active: served + self.idle.active(now, idle.map(|tenant| (tenant.last, session))),
            oldest: self.idle.oldest(),
            ..Room::empty(capacity)
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.taken == Tokens::ZERO && self.served == 0
    }
}
