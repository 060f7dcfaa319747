//! Ways to restore a prefix: which are offered, and what each loads.

use proptest::prelude::*;
use vocabulary::{Bytes, Tokens};

use super::{hybrid, read, sizes};
use crate::attention::*;

const UNIT: Tokens = Tokens(128);

fn restore(spec: &AttentionSpec, cached: u64, until: u64) -> RestorablePrefix<'_> {
    RestorablePrefix { spec, cached: Tokens(cached), until: Tokens(until), unit: UNIT }
}

#[test]
fn a_dense_prefix_is_loaded_up_to_its_end_and_nothing_is_recomputed() {
    let spec = read("llama-3.1-8b");
    let [with_windows, without_windows] = restore(&spec, 6_400, 12_800).load_splits();
    let end = Tokens(12_800);
    let split = RestoreSplit { loaded: end, bytes: Bytes(6_400 * 131_072), start: end };
    assert_eq!((with_windows, without_windows), (Some(split), None));
    assert!(!split.recomputes_windows());
}

#[test]
fn a_prefix_that_the_worker_already_has_offers_no_load() {
    for spec in [read("llama-3.1-8b"), hybrid()] {
        assert_eq!(restore(&spec, 12_800, 12_800).load_splits(), [None, None]);
    }
}

#[test]
fn without_load_computation_begins_where_the_cached_prefix_ends() {
    let spec = hybrid();
    let split = restore(&spec, 1_280, 12_800).without_load();
    assert_eq!(split, RestoreSplit { loaded: Tokens(1_280), bytes: Bytes::ZERO, start: Tokens(1_280) });
    assert!(!split.recomputes_windows());
}

#[test]
fn windows_that_were_never_stored_can_only_be_recomputed() {
    let spec = hybrid().with_checkpoints(WindowCheckpointInterval::None).unwrap();
    let [with_windows, without_windows] = restore(&spec, 0, 128_000).load_splits();
    // Windows of 128 tokens in 60 layers: 7,680 tokens.
    let (end, start) = (Tokens(128_000), Tokens(128_000 - 7_680));
    let split = RestoreSplit { loaded: end, bytes: spec.entry_bytes(end), start };
    assert_eq!((with_windows, without_windows), (None, Some(split)));
    assert!(split.recomputes_windows());
}

#[test]
fn a_checkpoint_offers_its_windows_and_the_end_offers_recomputed_ones() {
    let spec = hybrid().with_checkpoints(WindowCheckpointInterval::EveryTokens(Tokens(4_096))).unwrap();
    let [with_windows, without_windows] = restore(&spec, 0, 128_000).load_splits();
    let (checkpoint, end) = (Tokens(31 * 4_096), Tokens(128_000));
    let bytes = spec.entry_bytes(checkpoint) + spec.window_bytes(checkpoint);
    assert_eq!(with_windows, Some(RestoreSplit { loaded: checkpoint, bytes, start: checkpoint }));
    let start = Tokens(128_000 - 7_680);
    assert_eq!(without_windows, Some(RestoreSplit { loaded: end, bytes: spec.entry_bytes(end), start }));
}

#[test]
fn windows_deeper_than_the_missing_part_are_not_recomputed() {
    let spec = hybrid();
    for (cached, until) in [(0, 7_680), (6_400, 12_800), (5_120, 12_800)] {
        let [with_windows, without_windows] = restore(&spec, cached, until).load_splits();
        assert!(with_windows.is_some(), "{cached} of {until}");
        assert_eq!(without_windows, None, "{cached} of {until}: computing the whole prefix is no more work");
    }
    assert!(restore(&spec, 4_992, 12_800).load_splits()[1].is_some());
}

#[test]
fn a_checkpoint_that_the_worker_is_already_past_is_not_offered() {
    let spec = hybrid().with_checkpoints(WindowCheckpointInterval::EveryTokens(Tokens(4_096))).unwrap();
    assert_eq!(restore(&spec, 4_096, 8_064).load_splits()[0], None);
    let next = restore(&spec, 4_096, 8_192).load_splits()[0].unwrap();
    assert_eq!((next.loaded, next.bytes), (Tokens(8_192), spec.range_bytes(Tokens(4_096), Tokens(8_192))));
}

fn checkpoints() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![Just(None), (1u64..9).prop_map(Some)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_load_split_begins_after_the_cached_prefix_and_ends_within_the_stored_one(
        spec in sizes::spec(), every in checkpoints(), lengths in (0u64..60, 0u64..60),
    ) {
        let unit = spec.block();
        let interval = every.map_or(WindowCheckpointInterval::None, |n| WindowCheckpointInterval::EveryTokens(unit * n));
        let spec = spec.with_checkpoints(interval).unwrap();
        let (cached, until) = (unit * lengths.0.min(lengths.1), unit * lengths.0.max(lengths.1));
        let restore = RestorablePrefix { spec: &spec, cached, until, unit };
        for split in restore.load_splits().into_iter().flatten() {
            prop_assert!(cached < split.start && split.start <= split.loaded && split.loaded <= until, "{:?}", split);
            prop_assert_eq!(split.loaded.0 % unit.0, 0, "whole units are loaded");
            prop_assert!(split.bytes <= spec.range_bytes(cached, until), "{:?}", split);
            prop_assert!(!split.recomputes_windows() || split.start + spec.window_depth() == until, "{:?}", split);
        }
    }

    #[test]
    fn a_fully_stored_prefix_is_offered_as_a_whole(spec in sizes::spec(), lengths in (0u64..60, 1u64..60)) {
        let unit = spec.block();
        let (cached, until) = (unit * lengths.0, unit * (lengths.0 + lengths.1));
        let [with_windows, _] = RestorablePrefix { spec: &spec, cached, until, unit }.load_splits();
        let bytes = spec.range_bytes(cached, until);
        prop_assert_eq!(with_windows, Some(RestoreSplit { loaded: until, bytes, start: until }));
    }
}
