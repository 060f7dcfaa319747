//! One rank's memory: who has how much of it, least recently used first, as the engine evicts.

use std::collections::{BTreeMap, HashMap};

use vocabulary::{Micros, SessionId, Tokens};

use super::Stay;
use crate::returns::Habit;

/// A session that stepped within this time is an active one.
const LATELY: Micros = Micros(60_000_000);
/// So many idle ones are looked at for that.
const MOST_ACTIVE: usize = 16;

/// The tenants of one rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Rank {
    taken: Tokens,
    /// Of it, what sessions have that are being served: engines do not evict that.
    in_use: Tokens,
    /// How many of these there are.
    served: u32,
    tenants: HashMap<SessionId, Tenant>,
    idle: BTreeMap<(Micros, SessionId), Idle>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Tenant {
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

#[derive(Clone, Copy, Debug)]
struct Idle {
    tokens: Tokens,
    wanted: Option<Habit>,
}

impl Rank {
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
        if tokens * 2 < self.taken - self.in_use {
            self.shrink_to(self.in_use + tokens);
        }
    }

    /// As the engine does: what was used least recently goes first, but nothing that is in use.
    pub(super) fn shrink_to(&mut self, most: Tokens) {
        while self.taken > most {
            let Some((&(_, session), &Idle { tokens, .. })) = self.idle.first_key_value() else { return };
            let over = self.taken - most;
            let Some(tenant) = self.take(session) else { return };
            if tokens > over {
                self.put(session, Tenant { tokens: tokens - over, ..tenant });
            }
        }
    }

    pub(super) fn room(&self, session: SessionId, capacity: Tokens, now: Micros) -> Room<'_> {
        let own = self.tenants.get(&session);
        let has = own.map_or(Tokens::ZERO, |tenant| tenant.tokens);
        let is_idle = own.is_some_and(|tenant| tenant.steps == 0);
        let served = self.served - u32::from(own.is_some_and(|tenant| tenant.steps > 0));
        let newest = self.idle.iter().rev().take_while(|((last, _), _)| now - *last < LATELY).take(MOST_ACTIVE);
        let lately = newest.filter(|((_, other), idle)| *other != session && idle.wanted.is_some()).count();
        Room {
            free: capacity - self.taken,
            own: has,
            others_idle: self.taken - self.in_use - if is_idle { has } else { Tokens::ZERO },
            active: served + lately as u32,
            rank: Some(self),
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.idle.is_empty() && self.taken == Tokens::ZERO
    }

    /// Tenants of nothing are not kept.
    fn put(&mut self, session: SessionId, tenant: Tenant) {
        let Tenant { tokens, steps, last, wanted, .. } = tenant;
        if steps > 0 {
            self.in_use += tokens;
            self.served += 1;
        } else if tokens > Tokens::ZERO {
            self.idle.insert((last, session), Idle { tokens, wanted });
        } else {
            return;
        }
        self.taken += tokens;
        self.tenants.insert(session, tenant);
    }

    fn take(&mut self, session: SessionId) -> Option<Tenant> {
        let tenant = self.tenants.remove(&session)?;
        self.taken -= tenant.tokens;
        if tenant.steps > 0 {
            self.in_use -= tenant.tokens;
            self.served -= 1;
        } else {
            self.idle.remove(&(tenant.last, session));
        }
        Some(tenant)
    }
}

/// The memory of one rank, as a step of one session finds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room<'a> {
    /// What nobody has.
    pub(crate) free: Tokens,
    /// What the session itself has there.
    pub(crate) own: Tokens,
    /// What other sessions have that are idle.
    pub(crate) others_idle: Tokens,
    /// Other sessions that are served or stepped lately; of idle ones 16 at most.
    pub(crate) active: u32,
    rank: Option<&'a Rank>,
}

/// An idle session's KV.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    /// How much.
    pub(crate) tokens: Tokens,
    /// For how long nobody has used it.
    pub(crate) idle: Micros,
    /// How its session comes back; none when it lives elsewhere.
    pub(crate) wanted: Option<Habit>,
}

impl<'a> Room<'a> {
    /// One of which nothing is known.
    pub(crate) fn empty(capacity: Tokens) -> Self {
        Self { free: capacity, own: Tokens::ZERO, others_idle: Tokens::ZERO, active: 0, rank: None }
    }

    /// Other sessions' KV in the order in which it would be evicted.
    pub(crate) fn victims(&self, session: SessionId, now: Micros) -> impl Iterator<Item = Victim> + use<'a> {
        let all = self.rank.map(|rank| rank.idle.iter()).into_iter().flatten();
        let others = all.filter(move |((_, other), _)| *other != session);
        others.map(move |((last, _), idle)| Victim { tokens: idle.tokens, idle: now - *last, wanted: idle.wanted })
    }
}
