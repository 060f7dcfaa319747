//! Expected cached prefix of the prompt at each worker: from observed blocks, and from beliefs where observation is
//! incomplete.

use std::cmp::Reverse;

use vocabulary::{Blocks, DpRank, KvIndexState, Overlap, Owner, Tier, Tokens, WorkerId};

use crate::{PlanningInputs, rendezvous};

/// Cached prefix of the prompt at one worker, at the rank that holds most of it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct CachedPrefix {
    pub(crate) rank: DpRank,
    /// Tokens believed to be cached, in whole blocks of the hash chain.
    pub(crate) believed: Tokens,
    /// Tokens expected to hit: `believed` times the confidence in it, less than the prompt, in whole engine blocks.
    pub(crate) cached: Tokens,
    /// Tokens of `cached` that are in host memory only.
    pub(crate) host: Tokens,
    /// Tokens of `cached` that are on disk only.
    pub(crate) disk: Tokens,
}

impl CachedPrefix {
    /// Tokens of `cached` that are in device memory.
    pub(crate) fn on_device(&self) -> Tokens {
        self.cached - self.host - self.disk
    }
}

/// Overlap observed at one rank, and what is believed besides.
#[derive(Clone, Copy, Default)]
struct RankOverlap {
    rank: DpRank,
    best_overlap: Option<(Blocks, Reverse<Tier>, PreferredRank, Reverse<DpRank>)>,
    depth_by_tier: [Blocks; 3],
    believed: Option<(Blocks, Reverse<DpRank>)>,
}

/// Prefers the owner's rank among ranks with an equal overlap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PreferredRank {
    No,
    Yes,
}

/// Returns one cached prefix for each of `inputs.workers`, in their order.
pub(crate) fn cached_prefixes(inputs: &PlanningInputs<'_>) -> Vec<CachedPrefix> {
    let places = WorkerPositions::of(inputs);
    let mut raws = vec![RankOverlap::default(); inputs.workers.len()];
    choose_ranks(inputs, &places, &mut raws);
    fill_tiers(inputs, &places, &mut raws);
    add_believed_blocks(inputs, &places, &mut raws);
    raws.iter().zip(0..).map(|(raw, place)| resolve_prefix(inputs, place, raw)).collect()
}

/// Index of each worker in `inputs.workers`, by id.
struct WorkerPositions(Vec<(WorkerId, usize)>);

impl WorkerPositions {
    fn of(inputs: &PlanningInputs<'_>) -> Self {
        let mut places: Vec<_> = inputs.workers.iter().zip(0..).map(|(view, place)| (view.id, place)).collect();
        places.sort_unstable();
        Self(places)
    }

    /// Returns each overlap with the index of its worker. Overlaps of one worker are mostly adjacent, so the last
    /// lookup is reused.
    fn of_overlaps<'a>(&self, inputs: &PlanningInputs<'a>) -> impl Iterator<Item = (usize, &'a Overlap)> {
        let mut last = None;
        inputs.overlaps.iter().filter_map(move |overlap| {
            let place = match last {
                Some((worker, place)) if worker == overlap.worker => place,
                _ => self.find(overlap.worker),
            };
            last = Some((overlap.worker, place));
            Some((place?, overlap))
        })
    }

    fn find(&self, worker: WorkerId) -> Option<usize> {
        self.0.binary_search_by_key(&worker, |(id, _)| *id).ok().map(|at| self.0[at].1)
    }
}

fn choose_ranks(inputs: &PlanningInputs<'_>, positions: &WorkerPositions, raws: &mut [RankOverlap]) {
    let owner = inputs.session.owner.map(|owner| (owner.worker, owner.rank));
    for (place, overlap) in positions.of_overlaps(inputs) {
        if overlap.rank.0 >= inputs.workers[place].ranks.max(1) {
            continue;
        }
        let preferred =
            if owner == Some((overlap.worker, overlap.rank)) { PreferredRank::Yes } else { PreferredRank::No };
        let key = (overlap.blocks, Reverse(overlap.tier), preferred, Reverse(overlap.rank));
        if raws[place].best_overlap.is_none_or(|best| key > best) {
            raws[place].best_overlap = Some(key);
            raws[place].rank = overlap.rank;
        }
    }
}

