use std::collections::BTreeSet;

use super::*;
use crate::tests::SEED;
use vocabulary::{PrefixId, Tokens};

fn chain(last: u32, blocks: u32) -> PrefixChain {
    // The first two blocks are equal in all chains.
    let tokens: Vec<u32> = (0..4 * blocks).map(|n| if n < 8 { n } else { n + last * 1000 }).collect();
    PrefixChain::over_tokens(PrefixId(1), SEED, Tokens(4), &tokens)
}

struct BelievedBlocks(BTreeSet<BlockHash>);

impl BelievedBlocks {
    fn apply(&mut self, changes: &[ResidencyChange]) {
        for change in changes {
            let fresh = match *change {
                ResidencyChange::Added(hash, _) => self.0.insert(hash),
                ResidencyChange::Removed(hash, _) => self.0.remove(&hash),
            };
            assert!(fresh, "every change changes something: {change:?}");
        }
    }

    fn depth(&self, chain: &PrefixChain) -> usize {
        chain.ids.iter().take_while(|id| self.0.contains(&id.block_hash())).count()
    }
}

fn note(routed: &mut RoutedBlocks, blocks: &mut BelievedBlocks, chain: &PrefixChain, at: u64) {
    let mut changes = Vec::new();
    routed.record_prompts(&[chain], Micros(at), &mut changes);
    blocks.apply(&changes);
}

#[test]
fn eviction_takes_the_least_recent_leaf() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 8, age: Micros(1_000) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    let (a, b) = (chain(1, 5), chain(2, 5));
    note(&mut routed, &mut believed, &a, 0);
    note(&mut routed, &mut believed, &b, 1);
    assert_eq!((believed.depth(&a), believed.depth(&b)), (5, 5), "8 blocks, two of them shared");
    note(&mut routed, &mut believed, &chain(3, 3), 2);
    assert_eq!((believed.depth(&a), believed.depth(&b), believed.0.len()), (4, 5, 8));
    note(&mut routed, &mut believed, &a, 3);
    assert_eq!((believed.depth(&a), believed.depth(&b), believed.0.len()), (5, 4, 8));
}

#[test]
fn unused_blocks_expire() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 100, age: Micros(10) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    note(&mut routed, &mut believed, &chain(1, 4), 0);
    note(&mut routed, &mut believed, &chain(2, 4), 8);
    let mut changes = Vec::new();
    routed.expire(Micros(11), &mut changes);
    believed.apply(&changes);
    assert_eq!(
        (believed.depth(&chain(1, 4)), believed.depth(&chain(2, 4))),
        (2, 4),
        "the shared blocks were used at 8"
    );
    let mut changes = Vec::new();
    routed.clear(&mut changes);
    believed.apply(&changes);
    assert!(believed.0.is_empty());
}

#[test]
fn prompt_longer_than_the_limit_keeps_its_start() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 3, age: Micros(10) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    note(&mut routed, &mut believed, &chain(1, 9), 0);
    assert_eq!(believed.depth(&chain(1, 9)), 3);
}

#[test]
fn repeated_prompts_take_no_more_memory() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 1000, age: Micros(u64::MAX) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    // A block that is never used again stays in front of all later uses.
    note(&mut routed, &mut believed, &chain(9, 6), 0);
    for round in 0..2_000 {
        note(&mut routed, &mut believed, &chain(1, 50), round);
    }
    assert!(routed.touches.len() < 2_500, "{} touches for {} blocks", routed.touches.len(), routed.stamps.len());
}

#[test]
fn lowered_limit_evicts_with_the_next_prompt() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 100, age: Micros(10) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    note(&mut routed, &mut believed, &chain(1, 9), 0);
    routed.set_limit(6);
    note(&mut routed, &mut believed, &chain(2, 4), 1);
    assert_eq!((believed.depth(&chain(2, 4)), believed.depth(&chain(1, 9)), believed.0.len()), (4, 4, 6));
}

#[test]
fn prompts_of_one_step_expire_and_are_bounded_together() {
    let mut routed = RoutedBlocks::new(RoutedBlockLimits { blocks: 8, age: Micros(10) });
    let mut believed = BelievedBlocks(BTreeSet::new());
    let (a, b) = (chain(1, 5), chain(2, 5));
    let mut changes = Vec::new();
    routed.record_prompts(&[&a, &b, &chain(3, 3)], Micros(0), &mut changes);
    believed.apply(&changes);
    assert_eq!(
        (believed.depth(&a), believed.depth(&b), believed.0.len()),
        (4, 5, 8),
        "as if they had come one after the other"
    );
    changes.clear();
    routed.expire(Micros(11), &mut changes);
    believed.apply(&changes);
    assert_eq!(believed.0.len(), 0);
}
