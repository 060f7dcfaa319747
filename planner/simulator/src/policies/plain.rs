//! Policies with a single criterion.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, argmin};
use crate::SeededRng;

/// Each worker in turn.
#[derive(Default)]
pub(super) struct RoundRobin {
    turn: usize,
}

impl RoutingPolicy for RoundRobin {
    fn place(&mut self, _request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let worker = self.turn % fleet.workers.len();
        self.turn += 1;
        Dispatch::at(worker)
    }
}

/// Fewest requests, then least memory used.
pub(super) struct LeastLoaded;

impl RoutingPolicy for LeastLoaded {
    fn place(&mut self, _request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        Dispatch::at(argmin(fleet.all(), |worker| (fleet.requests(worker), fleet.workers[worker].memory_used())))
    }
}

/// The less loaded of two random workers.
pub(super) struct PowerOfTwo {
    rng: SeededRng,
}

impl PowerOfTwo {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: SeededRng::new(seed) }
    }
}

impl RoutingPolicy for PowerOfTwo {
    fn place(&mut self, _request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let workers = fleet.workers.len() as u64;
        let one = self.rng.below(workers);
        let other = (one + 1 + self.rng.below(workers.saturating_sub(1))) % workers;
        Dispatch::at(argmin([one as usize, other as usize], |worker| fleet.requests(worker)))
    }
}

/// A session stays at its worker; independent requests go where most of the prompt is cached.
#[derive(Default)]
pub(super) struct SessionPinning {
    homes: HashMap<usize, usize>,
    sessions: Vec<u32>,
}

impl RoutingPolicy for SessionPinning {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        if request.is_independent {
            return PrefixAffinity.place(request, fleet);
        }
        self.sessions.resize(fleet.workers.len(), 0);
        let sessions = &mut self.sessions;
        let home = self.homes.entry(request.at.session).or_insert_with(|| {
            let home = argmin(fleet.all(), |worker| (sessions[worker], fleet.requests(worker)));
            sessions[home] += 1;
            home
        });
        Dispatch::at(*home)
    }

    fn session_finished(&mut self, session: usize) {
        if let Some(home) = self.homes.remove(&session) {
            self.sessions[home] -= 1;
        }
    }
}

/// Longest cached prefix, then fewest requests.
pub(super) struct PrefixAffinity;

impl RoutingPolicy for PrefixAffinity {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let key = |worker: usize| (Reverse(request.memory_by_worker[worker].with_disk), fleet.requests(worker));
        Dispatch::at(argmin(fleet.all(), key))
    }
}
