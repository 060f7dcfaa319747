use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::tests::chain;
use Tier::{Disk, Hbm, Host};

const A: WorkerId = WorkerId(1);
const B: WorkerId = WorkerId(2);
const R0: DpRank = DpRank(0);

impl Index {
    /// The overlaps without bisection.
    pub(crate) fn walked(&self, prompt: &[BlockHash]) -> Vec<Overlap> {
        let mut found = Vec::new();
        self.walk(prompt.iter().copied(), self.live.clone(), &mut found);
        self.tidy(found)
    }
}

fn overlap(worker: WorkerId, tier: Tier, blocks: u64) -> Overlap {
    Overlap { worker, rank: R0, tier, blocks: Blocks(blocks) }
}

fn join(index: &mut Index, worker: WorkerId) -> Slot {
    index.join(worker, R0, Knowledge::Exact).unwrap()
}

fn hold(index: &mut Index, slot: Slot, tier: Tier, blocks: &[BlockHash]) {
    let changes: Vec<Change> = blocks.iter().map(|hash| Change::Held(*hash, tier)).collect();
    index.apply(slot, &changes);
}

fn blocks(count: u32) -> Vec<BlockHash> {
    chain(4, &(0..4 * count).collect::<Vec<_>>())
}

#[test]
fn only_leading_blocks_without_a_hole_count() {
    let mut index = Index::new();
    let (a, b) = (join(&mut index, A), join(&mut index, B));
    let prompt = blocks(6);
    hold(&mut index, a, Hbm, &prompt[..4]);
    hold(&mut index, b, Hbm, &prompt[1..]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4)]);
    hold(&mut index, b, Hbm, &prompt[..1]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4), overlap(B, Hbm, 6)]);
    index.apply(b, &[Change::Gone(prompt[2], Hbm), Change::Gone(prompt[2], Hbm), Change::Gone(BlockHash(9), Hbm)]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 4), overlap(B, Hbm, 2)]);
    assert_eq!(index.overlaps(&[]), []);
}

#[test]
fn bisection_finds_every_depth_of_whole_sources_and_holed_ones_are_walked() {
    let mut index = Index::new();
    let prompt = blocks(37);
    let slots: Vec<Slot> = (0..100).map(|n| join(&mut index, WorkerId(n))).collect();
    for (n, slot) in slots.iter().enumerate() {
        hold(&mut index, *slot, Hbm, &prompt[..n % 38]);
        index.shape(*slot, Shape::Whole);
    }
    index.shape(slots[20], Shape::Holed);
    index.apply(slots[20], &[Change::Gone(prompt[3], Hbm)]);
    index.retire(slots[21]);
    index.shape(slots[21], Shape::Whole);
    let depth = |n: u64| if n == 20 { 3 } else { n % 38 };
    let expected: Vec<Overlap> =
        (0..100u64).filter(|n| depth(*n) > 0 && *n != 21).map(|n| overlap(WorkerId(n), Hbm, depth(n))).collect();
    assert_eq!(index.overlaps(&prompt), expected);
    assert_eq!(index.overlaps(&prompt), index.walked(&prompt));
    assert_eq!(index.overlaps(&prompt[..1]).len(), expected.len());
    for near in 0..40 {
        let near = [Blocks(near * 7 % 40), Blocks(near), Blocks(u64::from(u32::MAX))];
        assert_eq!(index.find(prompt.len(), &near, |at| prompt[at]), expected, "near {near:?}");
    }
}

#[test]
fn a_slower_tier_is_listed_where_it_reaches_further() {
    let mut index = Index::new();
    let a = join(&mut index, A);
    let prompt = blocks(5);
    hold(&mut index, a, Hbm, &[prompt[0], prompt[2]]);
    hold(&mut index, a, Host, &prompt[1..2]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1), overlap(A, Host, 3)]);
    hold(&mut index, a, Disk, &prompt[3..]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1), overlap(A, Host, 3), overlap(A, Disk, 5)]);
    index.apply(a, &[Change::Gone(prompt[0], Hbm)]);
    assert_eq!(index.overlaps(&prompt), []);
}

#[test]
fn a_block_that_one_source_has_under_two_names_goes_with_the_second() {
    let mut index = Index::new();
    let a = join(&mut index, A);
    let prompt = blocks(1);
    hold(&mut index, a, Hbm, &prompt);
    hold(&mut index, a, Hbm, &prompt);
    index.apply(a, &[Change::Gone(prompt[0], Hbm)]);
    assert_eq!(index.overlaps(&prompt), [overlap(A, Hbm, 1)]);
    index.apply(a, &[Change::Gone(prompt[0], Hbm)]);
    assert_eq!((index.overlaps(&prompt), index.blocks()), (vec![], 0));
}

