use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::tests::chain;
use Tier::{Disk, Hbm, Host};

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);
const R0: DpRank = DpRank(0);

impl ResidencyIndex {
    /// Returns the overlaps without using bisection.
    pub(crate) fn overlaps_without_bisection(&self, prompt: &[BlockHash]) -> Vec<Overlap> {
        let mut found = Vec::new();
        self.walk(prompt.iter().copied(), self.live.clone(), &mut found);
        self.normalize(found)
    }
}

fn overlap(worker: WorkerId, tier: Tier, blocks: u64) -> Overlap {
    Overlap { worker, rank: R0, tier, blocks: Blocks(blocks) }
}

fn join(index: &mut ResidencyIndex, worker: WorkerId) -> SourceSlot {
    index.add_source(worker, R0, KvIndexState::Exact).unwrap()
}

fn hold(index: &mut ResidencyIndex, slot: SourceSlot, tier: Tier, blocks: &[BlockHash]) {
    let changes: Vec<ResidencyChange> = blocks.iter().map(|hash| ResidencyChange::Added(*hash, tier)).collect();
    index.apply(slot, &changes);
}

fn blocks(count: u32) -> Vec<BlockHash> {
    chain(4, &(0..4 * count).collect::<Vec<_>>())
}

#[test]
fn overlap_counts_only_leading_blocks_without_holes() {
    let mut index = ResidencyIndex::new();
    let (a, b) = (join(&mut index, A), join(&mut index, B));
    let prompt = blocks(6);
    hold(&mut index, a, Hbm, &prompt[..4]);
    hold(&mut index, b, Hbm, &prompt[1..]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4)]);
    hold(&mut index, b, Hbm, &prompt[..1]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4), overlap(B, Hbm, 6)]);
    index.apply(
        b,
        &[
            ResidencyChange::Removed(prompt[2], Hbm),
            ResidencyChange::Removed(prompt[2], Hbm),
            ResidencyChange::Removed(BlockHash(9), Hbm),
        ],
    );
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4), overlap(B, Hbm, 2)]);
    assert_eq!(index.overlaps(&[]), []);
}

#[test]
fn bisection_covers_whole_sources_and_holed_ones_are_walked() {
    let mut index = ResidencyIndex::new();
    let prompt = blocks(37);
    let slots: Vec<SourceSlot> = (0..100).map(|n| join(&mut index, WorkerId(n))).collect();
    for (n, slot) in slots.iter().enumerate() {
        hold(&mut index, *slot, Hbm, &prompt[..n % 38]);
        index.set_closure(*slot, PrefixClosure::Whole);
    }
    index.set_closure(slots[20], PrefixClosure::Holed);
    index.apply(slots[20], &[ResidencyChange::Removed(prompt[3], Hbm)]);
    index.retire(slots[21]);
    index.set_closure(slots[21], PrefixClosure::Whole);
    let depth = |n: u64| if n == 20 { 3 } else { n % 38 };
    let expected: Vec<Overlap> =
        (0..100u64).filter(|n| depth(*n) > 0 && *n != 21).map(|n| overlap(WorkerId(n), Hbm, depth(n))).collect();
    assert_eq!(index.overlaps(&prompt), expected);
    assert_eq!(index.overlaps(&prompt), index.overlaps_without_bisection(&prompt));
    assert_eq!(index.overlaps(&prompt[..1]).len(), expected.len());
    for near in 0..40 {
        let near = [Blocks(near * 7 % 40), Blocks(near), Blocks(u64::from(u32::MAX))];
        assert_eq!(index.find_depths(prompt.len(), &near, |at| prompt[at]), expected, "near {near:?}");
    }
}

#[test]
fn slower_tier_is_listed_where_it_reaches_further() {
    let mut index = ResidencyIndex::new();
    let a = join(&mut index, A);
    let prompt = blocks(5);
    hold(&mut index, a, Hbm, &[prompt[0], prompt[2]]);
    hold(&mut index, a, Host, &prompt[1..2]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1), overlap(A, Host, 3)]);
    hold(&mut index, a, Disk, &prompt[3..]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1), overlap(A, Host, 3), overlap(A, Disk, 5)]);
    index.apply(a, &[ResidencyChange::Removed(prompt[0], Hbm)]);
    assert_eq!(index.overlaps(&prompt), []);
}

#[test]
fn block_with_two_engine_hashes_is_removed_with_the_second() {
    let mut index = ResidencyIndex::new();
    let a = join(&mut index, A);
    let prompt = blocks(1);
    hold(&mut index, a, Hbm, &prompt);
    hold(&mut index, a, Hbm, &prompt);
    index.apply(a, &[ResidencyChange::Removed(prompt[0], Hbm)]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1)]);
    index.apply(a, &[ResidencyChange::Removed(prompt[0], Hbm)]);
    assert_eq!((index.overlaps(&prompt), index.blocks()), (vec![], 0));
}

