//! Policies that weigh cached tokens against load.

use std::collections::HashSet;

use engine_model::runs::{RunEngine, RunId};
use vocabulary::Tokens;

use super::{Dispatch, FleetView, PlacementRequest, RoutingPolicy, argmin};

fn match_rate(found: Tokens, request: &PlacementRequest<'_>) -> f64 {
    found.0 as f64 / request.step.prompt.0.max(1) as f64
}

/// Cached share of the prompt minus the load as a share of the busiest worker's requests.
pub(super) struct MatchRateMinusLoad;

impl RoutingPolicy for MatchRateMinusLoad {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let most = fleet.all().map(|worker| fleet.requests(worker)).max().unwrap_or_default().max(1) as f64;
        let score = |worker: usize| {
            match_rate(request.memory_by_worker[worker].with_disk, request) - fleet.requests(worker) as f64 / most
        };
        Dispatch::at(argmin(fleet.all(), |worker| -score(worker)))
    }
}

/// Any owner of the prefix may serve it.
pub(super) struct MultiOwner;

impl MultiOwner {
    /// Workers that hold at least this share of the longest cached prefix are owners too.
    const OWNER_SHARE: f64 = 0.9;
    /// A prompt of which less than this share is cached has no owner.
    const MIN_OWNED_SHARE: f64 = 0.3;
}

impl RoutingPolicy for MultiOwner {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let cached = |worker: usize| request.memory_by_worker[worker].with_disk;
        let deepest = fleet.all().map(cached).max().unwrap_or_default();
        let owned = match_rate(deepest, request) > Self::MIN_OWNED_SHARE;
        let owns = |worker: &usize| !owned || cached(*worker).0 as f64 >= Self::OWNER_SHARE * deepest.0 as f64;
        let key = |worker: usize| (fleet.requests(worker), fleet.workers[worker].memory_used());
        Dispatch::at(argmin(fleet.all().filter(owns), key))
    }
}

/// SGLang's cache-aware router. It knows what it sent where, not what is still cached there.
#[derive(Default)]
pub(super) struct Sglang {
    trees: Vec<ApproximateTree>,
}

#[derive(Default, Clone)]
struct ApproximateTree {
    runs: HashSet<RunId>,
    tokens: Tokens,
}

impl Sglang {
    const MATCH: f64 = 0.3;
    const MAX_REQUEST_GAP: u64 = 64;
    const MAX_REQUEST_RATIO: f64 = 1.5;
}

impl RoutingPolicy for Sglang {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        self.trees.resize(fleet.workers.len(), ApproximateTree::default());
        let loads = || fleet.all().map(|worker| fleet.requests(worker));
        let (most, fewest) = (loads().max().unwrap_or_default(), loads().min().unwrap_or_default());
        let apart = most - fewest > Self::MAX_REQUEST_GAP && most as f64 > Self::MAX_REQUEST_RATIO * fewest as f64;
        let found = |worker: usize| {
            let known = request.step.path.iter().take_while(|run| self.trees[worker].runs.contains(run)).count();
            fleet.runs.end_depth(&request.step.path[..known])
        };
        let worker = if apart {
            argmin(fleet.all(), |worker| fleet.requests(worker))
        } else {
            let deepest = argmin(fleet.all(), |worker| std::cmp::Reverse(found(worker)));
            let matches = match_rate(found(deepest), request) > Self::MATCH;
            if matches { deepest } else { argmin(fleet.all(), |worker| self.trees[worker].tokens) }
        };
        let tree = &mut self.trees[worker];
        for run in request.step.path.iter() {
            if tree.runs.insert(*run) {
                tree.tokens += fleet.runs.tokens(*run);
            }
        }
        Dispatch::at(worker)
    }
}

/// llm-d's scorers with the weights of its guide.
pub(super) struct Llmd {
    /// Memory that counts as used at a worker. Engines report what cannot be evicted.
    pub(super) used_memory: fn(&RunEngine) -> Tokens,
}

impl RoutingPolicy for Llmd {
    fn place(&mut self, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> Dispatch {
        let queue = |worker: usize| {
            let engine = &fleet.workers[worker];
            engine.queued() as f64 + f64::from(u8::from(engine.is_prefilling()))
        };
        let (most, fewest) = fleet
            .all()
            .map(queue)
            .fold((f64::MIN, f64::MAX), |(most, fewest), queue| (most.max(queue), fewest.min(queue)));
        let score = |worker: usize| {
            let short = if most == fewest { 1.0 } else { (most - queue(worker)) / (most - fewest) };
            let usage = (self.used_memory)(fleet.workers[worker]).0 as f64 / fleet.spec.sizes.device.0.max(1) as f64;
            3.0 * match_rate(request.memory_by_worker[worker].with_disk, request) + 2.0 * short + 2.0 * (1.0 - usage)
        };
        Dispatch::at(argmin(fleet.all(), |worker| -score(worker)))
    }
}
