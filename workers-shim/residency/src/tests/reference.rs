//! Property test: for any events in any order, the index agrees with plain maps.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use vocabulary::{BlockHash, DpRank, Overlap, PrefixId, RequestNamespace, Tier, WorkerId};

use super::{SEED, chain_from, removed, root, rules, stored};
use crate::{ApplyProgress, BlockRemoved, BlockStored, KvCacheEvent, KvCacheSpecKind, ResidencyFeed, ResidencyIndex};

const WORKER: WorkerId = WorkerId(5);
const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

/// Copies by tier and group; the kind is that of the first store.
type ReferenceCopyCounts = BTreeMap<(Tier, u32), (KvCacheSpecKind, u32)>;

/// A naive source to compare with.
#[derive(Default)]
struct ReferenceSource {
    placed: BTreeMap<u64, (PrefixId, Vec<BlockHash>, ReferenceCopyCounts)>,
    waiting: BTreeMap<u64, (Option<u64>, Vec<u32>, ReferenceCopyCounts)>,
}

fn add(copies: &mut ReferenceCopyCounts, event: &BlockStored) {
    copies.entry((event.tier, event.group)).or_insert((event.kind, 0)).1 += 1;
}

impl ReferenceSource {
    fn store(&mut self, event: &BlockStored) {
        let (name, parent) = (event.hashes[0].0, event.parent.map(|parent| parent.0));
        if let Some((_, _, copies)) = self.placed.get_mut(&name) {
            return add(copies, event);
        }
        let (old, tokens, mut copies) =
            self.waiting.remove(&name).unwrap_or((parent, event.tokens.clone(), ReferenceCopyCounts::new()));
        add(&mut copies, event);
        let known = parent.is_none_or(|parent| self.placed.contains_key(&parent));
        let newer = tokens.is_empty() && !event.tokens.is_empty() || known && !event.tokens.is_empty();
        let block = if newer { (parent, event.tokens.clone(), copies) } else { (old, tokens, copies) };
        self.waiting.insert(name, block);
        if known && newer {
            self.place(name);
        }
    }

    /// Places a block, and then all that wait for it.
    fn place(&mut self, name: u64) {
        let (parent, tokens, copies) = self.waiting.remove(&name).unwrap();
        let before = parent.map_or(root(RequestNamespace::default()), |parent| self.placed[&parent].0);
        let ends: Vec<PrefixId> = tokens
            .chunks(2)
            .scan(before, |end, tokens| {
                *end = end.extend(SEED, tokens);
                Some(*end)
            })
            .collect();
        let hashes = ends.iter().map(|end| end.block_hash()).collect();
        self.placed.insert(name, (*ends.last().unwrap(), hashes, copies));
        let hangs_on = |(_, (parent, tokens, _)): &(&u64, &(Option<u64>, Vec<u32>, ReferenceCopyCounts))| {
            *parent == Some(name) && !tokens.is_empty()
        };
        let children: Vec<u64> = self.waiting.iter().filter(hangs_on).map(|(child, _)| *child).collect();
        children.into_iter().for_each(|child| self.place(child));
    }

    fn remove(&mut self, event: &BlockRemoved) {
        let name = event.hashes[0].0;
        let placed = self.placed.get_mut(&name).map(|(_, _, copies)| copies);
        let Some(copies) = placed.or(self.waiting.get_mut(&name).map(|(_, _, copies)| copies)) else { return };
        let place = (event.tier, event.group);
        if let Some((_, count)) = copies.get_mut(&place) {
            *count = event.remaining.first().copied().unwrap_or(*count - 1);
            if *count == 0 {
                copies.remove(&place);
            }
        }
        if copies.is_empty() {
            self.placed.remove(&name);
            self.waiting.remove(&name);
        }
    }

    fn hold(&self, tier: Tier) -> BTreeSet<BlockHash> {
        let serves = |copies: &ReferenceCopyCounts| {
            copies.iter().any(|((at, _), (kind, _))| *at == tier && *kind == KvCacheSpecKind::Full)
        };
        self.placed.values().filter(|(_, _, copies)| serves(copies)).flat_map(|(_, hashes, _)| hashes.clone()).collect()
    }

    fn overlaps(&self, prompt: &[BlockHash]) -> Vec<Overlap> {
        let (mut found, mut held) = (Vec::new(), BTreeSet::new());
        let mut faster = 0;
        for tier in TIERS {
            held.extend(self.hold(tier));
            let depth = prompt.iter().take_while(|hash| held.contains(hash)).count() as u64;
            if depth > faster {
                found.push(Overlap { worker: WORKER, rank: DpRank(0), tier, blocks: vocabulary::Blocks(depth) });
                faster = depth;
            }
        }
        found
    }
}

