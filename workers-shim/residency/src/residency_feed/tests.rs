use proptest::prelude::*;
use std::collections::BTreeMap;

use super::*;
use crate::tests::{SGLANG, VLLM_INTEGERS, chain, chain_from, recording, removed, root, rules, stored};
use vocabulary::{Blocks, RequestNamespace};

const WORKER: WorkerId = WorkerId(5);

fn feed(block: u64) -> ResidencyFeed {
    ResidencyFeed::new(WORKER, DpRank(0), rules(block))
}

fn settle(feed: &mut ResidencyFeed, index: &mut ResidencyIndex, budget: usize) {
    while feed.settle(index, budget).unwrap() == ApplyProgress::More {}
}

fn depth(index: &ResidencyIndex, prompt: &[vocabulary::BlockHash]) -> u64 {
    index.overlaps(prompt).first().map_or(0, |overlap| overlap.blocks.0)
}

#[test]
fn recorded_engine_run_ends_with_its_real_cache_content() {
    // A cache of 48 blocks of 32 tokens that overflows four times, with duplicates, and that is cleared.
    let prompt: Vec<u32> = (0..96).map(|n| 103 + 7 * n).collect();
    let (plain, salted) = (chain(16, &prompt), {
        let keys = RequestNamespace { salt: Some("tenant-a"), ..RequestNamespace::default() };
        chain_from(root(keys), 16, &prompt)
    });
    let (mut feed, mut index) = (feed(16), ResidencyIndex::new());
    let mut depths = Vec::new();
    for (_, batch) in recording(VLLM_INTEGERS) {
        feed.ingest_all(&batch.events);
        settle(&mut feed, &mut index, 7);
        depths.push((depth(&index, &plain), depth(&index, &salted)));
    }
    assert_eq!(depths[0], (6, 0));
    assert_eq!(depths[3], (6, 6), "a tenant's copy lies beside the others'");
    assert_eq!(depths[13], (0, 0), "evicted, the doubled blocks with their second removal");
    assert_eq!(depths[17], (6, 0));
    assert_eq!(depths[19], (6, 0), "cleared and stored again");
    assert_eq!(index.blocks(), 6);
    assert_eq!(feed.counts(), SourceAnomalies::default(), "a whole stream leaves no riddles");
}

#[test]
fn batched_events_equal_single_events() {
    let all: Vec<KvCacheEvent> = recording(VLLM_INTEGERS).into_iter().flat_map(|(_, batch)| batch.events).collect();
    let prompt = chain(16, &(0..96).map(|n| 103 + 7 * n).collect::<Vec<_>>());
    assert!(all.len() > LOOKAHEAD_EVENTS && all.contains(&KvCacheEvent::Cleared), "{} events", all.len());
    for end in 0..=all.len() {
        let ((mut one, mut index), (mut other, mut same)) =
            ((feed(16), ResidencyIndex::new()), (feed(16), ResidencyIndex::new()));
        all[..end].iter().for_each(|event| one.ingest(event));
        other.ingest_all(&all[..end]);
        settle(&mut one, &mut index, 1000);
        settle(&mut other, &mut same, 1000);
        let known = |feed: &ResidencyFeed, index: &ResidencyIndex| {
            (feed.blocks(), feed.counts(), index.blocks(), index.overlaps(&prompt))
        };
        assert_eq!(known(&other, &same), known(&one, &index), "{end} events");
    }
}

#[test]
fn index_never_exceeds_the_engines_cache_size() {
    let (mut feed, mut index) = (feed(32), ResidencyIndex::new());
    for (sequence, batch) in recording(VLLM_INTEGERS) {
        batch.events.iter().for_each(|event| feed.ingest(event));
        settle(&mut feed, &mut index, 1000);
        assert!(index.blocks() <= 48, "{} blocks after message {sequence}", index.blocks());
    }
}

#[test]
fn sglang_events_are_placed_alike() {
    let (mut feed, mut index) = (feed(32), ResidencyIndex::new());
    for (_, batch) in recording(SGLANG).into_iter().take(5) {
        batch.events.iter().for_each(|event| feed.ingest(event));
    }
    settle(&mut feed, &mut index, 3);
    let prompt: Vec<u32> = (0..160).map(|n| 103 + 7 * n).collect();
    assert!(depth(&index, &chain(32, &prompt[..96])) == 3);
    let keys = RequestNamespace { salt: Some("tenant-a"), ..RequestNamespace::default() };
    assert_eq!(depth(&index, &chain_from(root(keys), 32, &prompt[..96])), 3);
}