#[test]
fn retired_source_holds_nothing_and_its_slot_is_reused_clean() {
    let mut index = ResidencyIndex::new();
    let (a, b) = (join(&mut index, A), join(&mut index, B));
    let prompt = blocks(3);
    hold(&mut index, a, Hbm, &prompt);
    hold(&mut index, b, Hbm, &prompt[..1]);
    index.retire(a);
    assert_eq!((index.overlaps(&prompt), index.sources()), (vec![overlap(B, Hbm, 1)], 1));
    let again = join(&mut index, A);
    assert_ne!(again, a, "the old place is not swept yet");
    index.apply(a, &prompt.iter().map(|hash| ResidencyChange::Removed(*hash, Hbm)).collect::<Vec<_>>());
    index.release(a);
    assert_eq!((index.blocks(), join(&mut index, WorkerId(3))), (1, a));
    assert_eq!(index.overlaps(&prompt), [overlap(B, Hbm, 1)]);
}

#[test]
fn worker_knowledge_is_that_of_its_least_known_rank() {
    let mut index = ResidencyIndex::new();
    assert_eq!(index.kv_index_state(A), KvIndexState::Approximate);
    let first = join(&mut index, A);
    let second = index.add_source(A, DpRank(1), KvIndexState::Degraded).unwrap();
    assert_eq!(index.kv_index_state(A), KvIndexState::Degraded);
    index.set_kv_index_state(second, KvIndexState::Exact);
    assert_eq!(index.kv_index_state(A), KvIndexState::Exact);
    index.set_kv_index_state(first, KvIndexState::Approximate);
    assert_eq!(index.kv_index_state(A), KvIndexState::Approximate);
    index.retire(first);
    index.set_kv_index_state(first, KvIndexState::Degraded);
    assert_eq!(index.kv_index_state(A), KvIndexState::Exact);
}

#[test]
fn too_many_sources_is_an_error() {
    let mut index = ResidencyIndex::new();
    for n in 0..ResidencyIndex::MAX_SOURCES {
        index.add_source(WorkerId(n as u64), R0, KvIndexState::Exact).unwrap();
    }
    assert_eq!(index.add_source(A, R0, KvIndexState::Exact), Err(TooManySources));
}

/// A naive index to compare with.
#[derive(Default)]
struct ReferenceIndex(BTreeMap<(u64, usize), BTreeMap<BlockHash, u32>>);

impl ReferenceIndex {
    fn depth(&self, worker: u64, reach: usize, prompt: &[BlockHash]) -> u64 {
        let planes: BTreeSet<BlockHash> = (0..=reach)
            .filter_map(|plane| self.0.get(&(worker, plane)))
            .flat_map(|held| held.keys().copied())
            .collect();
        prompt.iter().take_while(|hash| planes.contains(hash)).count() as u64
    }

    fn overlaps(&self, workers: u64, prompt: &[BlockHash]) -> Vec<Overlap> {
        let mut all = Vec::new();
        for worker in 0..workers {
            let mut faster = 0;
            for (plane, tier) in [Hbm, Host, Disk].into_iter().enumerate() {
                let depth = self.depth(worker, plane, prompt);
                if depth > faster {
                    all.push(overlap(WorkerId(worker), tier, depth));
                    faster = depth;
                }
            }
        }
        all
    }
}

const WORKERS: u64 = 70;

proptest! {
    #[test]
    fn lookups_agree_with_reference_sets_in_any_event_order(
        steps in proptest::collection::vec((0..WORKERS, 0usize..3, 0usize..14, any::<bool>(), 1usize..6), 1..300),
        // Prompts with 8 shared blocks.
        asked in 0usize..3,
    ) {
        let shared: Vec<u32> = (0..32).collect();
        let prompt = |last: u32| chain(4, &[&shared[..], &(last..last + 24).collect::<Vec<_>>()].concat());
        let prompts = [prompt(100), prompt(200), prompt(300)];
        let mut index = ResidencyIndex::new();
        let slots: Vec<SourceSlot> = (0..WORKERS).map(|n| join(&mut index, WorkerId(n))).collect();
        let mut literal = ReferenceIndex::default();
        for (worker, plane, at, add, run) in steps {
            let prompt = &prompts[(worker as usize + at) % 3];
            let tier = [Hbm, Host, Disk][plane];
            // Stores are runs from the start; evictions hit any block.
            let hit = if add { &prompt[..(at + run).min(14)] } else { &prompt[at..at + 1] };
            let held = literal.0.entry((worker, plane)).or_default();
            for hash in hit {
                if add {
                    *held.entry(*hash).or_default() += 1;
                    index.apply(slots[worker as usize], &[ResidencyChange::Added(*hash, tier)]);
                } else {
                    if let Some(count) = held.get_mut(hash) {
                        *count -= 1;
                    }
                    index.apply(slots[worker as usize], &[ResidencyChange::Removed(*hash, tier)]);
                }
            }
            held.retain(|_, count| *count > 0);
        }
        prop_assert_eq!(index.overlaps(&prompts[asked]), literal.overlaps(WORKERS, &prompts[asked]));
        let distinct: BTreeSet<BlockHash> = literal.0.values().flat_map(|held| held.keys().copied()).collect();
        prop_assert_eq!(index.blocks(), distinct.len(), "nothing that nobody holds is kept");
    }
}
