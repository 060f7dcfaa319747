use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::tests::SEED;
use vocabulary::{PrefixId, Tokens};

fn chain(last: u32, blocks: u32) -> PrefixChain {
    // The first two blocks are equal in all chains.
    let tokens: Vec<u32> = (0..4 * blocks).map(|n| if n < 8 { n } else { n + last * 1000 }).collect();
    PrefixChain::over_tokens(PrefixId(1), SEED, Tokens(4), &tokens)
}

fn note(routed: &mut RoutedBlocks, chain: &PrefixChain, at: u64) {
    routed.record_prompts(&[chain], Micros(at), &mut Vec::new());
}

fn held_blocks(routed: &RoutedBlocks) -> BTreeSet<BlockHash> {
    routed.runs.iter().flat_map(|run| run.hashes.iter().copied()).collect()
}

#[test]
fn eviction_takes_the_least_recent_leaf() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 8, age: Micros(1_000) });
    let (a, b) = (chain(1, 5), chain(2, 5));
    note(&mut routed, &a, 0);
    note(&mut routed, &b, 1);
    assert_eq!((routed.depth(&a), routed.depth(&b)), (5, 5), "8 blocks, two of them shared");
    note(&mut routed, &chain(3, 3), 2);
    assert_eq!((routed.depth(&a), routed.depth(&b), routed.len()), (4, 5, 8));
    note(&mut routed, &a, 3);
    assert_eq!((routed.depth(&a), routed.depth(&b), routed.len()), (5, 4, 8));
}

#[test]
fn unused_blocks_expire() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 100, age: Micros(10) });
    note(&mut routed, &chain(1, 4), 0);
    note(&mut routed, &chain(2, 4), 8);
    routed.expire(Micros(11), usize::MAX, &mut Vec::new());
    assert_eq!((routed.depth(&chain(1, 4)), routed.depth(&chain(2, 4))), (2, 4), "the shared blocks were used at 8");
}

#[test]
fn prompt_longer_than_the_limit_keeps_its_start() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 3, age: Micros(10) });
    note(&mut routed, &chain(1, 9), 0);
    assert_eq!(routed.depth(&chain(1, 9)), 3);
}

#[test]
fn repeated_and_growing_prompts_take_no_more_memory() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 1000, age: Micros(u64::MAX) });
    // A block that is never used again stays older than all later uses.
    note(&mut routed, &chain(9, 6), 0);
    for round in 0..2_000 {
        note(&mut routed, &chain(1, 10 + round as u32 % 41), round);
    }
    assert_eq!(routed.count, 54);
    assert!(routed.runs.len() <= 2 && routed.evictable.len() <= 2, "{} runs", routed.runs.len());
    assert!(routed.runs.iter().all(|run| run.uses.len() <= 41));
}

#[test]
fn an_evicted_run_keeps_no_memory() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 10_000, age: Micros(u64::MAX) });
    note(&mut routed, &chain(1, 5_000), 0);
    note(&mut routed, &chain(2, 5_000), 1);
    routed.set_limit(5_000);
    note(&mut routed, &chain(2, 5_000), 2);
    let spare = |run: &BlockRun| run.hashes.capacity() - run.hashes.len();
    assert!(routed.runs.iter().map(spare).sum::<usize>() < 3 * SPARE_BLOCKS + 5_000);
    assert_eq!(routed.len(), 5_000);
}

/// What [`RoutedBlocks`] keeps, block by block: the number of its last use, and its depth.
struct LeastRecentlyUsed {
    limits: RoutedBlockLimits,
    blocks: BTreeMap<BlockHash, (u64, Micros, usize)>,
    uses: u64,
}

impl LeastRecentlyUsed {
    fn record(&mut self, prompts: &[&PrefixChain], now: Micros) {
        for chain in prompts {
            self.uses += 1;
            for (depth, id) in chain.ids.iter().take(self.limits.blocks).enumerate() {
                self.blocks.insert(id.block_hash(), (self.uses, now, depth));
            }
        }
        self.expire(now);
    }

    fn expire(&mut self, now: Micros) {
        while let Some((&hash, &(_, at, _))) =
            self.blocks.iter().min_by_key(|(_, (number, _, depth))| (*number, std::cmp::Reverse(*depth)))
        {
            if self.blocks.len() <= self.limits.blocks && now - at <= self.limits.age {
                break;
            }
            self.blocks.remove(&hash);
        }
    }
}