#[test]
fn settle_respects_its_budget() {
    let (mut feed, mut index) = (feed(4), ResidencyIndex::new());
    let hashes: Vec<u64> = (0..100).collect();
    feed.ingest(&KvCacheEvent::Stored(stored(&hashes, None, &(0..400).collect::<Vec<_>>())));
    let mut before = 0;
    while feed.settle(&mut index, 10).unwrap() == ApplyProgress::More {
        assert!(index.blocks() - before <= 10);
        before = index.blocks();
    }
    assert_eq!(index.blocks(), 100);
    feed.reset();
    assert_eq!(feed.settle(&mut index, 10).unwrap(), ApplyProgress::More);
    assert_eq!(depth(&index, &chain(4, &(0..400).collect::<Vec<_>>())), 0, "gone at once");
    assert!(index.blocks() >= 90, "swept later");
    settle(&mut feed, &mut index, 10);
    assert_eq!((index.blocks(), index.sources()), (0, 1));
    feed.leave();
    settle(&mut feed, &mut index, 10);
    assert_eq!(index.sources(), 0);
}

#[test]
fn knowledge_survives_a_reset() {
    let (mut feed, mut index) = (feed(4), ResidencyIndex::new());
    settle(&mut feed, &mut index, 10);
    assert_eq!(index.kv_index_state(WORKER), KvIndexState::Degraded);
    feed.set_kv_index_state(KvIndexState::Exact);
    feed.ingest(&KvCacheEvent::Cleared);
    settle(&mut feed, &mut index, 10);
    assert_eq!(index.kv_index_state(WORKER), KvIndexState::Exact);
}

/// An engine's block tree: blocks 0..12, where the parent of block n is n/2 of the level above.
fn parent(block: u64) -> Option<u64> {
    (block > 1).then_some(block / 2)
}

fn prompt_of(block: u64) -> Vec<u32> {
    let mut path = vec![block];
    while let Some(up) = parent(*path.last().unwrap()) {
        path.push(up);
    }
    path.iter().rev().flat_map(|block| (0..4).map(move |n| *block as u32 * 10 + n)).collect()
}

proptest! {
    #[test]
    fn feed_agrees_with_a_reference_count(
        steps in proptest::collection::vec((0u8..12, 1u64..14), 1..120),
        budget in 1usize..9,
        near in proptest::collection::vec((0u64..10).prop_map(Blocks), 0..4),
    ) {
        let (mut feed, mut index) = (feed(2), ResidencyIndex::new());
        let mut copies: BTreeMap<u64, u32> = BTreeMap::new();
        // Hashes that the source can place: stored while the parent was there, and not removed since.
        for (kind, block) in steps {
            match kind {
                0 => {
                    feed.ingest(&KvCacheEvent::Cleared);
                    copies.clear();
                }
                1..=4 => {
                    feed.ingest(&KvCacheEvent::Removed(removed(&[block])));
                    if let Some(count) = copies.get_mut(&block) {
                        *count -= 1;
                        if *count == 0 { copies.remove(&block); }
                    }
                }
                _ => {
                    // An engine stores a block only with all its ancestors.
                    let mut path = vec![block];
                    while let Some(up) = parent(*path.last().unwrap()) { path.push(up); }
                    for block in path.into_iter().rev() {
                        let tokens: Vec<u32> = (0..4).map(|n| block as u32 * 10 + n).collect();
                        feed.ingest(&KvCacheEvent::Stored(stored(&[block], parent(block), &tokens)));
                        *copies.entry(block).or_default() += 1;
                    }
                }
            }
            if kind % 3 == 0 {
                let _ = feed.settle(&mut index, budget).unwrap();
                // Bisection and walking must agree after every batch.
                for block in 1..14 {
                    let prompt = chain(2, &prompt_of(block));
                    let found = index.find_depths(prompt.len(), &near, |at| prompt[at]);
                    prop_assert_eq!(found, index.overlaps_without_bisection(&prompt), "block {}", block);
                }
            }
        }
        settle(&mut feed, &mut index, budget);
        for block in 1..14 {
            let prompt = prompt_of(block);
            let mut path = vec![block];
            while let Some(up) = parent(*path.last().unwrap()) { path.push(up); }
            let expected = path.iter().rev().take_while(|block| copies.contains_key(block)).count() as u64;
            let found = index.overlaps(&chain(2, &prompt)).first().map_or(Blocks(0), |overlap| overlap.blocks);
            prop_assert_eq!(found, Blocks(2 * expected), "block {}", block);
        }
        prop_assert_eq!(feed.blocks(), copies.len());
        prop_assert_eq!(index.blocks(), 2 * copies.len());
    }
}
