use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const TIERS: [Tier; 3] = [Tier::Hbm, Tier::Host, Tier::Disk];

/// Holder sets, with the set of a single block.
#[derive(Default)]
struct SingleBlockHolders {
    sets: HolderSets,
    set: Option<HolderSetId>,
}

impl SingleBlockHolders {
    fn set(&mut self) -> &mut HolderSetId {
        self.set.get_or_insert(HolderSetId::NONE)
    }

    fn add(&mut self, slot: u16, tier: Tier) -> bool {
        let mut set = *self.set();
        let added = self.sets.add(&mut set, slot, tier);
        *self.set() = set;
        added
    }

    fn remove(&mut self, slot: u16, tier: Tier) -> bool {
        let mut set = *self.set();
        let removed = self.sets.remove(&mut set, slot, tier);
        *self.set() = set;
        removed
    }

    fn reach(&mut self, word: usize) -> TierSlotBits {
        let set = *self.set();
        self.sets.reach(set, word)
    }
}

#[test]
fn holder_is_visible_in_its_tier_and_all_slower_ones() {
    let mut one = SingleBlockHolders::default();
    assert!(one.add(70, Tier::Host));
    assert_eq!((one.reach(0), one.reach(1)), ([0, 0, 0], [0, 1 << 6, 1 << 6]));
    assert!(one.add(3, Tier::Hbm));
    assert_eq!((one.reach(0), one.reach(1)), ([8, 8, 8], [0, 64, 64]));
    assert!(!one.add(3, Tier::Hbm) && one.add(3, Tier::Disk) && !one.remove(3, Tier::Host));
}

#[test]
fn set_ids_of_a_burst_are_reclaimed() {
    let (mut sets, mut kept) = (HolderSets::default(), HolderSetId::NONE);
    sets.add(&mut kept, 7, Tier::Disk);
    let mut blocks = vec![HolderSetId::NONE; 2000];
    (0..).zip(&mut blocks).for_each(|(slot, set)| assert!(sets.add(set, slot, Tier::Hbm)));
    assert!(sets.sets.len() > 2000);
    (0..).zip(&mut blocks).for_each(|(slot, set)| assert!(sets.remove(set, slot, Tier::Hbm)));
    // Each new set triggers the check of a few others.
    let mut other = HolderSetId::NONE;
    for slot in 3000..4000 {
        assert!(sets.add(&mut other, slot, Tier::Hbm));
        let word = usize::from(slot) / 64;
        assert_eq!(sets.reach(other, word), [1 << (slot % 64); 3]);
        assert!(sets.remove(&mut other, slot, Tier::Hbm));
    }
    assert!(sets.sets.capacity() < 100 && sets.free.capacity() < 100 && sets.ids.capacity() < 200);
    assert_eq!((sets.len(), sets.reach(kept, 0)), (1, [0, 0, 1 << 7]));
}

#[test]
fn first_and_last_slots_work_like_any_other() {
    let mut one = SingleBlockHolders::default();
    let last = (MAX_SLOTS - 1) as u16;
    assert!(one.add(last, Tier::Disk) && one.add(0, Tier::Hbm));
    assert_eq!((one.reach(MAX_SLOTS / 64), one.reach(0)), ([0, 0, 1 << 62], [1, 1, 1]));
    assert!(one.remove(0, Tier::Hbm) && !one.remove(0, Tier::Hbm) && one.remove(last, Tier::Disk));
    assert_eq!((*one.set(), one.sets.len()), (HolderSetId::NONE, 0));
}

#[test]
fn holder_sets_are_shared_regardless_of_insertion_order() {
    let mut sets = HolderSets::default();
    let mut blocks = [HolderSetId::NONE; 100];
    for (n, set) in blocks.iter_mut().enumerate() {
        let slots = if n % 2 == 0 { [5, 900, 70] } else { [70, 5, 900] };
        assert!(slots.iter().all(|slot| sets.add(set, *slot, Tier::Hbm)));
    }
    assert_eq!(sets.len(), 1);
    assert!(blocks.iter().all(|set| *set == blocks[0]));
}

#[test]
fn unused_holder_sets_are_reclaimed() {
    let mut sets = HolderSets::default();
    let mut blocks = [HolderSetId::NONE; 64];
    for round in 0..100 {
        for (n, set) in blocks.iter_mut().enumerate() {
            assert!(sets.add(set, (n * 7 + round * 31) as u16 % 4096, Tier::Hbm));
        }
    }
    assert!(sets.len() <= 64 && sets.sets.len() < 128, "{} of {}", sets.len(), sets.sets.len());
    assert_eq!(sets.ids.len() + sets.free.len() + 1, sets.sets.len());
}

/// A block, a slot, a tier's plane, and whether the slot becomes a holder.
fn step() -> impl Strategy<Value = (usize, u16, usize, bool)> {
    let slot = prop_oneof![3 => 0u16..6, 2 => 0u16..200, 1 => Just(8190u16)];
    (0usize..8, slot, 0usize..3, prop::bool::weighted(0.55))
}

proptest! {
    #[test]
    fn holder_sets_agree_with_reference_sets(steps in proptest::collection::vec(step(), 1..500)) {
        let (mut sets, mut blocks) = (HolderSets::default(), [HolderSetId::NONE; 8]);
        let mut literal: [BTreeSet<(u16, usize)>; 8] = Default::default();
        for (block, slot, plane, adds) in steps {
            let (set, held) = (&mut blocks[block], &mut literal[block]);
            let (changed, expected) = if adds {
                (sets.add(set, slot, TIERS[plane]), held.insert((slot, plane)))
            } else {
                (sets.remove(set, slot, TIERS[plane]), held.remove(&(slot, plane)))
            };
            prop_assert_eq!(changed, expected);
            prop_assert_eq!(*set == HolderSetId::NONE, held.is_empty());
            for (set, held) in blocks.iter().zip(&literal) {
                for word in [0, 1, 2, 3, 127] {
                    let mut reach = TierSlotBits::default();
                    for (slot, its) in held.iter().filter(|(slot, _)| usize::from(slot / 64) == word) {
                        (*its..3).for_each(|plane| reach[plane] |= 1 << (slot % 64));
                    }
                    prop_assert_eq!(sets.reach(*set, word), reach);
                }
            }
            let distinct: BTreeSet<_> = literal.iter().filter(|held| !held.is_empty()).collect();
            prop_assert_eq!(sets.len(), distinct.len());
        }
    }
}
