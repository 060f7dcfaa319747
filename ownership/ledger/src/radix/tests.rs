//! Compares the map with the standard library's, and checks its shape.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

type SmallRadixMap = RadixMap<u128, u32, 4>;

/// Generates clustered and evenly distributed keys.
fn keys() -> impl Strategy<Value = u128> {
    prop_oneof![0..40u128, any::<u128>(), (0..8u128).prop_map(|n| n << 124 | 7), (0..64u128).prop_map(|n| n << 60)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_radix_map_equals_an_ordered_map(writes in prop::collection::vec((keys(), any::<bool>(), any::<u32>()), 1..400)) {
        let (mut radix, mut map) = (SmallRadixMap::default(), BTreeMap::new());
        let mut views = Vec::new();
        for (key, put, value) in &writes {
            match put {
                true => prop_assert_eq!(radix.insert(*key, *value), map.insert(*key, *value)),
                false => {
                    let key = map.range(key..).next().map_or(*key, |(key, _)| *key);
                    prop_assert_eq!(radix.remove(&key), map.remove(&key));
                }
            }
            prop_assert_eq!(radix.len(), map.len());
            views.push((radix.clone(), map.clone()));
        }
        for (view, map) in &views[views.len().saturating_sub(20)..] {
            prop_assert!(view.iter().eq(map.iter()));
        }
        for (key, ..) in &writes {
            prop_assert_eq!(radix.get(key), map.get(key));
            prop_assert!(radix.iter_from(key).eq(map.range(key..)));
            prop_assert_eq!(radix.at_or_after(key), map.range(key..).next());
        }
        prop_assert_eq!(radix.first(), map.iter().next());
    }

    #[test]
    fn equal_contents_compare_equal_whatever_the_insertion_history(keep in prop::collection::btree_set(keys(), 0..60), extra in prop::collection::btree_set(keys(), 0..60)) {
        let straight: SmallRadixMap = keep.iter().map(|key| (*key, 1)).collect();
        let mut winding: SmallRadixMap = extra.iter().chain(&keep).rev().map(|key| (*key, 1)).collect();
        for key in extra.difference(&keep) {
            winding.remove(key);
        }
        prop_assert_eq!(&straight, &winding);
    }
}

#[test]
fn multi_word_keys_are_ordered_across_all_words() {
    let keys = [[0, u64::MAX, 7], [1, 0, 0], [1, 1 << 63, 0], [u64::MAX, 0, 3], [0, 0, 0], [7, 7, 7], [7, 7, 6]];
    let radix: RadixMap<[u64; 3], (), 1> = keys.iter().map(|key| (*key, ())).collect();
    let mut sorted = keys.to_vec();
    sorted.sort_unstable();
    assert!(radix.iter().map(|(key, ())| *key).eq(sorted));
}

#[test]
fn removing_entries_collapses_empty_branches() {
    let mut radix: SmallRadixMap = (0..10_000u128).map(|n| (n << 70, 0)).collect();
    for n in 0..9_999u128 {
        radix.remove(&(n << 70));
    }
    assert!(matches!(radix.root, RadixSlot::Leaf(_)), "one entry is one leaf again");
    assert_eq!(radix.len(), 1);
}