fn fill_tiers(inputs: &PlanningInputs<'_>, positions: &WorkerPositions, raws: &mut [RankOverlap]) {
    for (place, overlap) in positions.of_overlaps(inputs) {
        let raw = &mut raws[place];
        if raw.best_overlap.is_some() && raw.rank == overlap.rank {
            let depth = &mut raw.depth_by_tier[overlap.tier as usize];
            *depth = overlap.blocks.max(*depth);
        }
    }
}

/// Adds beliefs. Owners and replicas count only at workers without exact KV events; live intents of other routers count
/// everywhere.
fn add_believed_blocks(inputs: &PlanningInputs<'_>, positions: &WorkerPositions, raws: &mut [RankOverlap]) {
    let mut note = |place: usize, rank: DpRank, blocks: Blocks| {
        if rank.0 < inputs.workers[place].ranks.max(1) {
            raws[place].believed = raws[place].believed.max(Some((blocks, Reverse(rank))));
        }
    };
    for Owner { worker, incarnation, rank } in inputs.session.owner.iter().chain(&inputs.session.replicas) {
        let Some(place) = positions.find(*worker) else { continue };
        let view = &inputs.workers[place];
        if view.kv_index_state != KvIndexState::Exact && view.incarnation == *incarnation {
            note(place, *rank, inputs.session.sealed);
        }
    }
    for promise in &inputs.session.peer_intents {
        if let Some(place) = positions.find(promise.worker) {
            note(place, promise.rank, promise.blocks);
        }
    }
}

fn resolve_prefix(inputs: &PlanningInputs<'_>, place: usize, raw: &RankOverlap) -> CachedPrefix {
    let view = &inputs.workers[place];
    let block = inputs.request.block_size;
    let [hbm, host, disk] = raw.depth_by_tier.map(|blocks| blocks.tokens(block).min(inputs.request.prompt_tokens));
    let seen = hbm.max(host).max(disk);
    let trust = &inputs.policy.kv_index_confidence;
    let expected = share(seen, trust.share(view.kv_index_state));
    let belief = raw.believed.filter(|(blocks, _)| *blocks > Blocks::ZERO).map(|(blocks, Reverse(rank))| {
        let cached_tokens = blocks.tokens(block).min(inputs.request.prompt_tokens);
        (rank, cached_tokens, share(cached_tokens, trust.share(KvIndexState::Approximate)))
    });
    match belief {
        Some((rank, held, hoped)) if hoped > expected || seen == Tokens::ZERO => CachedPrefix {
            rank,
            believed: held,
            cached: usable_tokens(inputs, place, hoped),
            ..CachedPrefix::default()
        },
        _ if seen == Tokens::ZERO => CachedPrefix { rank: fresh_rank(inputs, place), ..CachedPrefix::default() },
        _ => {
            let cached = usable_tokens(inputs, place, expected);
            let host_end = cached.min(hbm.max(host));
            CachedPrefix { rank: raw.rank, believed: seen, cached, host: host_end - hbm, disk: cached - hbm.max(host) }
        }
    }
}

/// Returns the tokens that an engine reuses: whole blocks of its own, and never the whole prompt.
fn usable_tokens(inputs: &PlanningInputs<'_>, place: usize, expected: Tokens) -> Tokens {
    let unit = match inputs.workers[place].capacity.block {
        Tokens::ZERO => inputs.request.block_size,
        own => own,
    };
    expected.min(inputs.request.prompt_tokens - Tokens(1)).whole_blocks(unit).tokens(unit)
}

/// Returns `part` (0 to 1) of the tokens, rounded down.
fn share(tokens: Tokens, part: f64) -> Tokens {
    if part >= 1.0 { tokens } else { Tokens((tokens.0 as f64 * part) as u64) }
}

/// Rank for a session of which a worker holds nothing.
fn fresh_rank(inputs: &PlanningInputs<'_>, place: usize) -> DpRank {
    let view = &inputs.workers[place];
    match view.ranks {
        0 | 1 => DpRank(0),
        ranks => {
            // The rank uses the upper half of the weight; the whole weight already selected the worker.
            let weight = rendezvous::weight(inputs.session.id, view.id) >> 32;
            DpRank((weight % u64::from(ranks)) as u16)
        }
    }
}
