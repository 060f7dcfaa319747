use std::collections::BTreeMap;

use proptest::prelude::*;
use vocabulary::{BlockHash, Tier};

use super::*;
use crate::holder_sets::TierSlotBits;

const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

/// A naive shard to compare with: how often each slot holds a block in each tier.
#[derive(Default)]
struct ReferenceShard(BTreeMap<(u64, u16, usize), u32>);

impl ReferenceShard {
    fn reach(&self, hash: u64, word: usize) -> TierSlotBits {
        let mut reach = TierSlotBits::default();
        for (_, slot, its) in self.0.keys().filter(|(held, slot, _)| *held == hash && usize::from(slot / 64) == word) {
            (*its..3).for_each(|plane| reach[plane] |= 1 << (slot % 64));
        }
        reach
    }

    fn blocks(&self) -> usize {
        let mut hashes: Vec<u64> = self.0.keys().map(|(hash, _, _)| *hash).collect();
        hashes.dedup();
        hashes.len()
    }
}

fn step() -> impl Strategy<Value = (u64, u16, usize, bool)> {
    // Few blocks and many slots, so that some blocks have many holders, and some are held several times by one slot.
    let slot = prop_oneof![4 => 0u16..6, 1 => 60u16..70, 1 => Just(8190u16)];
    (0u64..6, slot, 0usize..3, prop::bool::weighted(0.6))
}

proptest! {
    #[test]
    fn shard_agrees_with_reference_counts(steps in proptest::collection::vec(step(), 1..400)) {
        let (mut shard, mut sets, mut literal) = (IndexShard::default(), HolderSets::default(), ReferenceShard::default());
        for (hash, slot, plane, add) in steps {
            let key = MixedBlockHash::of(BlockHash(hash));
            if add {
                shard.hold(key, slot, TIERS[plane], &mut sets);
                *literal.0.entry((hash, slot, plane)).or_default() += 1;
            } else {
                shard.release(key, slot, TIERS[plane], &mut sets);
                literal.0.entry((hash, slot, plane)).and_modify(|count| *count -= 1);
                literal.0.retain(|_, count| *count > 0);
            }
            prop_assert_eq!(shard.len(), literal.blocks());
        }
        for hash in 0..6 {
            for word in [0, 1, 127] {
                let holders = shard.holders(MixedBlockHash::of(BlockHash(hash)));
                prop_assert_eq!(sets.reach(holders, word), literal.reach(hash, word));
            }
        }
        for ((hash, slot, plane), count) in literal.0 {
            (0..count).for_each(|_| shard.release(MixedBlockHash::of(BlockHash(hash)), slot, TIERS[plane], &mut sets));
        }
        let doubled = shard.duplicates.map_or(0, |doubled| doubled.len());
        prop_assert_eq!((shard.blocks.len(), doubled, sets.len()), (0, 0, 0));
    }
}

#[test]
fn blocks_spread_over_all_shards_and_keys_round_trip() {
    let mut counts = vec![0; MixedBlockHash::SHARDS];
    (0..64_000).for_each(|n| counts[MixedBlockHash::of(BlockHash(n)).shard()] += 1);
    assert!(counts.iter().all(|count| (40..90).contains(count)), "{counts:?}");
}