#[test]
fn a_retired_source_holds_nothing_at_once_and_its_place_is_given_away_clean() {
    let mut index = Index::new();
    let (a, b) = (join(&mut index, A), join(&mut index, B));
    let prompt = blocks(3);
    hold(&mut index, a, Hbm, &prompt);
    hold(&mut index, b, Hbm, &prompt[..1]);
    index.retire(a);
    assert_eq!((index.overlaps(&prompt), index.sources()), (vec![overlap(B, Hbm, 1)], 1));
    let again = join(&mut index, A);
    assert_ne!(again, a, "the old place is not swept yet");
    index.apply(a, &prompt.iter().map(|hash| Change::Gone(*hash, Hbm)).collect::<Vec<_>>());
    index.release(a);
    assert_eq!((index.blocks(), join(&mut index, WorkerId(3))), (1, a));
    assert_eq!(index.overlaps(&prompt), [overlap(B, Hbm, 1)]);
}

#[test]
fn a_worker_is_known_as_well_as_its_least_known_rank() {
    let mut index = Index::new();
    assert_eq!(index.knowledge(A), Knowledge::Fallback);
    let first = join(&mut index, A);
    let second = index.join(A, DpRank(1), Knowledge::Degraded).unwrap();
    assert_eq!(index.knowledge(A), Knowledge::Degraded);
    index.know(second, Knowledge::Exact);
    assert_eq!(index.knowledge(A), Knowledge::Exact);
    index.know(first, Knowledge::Fallback);
    assert_eq!(index.knowledge(A), Knowledge::Fallback);
    index.retire(first);
    index.know(first, Knowledge::Degraded);
    assert_eq!(index.knowledge(A), Knowledge::Exact);
}

#[test]
fn places_run_out_with_an_error() {
    let mut index = Index::new();
    for n in 0..Index::MOST_SOURCES {
        index.join(WorkerId(n as u64), R0, Knowledge::Exact).unwrap();
    }
    assert_eq!(index.join(A, R0, Knowledge::Exact), Err(TooManySources));
}

/// Who holds what, written down literally.
#[derive(Default)]
struct Literal(BTreeMap<(u64, usize), BTreeMap<BlockHash, u32>>);

impl Literal {
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
    fn lookups_agree_with_sets_under_any_order_of_stores_and_evictions(
        steps in proptest::collection::vec((0..WORKERS, 0usize..3, 0usize..14, any::<bool>(), 1usize..6), 1..300),
        // Prompts that share 8 blocks, then part.
        asked in 0usize..3,
    ) {
        let shared: Vec<u32> = (0..32).collect();
        let prompt = |last: u32| chain(4, &[&shared[..], &(last..last + 24).collect::<Vec<_>>()].concat());
        let prompts = [prompt(100), prompt(200), prompt(300)];
        let mut index = Index::new();
        let slots: Vec<Slot> = (0..WORKERS).map(|n| join(&mut index, WorkerId(n))).collect();
        let mut literal = Literal::default();
        for (worker, plane, at, add, run) in steps {
            let prompt = &prompts[(worker as usize + at) % 3];
            let tier = [Hbm, Host, Disk][plane];
            // Stores come as runs from the start; evictions hit anything.
            let hit = if add { &prompt[..(at + run).min(14)] } else { &prompt[at..at + 1] };
            let held = literal.0.entry((worker, plane)).or_default();
            for hash in hit {
                if add {
                    *held.entry(*hash).or_default() += 1;
                    index.apply(slots[worker as usize], &[Change::Held(*hash, tier)]);
                } else {
                    if let Some(count) = held.get_mut(hash) {
                        *count -= 1;
                    }
                    index.apply(slots[worker as usize], &[Change::Gone(*hash, tier)]);
                }
            }
            held.retain(|_, count| *count > 0);
        }
        prop_assert_eq!(index.overlaps(&prompts[asked]), literal.overlaps(WORKERS, &prompts[asked]));
        let distinct: BTreeSet<BlockHash> = literal.0.values().flat_map(|held| held.keys().copied()).collect();
        prop_assert_eq!(index.blocks(), distinct.len(), "nothing that nobody holds is kept");
    }
}
