//! Policies that weigh what is cached against load.

use std::collections::HashSet;

use engine_model::runs::{RunEngine, RunId};
use vocabulary::Tokens;

use super::{Ask, Dispatch, Fleet, Policy, least};

fn match_rate(found: Tokens, ask: &Ask<'_>) -> f64 {
    found.0 as f64 / ask.step.prompt.0.max(1) as f64
}

/// Both as shares: what is cached of the prompt, and requests of the busiest worker's.
pub(super) struct MatchRateMinusLoad;

impl Policy for MatchRateMinusLoad {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let most = fleet.all().map(|worker| fleet.requests(worker)).max().unwrap_or_default().max(1) as f64;
        let score = |worker: usize| match_rate(ask.held[worker].with_disk, ask) - fleet.requests(worker) as f64 / most;
        Dispatch::at(least(fleet.all(), |worker| -score(worker)))
    }
}

/// Any of a prefix's owners will do.
pub(super) struct MultiOwner;

impl MultiOwner {
    /// Holders of this share of what the deepest one holds are owners as well.
    const NEARLY: f64 = 0.9;
    /// Below this share of the prompt nobody owns it.
    const OWNED: f64 = 0.3;
}

impl Policy for MultiOwner {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        let held = |worker: usize| ask.held[worker].with_disk;
        let deepest = fleet.all().map(held).max().unwrap_or_default();
        let owned = match_rate(deepest, ask) > Self::OWNED;
        let owns = |worker: &usize| !owned || held(*worker).0 as f64 >= Self::NEARLY * deepest.0 as f64;
        let key = |worker: usize| (fleet.requests(worker), fleet.workers[worker].memory_taken());
        Dispatch::at(least(fleet.all().filter(owns), key))
    }
}

/// SGLang's cache-aware router. It knows what it sent where, not what is still there.
#[derive(Default)]
pub(super) struct Sglang {
    trees: Vec<Tree>,
}

#[derive(Default, Clone)]
struct Tree {
    runs: HashSet<RunId>,
    tokens: Tokens,
}

impl Sglang {
    const MATCH: f64 = 0.3;
    const APART: u64 = 64;
    const TIMES: f64 = 1.5;
}

impl Policy for Sglang {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
        self.trees.resize(fleet.workers.len(), Tree::default());
        let loads = || fleet.all().map(|worker| fleet.requests(worker));
        let (most, fewest) = (loads().max().unwrap_or_default(), loads().min().unwrap_or_default());
        let apart = most - fewest > Self::APART && most as f64 > Self::TIMES * fewest as f64;
        let found = |worker: usize| {
            let known = ask.step.path.iter().take_while(|run| self.trees[worker].runs.contains(run)).count();
            fleet.runs.end(&ask.step.path[..known])
        };
        let worker = if apart {
            least(fleet.all(), |worker| fleet.requests(worker))
        } else {
            let deepest = least(fleet.all(), |worker| std::cmp::Reverse(found(worker)));
            let matches = match_rate(found(deepest), ask) > Self::MATCH;
            if matches { deepest } else { least(fleet.all(), |worker| self.trees[worker].tokens) }
        };
        let tree = &mut self.trees[worker];
        for run in ask.step.path.iter() {
            if tree.runs.insert(*run) {
                tree.tokens += fleet.runs.tokens(*run);
            }
        }
        Dispatch::at(worker)
    }
}

/// llm-d's scorers with the weights of its guide.
pub(super) struct Llmd {
    /// What counts as taken of a worker's memory. Engines report what cannot be evicted.
    pub(super) memory: fn(&RunEngine) -> Tokens,
}

impl Policy for Llmd {
    fn place(&mut self, ask: &Ask<'_>, fleet: &Fleet<'_>) -> Dispatch {
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
            let taken = (self.memory)(fleet.workers[worker]).0 as f64 / fleet.spec.sizes.device.0.max(1) as f64;
            3.0 * match_rate(ask.held[worker].with_disk, ask) + 2.0 * short + 2.0 * (1.0 - taken)
        };
        Dispatch::at(least(fleet.all(), |worker| -score(worker)))
    }
}