#[test]
fn runs_hold_what_a_list_of_blocks_would_and_no_block_without_its_parent() {
    for seed in 1..60_u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut below = |bound: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 20) % bound
        };
        let limits = RoutedBlockLimits { blocks: 10 + below(40) as usize, age: Micros(5 + below(60)) };
        let mut routed = RoutedBlocks::new(limits);
        let mut model = LeastRecentlyUsed { limits, blocks: BTreeMap::new(), uses: 0 };
        let mut first_blocks = BTreeSet::new();
        let mut parents = std::collections::HashMap::new();
        let mut now = 0;
        for step in 0..300 {
            now += below(4);
            let chains: Vec<PrefixChain> = (0..1 + below(2))
                .map(|_| {
                    // Chains of one family share blocks up to a multiple of five, at most.
                    let (family, blocks) = (below(3) as u32, 1 + below(24) as u32);
                    let fork = 5 * below(5) as u32;
                    let branch = below(3) as u32;
                    let tokens: Vec<u32> = (0..4 * blocks)
                        .map(|n| n + 1_000 * family + if n < 4 * fork { 0 } else { 10_000 * branch })
                        .collect();
                    PrefixChain::over_tokens(PrefixId(1), SEED, Tokens(4), &tokens)
                })
                .collect();
            for chain in &chains {
                let hashes: Vec<BlockHash> = chain.ids.iter().map(|id| id.block_hash()).collect();
                parents.extend(hashes.windows(2).map(|pair| (pair[1], pair[0])));
            }
            let mut changes = Vec::new();
            if below(5) == 0 {
                while routed.expire(Micros(now), 1, &mut changes) == ApplyProgress::More {}
                model.expire(Micros(now));
            } else {
                let prompts: Vec<&PrefixChain> = chains.iter().collect();
                routed.record_prompts(&prompts, Micros(now), &mut changes);
                model.record(&prompts, Micros(now));
            }
            for change in changes {
                let is_change = match change {
                    FirstBlockChange::Added(first) => first_blocks.insert(first),
                    FirstBlockChange::Removed(first) => first_blocks.remove(&first),
                };
                assert!(is_change, "seed {seed}, step {step}: {change:?} changes nothing");
            }
            let (held, expected) = (held_blocks(&routed), model.blocks.keys().copied().collect::<BTreeSet<_>>());
            assert_eq!(held, expected, "seed {seed}, step {step}");
            let is_whole = held.iter().all(|hash| parents.get(hash).is_none_or(|parent| held.contains(parent)));
            assert!(is_whole, "seed {seed}, step {step}: a block is held without its parent");
            let roots = held.iter().filter(|hash| !parents.contains_key(hash)).copied().collect();
            assert_eq!(first_blocks, roots, "seed {seed}, step {step}");
            assert_eq!(routed.first_blocks().collect::<BTreeSet<_>>(), roots);
            for chain in &chains {
                let depth = chain.ids.iter().take_while(|id| held.contains(&id.block_hash())).count();
                assert_eq!(routed.depth(chain), depth, "seed {seed}, step {step}");
            }
            assert_eq!(routed.count, expected.len());
            let starts: BTreeSet<BlockHash> = routed.starts.keys().copied().collect();
            let firsts = routed.runs.iter().filter_map(|run| run.hashes.first().copied());
            assert_eq!(starts, firsts.collect(), "seed {seed}, step {step}");
        }
    }
}

#[test]
fn lowered_limit_evicts_with_the_next_prompt() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 100, age: Micros(10) });
    note(&mut routed, &chain(1, 9), 0);
    routed.set_limit(6);
    note(&mut routed, &chain(2, 4), 1);
    assert_eq!((routed.depth(&chain(2, 4)), routed.depth(&chain(1, 9)), routed.len()), (4, 4, 6));
}

#[test]
fn prompts_of_one_step_expire_and_are_bounded_together() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 8, age: Micros(10) });
    let (a, b) = (chain(1, 5), chain(2, 5));
    routed.record_prompts(&[&a, &b, &chain(3, 3)], Micros(0), &mut Vec::new());
    assert_eq!(
        (routed.depth(&a), routed.depth(&b), routed.len()),
        (4, 5, 8),
        "as if they had come one after the other"
    );
    routed.expire(Micros(11), usize::MAX, &mut Vec::new());
    assert_eq!(routed.len(), 0);
}