const BLOCKS: u64 = 12;

/// Tokens of a block of one or two chain blocks.
fn tokens(block: u64, other: bool) -> Vec<u32> {
    (0..4).map(|n| block as u32 * 10 + n + if other { 500 } else { 0 }).collect()
}

/// A hash may be stored under another parent, with other tokens or none, and two hashes may mean one block.
fn event() -> impl Strategy<Value = KvCacheEvent> {
    let place = prop_oneof![
        8 => Just((Tier::Hbm, 0, KvCacheSpecKind::Full)),
        2 => Just((Tier::Host, 0, KvCacheSpecKind::Full)),
        1 => Just((Tier::Disk, 0, KvCacheSpecKind::Full)),
        1 => Just((Tier::Hbm, 1, KvCacheSpecKind::Window)),
        1 => Just((Tier::Hbm, 300, KvCacheSpecKind::Full)),
    ];
    (0u8..40, 1..BLOCKS, any::<prop::sample::Index>(), place).prop_map(
        |(kind, block, other, (tier, group, attention))| {
            let usual = (block > 1).then_some(block / 2);
            let store = |parent, tokens: &[u32]| {
                KvCacheEvent::Stored(BlockStored { tier, group, kind: attention, ..stored(&[block], parent, tokens) })
            };
            match kind {
                0 => KvCacheEvent::Cleared,
                1..=16 => KvCacheEvent::Removed(BlockRemoved { tier, group, ..removed(&[block]) }),
                17 => KvCacheEvent::Removed(BlockRemoved {
                    tier,
                    group,
                    remaining: vec![other.index(3) as u32],
                    ..removed(&[block])
                }),
                18 => store(usual, &[]),
                19 => store(Some(other.index(BLOCKS as usize) as u64), &tokens(block, false)),
                20 => store(usual, &tokens(block, true)),
                // The same block under a second hash.
                21 => KvCacheEvent::Stored(stored(&[block + 100], usual, &tokens(block, false))),
                22 => KvCacheEvent::Removed(removed(&[block + 100])),
                _ => store(usual, &tokens(block, false)),
            }
        },
    )
}

fn prompts() -> Vec<Vec<BlockHash>> {
    let path = |block: u64| std::iter::successors(Some(block), |block| (*block > 1).then_some(block / 2));
    let prompt = |block: u64, odd: Option<u64>| {
        let mut path: Vec<u64> = path(block).collect();
        path.reverse();
        let tokens: Vec<u32> = path.into_iter().flat_map(|block| tokens(block, odd == Some(block))).collect();
        chain_from(root(RequestNamespace::default()), 2, &tokens)
    };
    (1..BLOCKS).flat_map(|block| [prompt(block, None), prompt(block, Some(2)), prompt(block, Some(block))]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn index_agrees_with_reference_maps_for_any_events(events in proptest::collection::vec(event(), 1..150)) {
        let (mut feed, mut index, mut literal) = (ResidencyFeed::new(WORKER, DpRank(0), rules(2)), ResidencyIndex::new(), ReferenceSource::default());
        for event in &events {
            feed.ingest(event);
            match event {
                KvCacheEvent::Stored(event) => literal.store(event),
                KvCacheEvent::Removed(event) => literal.remove(event),
                KvCacheEvent::Cleared => literal = ReferenceSource::default(),
                KvCacheEvent::Other => {}
            }
            while feed.settle(&mut index, 3).unwrap() == ApplyProgress::More {}
            let held: BTreeSet<BlockHash> = TIERS.into_iter().flat_map(|tier| literal.hold(tier)).collect();
            prop_assert_eq!((index.blocks(), feed.blocks()), (held.len(), literal.placed.len()));
            for prompt in prompts() {
                prop_assert_eq!(index.overlaps(&prompt), literal.overlaps(&prompt));
            }
        }
        // Everything is removed in the order of the hashes: nothing must be left, not even stumps.
        for (name, copies) in literal.placed.iter().map(|(name, (_, _, copies))| (name, copies))
            .chain(literal.waiting.iter().map(|(name, (_, _, copies))| (name, copies))) {
            for (tier, group) in copies.keys() {
                let all = BlockRemoved { tier: *tier, group: *group, remaining: vec![0], ..removed(&[*name]) };
                feed.ingest(&KvCacheEvent::Removed(all));
            }
        }
        while feed.settle(&mut index, 3).unwrap() == ApplyProgress::More {}
        prop_assert_eq!((index.blocks(), feed.blocks()), (0, 0));
        prop_assert!(feed.source().is_fully_cleared());
    }
}
