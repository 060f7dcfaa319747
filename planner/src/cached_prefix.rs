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
    best_overlap: Option<(Blocks, Reverse<Tier>, OwnerTieBreak, Reverse<DpRank>)>,
    depth_by_tier: [Blocks; 3],
    believed: Option<(Blocks, Reverse<DpRank>)>,
}

/// Prefers the owner's rank among ranks with an equal overlap.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum OwnerTieBreak {
    No,
    Yes,
}

/// Returns one cached prefix for each of `inputs.workers`, in their order.
pub(crate) fn cached_prefixes(inputs: &PlanningInputs<'_>) -> Vec<CachedPrefix> {
    let positions = WorkerIndexById::of(inputs);
    let mut rank_overlaps = vec![RankOverlap::default(); inputs.workers.len()];
    choose_ranks(inputs, &positions, &mut rank_overlaps);
    fill_tiers(inputs, &positions, &mut rank_overlaps);
    add_believed_blocks(inputs, &positions, &mut rank_overlaps);
    rank_overlaps
        .iter()
        .zip(0..)
        .map(|(rank_overlap, position)| resolve_prefix(inputs, position, rank_overlap))
        .collect()
}

/// Index of each worker in `inputs.workers`, by id.
struct WorkerIndexById(Vec<(WorkerId, usize)>);

impl WorkerIndexById {
    fn of(inputs: &PlanningInputs<'_>) -> Self {
        let mut positions: Vec<_> =
            inputs.workers.iter().zip(0..).map(|(view, position)| (view.id, position)).collect();
        positions.sort_unstable();
        Self(positions)
    }

    /// Returns each overlap with the index of its worker. Overlaps of one worker are mostly adjacent, so the last
    /// lookup is reused.
    fn of_overlaps<'a>(&self, inputs: &PlanningInputs<'a>) -> impl Iterator<Item = (usize, &'a Overlap)> {
        let mut last = None;
        inputs.overlaps.iter().filter_map(move |overlap| {
            let position = match last {
                Some((worker, position)) if worker == overlap.worker => position,
                _ => self.find(overlap.worker),
            };
            last = Some((overlap.worker, position));
            Some((position?, overlap))
        })
    }

    fn find(&self, worker: WorkerId) -> Option<usize> {
        self.0.binary_search_by_key(&worker, |(id, _)| *id).ok().map(|at| self.0[at].1)
    }
}

fn choose_ranks(inputs: &PlanningInputs<'_>, positions: &WorkerIndexById, rank_overlaps: &mut [RankOverlap]) {
    let owner = inputs.session.owner.map(|owner| (owner.worker, owner.rank));
    for (position, overlap) in positions.of_overlaps(inputs) {
        if overlap.rank.0 >= inputs.workers[position].ranks.max(1) {
            continue;
        }
        let preferred =
            if owner == Some((overlap.worker, overlap.rank)) { OwnerTieBreak::Yes } else { OwnerTieBreak::No };
        let key = (overlap.blocks, Reverse(overlap.tier), preferred, Reverse(overlap.rank));
        if rank_overlaps[position].best_overlap.is_none_or(|best| key > best) {
            rank_overlaps[position].best_overlap = Some(key);
            rank_overlaps[position].rank = overlap.rank;
        }
    }
}

fn fill_tiers(inputs: &PlanningInputs<'_>, positions: &WorkerIndexById, rank_overlaps: &mut [RankOverlap]) {
    for (position, overlap) in positions.of_overlaps(inputs) {
        let rank_overlap = &mut rank_overlaps[position];
        if rank_overlap.best_overlap.is_some() && rank_overlap.rank == overlap.rank {
            let depth = &mut rank_overlap.depth_by_tier[overlap.tier as usize];
            *depth = overlap.blocks.max(*depth);
        }
    }
}

/// Adds beliefs. Owners and replicas count only at workers without exact KV events; live intents of other routers count
/// everywhere.
fn add_believed_blocks(inputs: &PlanningInputs<'_>, positions: &WorkerIndexById, rank_overlaps: &mut [RankOverlap]) {
    let mut add_belief = |position: usize, rank: DpRank, blocks: Blocks| {
        if rank.0 < inputs.workers[position].ranks.max(1) {
            rank_overlaps[position].believed = rank_overlaps[position].believed.max(Some((blocks, Reverse(rank))));
        }
    };
    for Owner { worker, incarnation, rank } in inputs.session.owner.iter().chain(&inputs.session.replicas) {
        let Some(position) = positions.find(*worker) else { continue };
        let view = &inputs.workers[position];
        if view.kv_index_state != KvIndexState::Exact && view.incarnation == *incarnation {
            add_belief(position, *rank, inputs.session.sealed);
        }
    }
    for intent in &inputs.session.peer_intents {
        if let Some(position) = positions.find(intent.worker) {
            add_belief(position, intent.rank, intent.blocks);
        }
    }
}

fn resolve_prefix(inputs: &PlanningInputs<'_>, position: usize, rank_overlap: &RankOverlap) -> CachedPrefix {
    let view = &inputs.workers[position];
    let block = inputs.request.block_size;
    let [hbm, host, disk] =
        rank_overlap.depth_by_tier.map(|blocks| blocks.tokens(block).min(inputs.request.prompt_tokens));
    let observed = hbm.max(host).max(disk);
    let confidence = &inputs.policy.kv_index_confidence;
    let expected = share(observed, confidence.share(view.kv_index_state));
    let belief = rank_overlap.believed.filter(|(blocks, _)| *blocks > Blocks::ZERO).map(|(blocks, Reverse(rank))| {
        let cached_tokens = blocks.tokens(block).min(inputs.request.prompt_tokens);
        (rank, cached_tokens, share(cached_tokens, confidence.share(KvIndexState::Approximate)))
    });
    match belief {
        Some((rank, believed, expected_from_belief)) if expected_from_belief > expected || observed == Tokens::ZERO => {
            CachedPrefix {
                rank,
                believed,
                cached: usable_tokens(inputs, position, expected_from_belief),
                ..CachedPrefix::default()
            }
        }
        _ if observed == Tokens::ZERO => {
            CachedPrefix { rank: rank_for_new_session(inputs, position), ..CachedPrefix::default() }
        }
        _ => {
            let cached = usable_tokens(inputs, position, expected);
            let host_end = cached.min(hbm.max(host));
            CachedPrefix {
                rank: rank_overlap.rank,
                believed: observed,
                cached,
                host: host_end - hbm,
                disk: cached - hbm.max(host),
            }
        }
    }
}

/// Returns the tokens that an engine reuses: whole blocks of its own, and never the whole prompt.
fn usable_tokens(inputs: &PlanningInputs<'_>, position: usize, expected: Tokens) -> Tokens {
    let unit = match inputs.workers[position].capacity.block {
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
fn rank_for_new_session(inputs: &PlanningInputs<'_>, position: usize) -> DpRank {
    let view = &inputs.workers[position];
    match view.ranks {
        0 | 1 => DpRank(0),
        ranks => {
            // The rank uses the upper half of the weight; the whole weight already selected the worker.
            let weight = rendezvous::weight(inputs.session.id, view.id) >> 32;
            DpRank((weight % u64::from(ranks)) as u16)
        }
    }
}
