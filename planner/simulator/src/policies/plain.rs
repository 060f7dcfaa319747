//! Policies that look at one thing.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::{Ask, Dispatch, Fleet, Policy, least};
use crate::Chance;

/// One worker after the other.
#[derive(Default)]
pub(super) struct RoundRobin {
    turn: usize,
}

impl Policy for RoundRobin {
    fn place(&mut self, _ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let worker = self.turn % fleet.workers.len();
        self.turn += 1;
        Dispatch::at(worker)
    }
}

/// The fewest requests, then the least memory taken.
pub(super) struct LeastLoaded;

impl Policy for LeastLoaded {
    fn place(&mut self, _ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        Dispatch::at(least(fleet.all(), |worker| (fleet.requests(worker), fleet.workers[worker].memory_taken())))
    }
}

/// The better of two random ones.
pub(super) struct PowerOfTwo {
    chance: Chance,
}

impl PowerOfTwo {
    pub(super) fn new(seed: u64) -> Self {
        Self { chance: Chance::new(seed) }
    }
}

impl Policy for PowerOfTwo {
    fn place(&mut self, _ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let workers = fleet.workers.len() as u64;
        let one = self.chance.below(workers);
        let other = (one + 1 + self.chance.below(workers.saturating_sub(1))) % workers;
        Dispatch::at(least([one as usize, other as usize], |worker| fleet.requests(worker)))
    }
}

/// A session's worker for good; requests on their own go where most of the prompt is.
#[derive(Default)]
pub(super) struct SessionPinning {
    homes: HashMap<usize, usize>,
    sessions: Vec<u32>,
}

impl Policy for SessionPinning {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        if ask.alone {
            return PrefixAffinity.place(ask, fleet);
        }
        self.sessions.resize(fleet.workers.len(), 0);
        let sessions = &mut self.sessions;
        let home = self.homes.entry(ask.at.session).or_insert_with(|| {
            let home = least(fleet.all(), |worker| (sessions[worker], fleet.requests(worker)));
            sessions[home] += 1;
            home
        });
        Dispatch::at(*home)
    }

    fn session_over(&mut self, session: usize) {
        if let Some(home) = self.homes.remove(&session) {
            self.sessions[home] -= 1;
        }
    }
}

/// Most of the prompt, then the fewest requests.
pub(super) struct PrefixAffinity;

impl Policy for PrefixAffinity {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let key = |worker: usize| (Reverse(ask.held[worker].with_disk), fleet.requests(worker));
        Dispatch::at(least(fleet.all(), key))
    }
}
