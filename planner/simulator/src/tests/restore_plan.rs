//! Cheapest restore of a prefix: examples by hand, and a comparison with every other split.

use planner::{
    AttentionSpec, DenseKv, LatentKv, LayerState, PrefillTimeModel, RestorablePrefix, RestoreSplit,
    SequenceCompressedKv, WindowCheckpointInterval, WindowKv,
};
use proptest::prelude::*;
use vocabulary::{Bytes, Micros, Tokens};

use super::kv_model::dense;
use crate::{PrefetchMode, RestorePrices};

/// Model of 30 pairs of compressed layers with windows of 128 tokens.
fn compressed() -> AttentionSpec {
    let layer = |ratio, index| SequenceCompressedKv {
        compression_ratio: Tokens(ratio),
        entry_size: Bytes(640),
        index_entry_size: Bytes(index),
        uncompressed_token_size: Bytes(640),
        window_tokens: Tokens(128),
    };
    let pair = [LayerState::Csa(layer(4, 132)), LayerState::Hca(layer(128, 0))];
    AttentionSpec::new(pair.repeat(30), Bytes(1)).unwrap()
}

/// 100 us of compute per token; loads take 10 ms + bytes at 10 GB/s.
fn prices() -> RestorePrices {
    RestorePrices {
        compute: PrefillTimeModel::new(100.0, Tokens::ZERO),
        load_fixed: Micros(10_000),
        load_byte: 1e-4,
        queue: Micros::ZERO,
        memory_byte: 0.0,
        usage: 0.5,
        prefetch: PrefetchMode::Never,
    }
}

fn of(spec: &AttentionSpec, held: u64, until: u64) -> RestorablePrefix<'_> {
    RestorablePrefix { spec, cached: Tokens(held), until: Tokens(until), unit: Tokens(128) }
}

#[test]
fn restore_loads_a_long_dense_prefix_and_recomputes_a_short_one() {
    let spec = dense();
    let long = prices().cheapest_plan(&of(&spec, 0, 12_800));
    assert_eq!(
        long.split,
        RestoreSplit { loaded: Tokens(12_800), bytes: Bytes(12_800 * 131_072), start: Tokens(12_800) }
    );
    assert_eq!((long.wait, long.recompute), (Micros(10_000 + 167_772), Micros::ZERO));
    let short = prices().cheapest_plan(&of(&spec, 0, 64));
    assert_eq!((short.split.bytes, short.recompute), (Bytes::ZERO, Micros(6_400)), "6.4 ms beside 10.8 of loading")
}

#[test]
fn restore_recomputes_windows_that_were_never_stored() {
    let spec = compressed().with_checkpoints(WindowCheckpointInterval::None).unwrap();
    let plan = prices().cheapest_plan(&of(&spec, 0, 128_000));
    // Windows of 128 tokens in 60 layers: 7,680 tokens.
    assert_eq!(
        plan.split,
        RestoreSplit { loaded: Tokens(128_000), bytes: spec.entry_bytes(Tokens(128_000)), start: Tokens(120_320) }
    );
    assert!(plan.split.recomputes_windows());
    assert_eq!(plan.recompute, Micros(7_680 * 100));
}

#[test]
fn restore_from_a_checkpoint_recomputes_only_the_tokens_after_it() {
    let spec = compressed().with_checkpoints(WindowCheckpointInterval::EveryTokens(Tokens(4_096))).unwrap();
    let plan = prices().cheapest_plan(&of(&spec, 0, 128_000));
    let stored = Tokens(31 * 4_096);
    let bytes = spec.entry_bytes(stored) + spec.window_bytes(stored);
    assert_eq!(plan.split, RestoreSplit { loaded: stored, bytes, start: stored });
    assert_eq!(plan.recompute, Micros((128_000 - 126_976) * 100));
    let full = compressed();
    assert_eq!(prices().cheapest_plan(&of(&full, 0, 128_000)).recompute, Micros::ZERO);
}

#[test]
fn restore_recomputes_windows_when_loading_costs_more() {
    let spec = AttentionSpec::new(
        vec![
            LayerState::Mla(LatentKv { latent_dim: 8, element_bits: 8, index_entry_size: Bytes(0) }),
            LayerState::SlidingWindow(WindowKv {
                kv_heads: 8,
                head_dim: 128,
                element_bits: 16,
                window_tokens: Tokens(256),
            }),
        ],
        Bytes(1),
    )
    .unwrap();
    let slow = RestorePrices { load_fixed: Micros::ZERO, load_byte: 0.05, ..prices() };
    // 256 x 4,096 bytes of windows take 52 ms to load; their tokens take 25.6 ms to compute.
    let plan = slow.cheapest_plan(&of(&spec, 0, 12_800));
    assert_eq!((plan.split.start, plan.split.loaded), (Tokens(12_800 - 256), Tokens(12_800)));
    let fast = RestorePrices { load_byte: 0.01, ..slow };
    assert_eq!(fast.cheapest_plan(&of(&spec, 0, 12_800)).split.start, Tokens(12_800));
}

#[test]
fn restore_skips_tokens_already_held() {
    let spec = dense();
    let plan = prices().cheapest_plan(&of(&spec, 6_400, 12_800));
    assert_eq!(plan.split.bytes, Bytes(6_400 * 131_072));
    let all = prices().cheapest_plan(&of(&spec, 12_800, 12_800));
    assert_eq!((all.split.bytes, all.total), (Bytes::ZERO, Micros::ZERO));
}

#[test]
fn prefetch_during_queue_wait_is_free_unless_memory_is_expensive() {
    let spec = dense();
    let queued = RestorePrices { queue: Micros(150_000), prefetch: PrefetchMode::WhileQueued, ..prices() };
    let restore = of(&spec, 0, 12_800);
    let plan = queued.cheapest_plan(&restore);
    assert_eq!((plan.prefetch, plan.wait), (PrefetchMode::WhileQueued, Micros(177_772)), "the longer of both");
    let dear = RestorePrices { memory_byte: 1e-3, ..queued };
    let plan = dear.cheapest_plan(&restore);
    assert_eq!((plan.prefetch, plan.wait), (PrefetchMode::Never, Micros(327_772)), "one after the other");
    assert_eq!(plan.memory, Micros(838_860), "half of the memory is in use");
}

#[test]
fn restore_benefit_is_the_saving_over_full_recompute() {
    let spec = dense();
    assert_eq!(prices().benefit(&of(&spec, 0, 12_800)), Micros(1_280_000 - 177_772));
    let useless = RestorePrices { load_byte: f64::MAX, ..prices() };
    assert_eq!(useless.benefit(&of(&spec, 0, 12_800)), Micros::ZERO, "such a prefix may be dropped");
}

fn price_ranges() -> impl Strategy<Value = RestorePrices> {
    let load = (0u64..50_000, prop_oneof![0.0..1e-2f64, Just(0.0), Just(10.0)]);
    let rest = (0u64..500_000, prop_oneof![Just(0.0), 0.0..1e-3f64], 0.0..1.0f64, any::<bool>());
    (0.0..500.0f64, 0u64..50_000, load, rest).prop_map(|(token, doubles, load, rest)| RestorePrices {
        compute: PrefillTimeModel::new(token, Tokens(doubles)),
        load_fixed: Micros(load.0),
        load_byte: load.1,
        queue: Micros(rest.0),
        memory_byte: rest.1,
        usage: rest.2,
        prefetch: if rest.3 { PrefetchMode::WhileQueued } else { PrefetchMode::Never },
    })
}

fn layer() -> impl Strategy<Value = LayerState> {
    let heads = (1u32..9, 1u32..130, prop_oneof![Just(4u32), Just(8), Just(16)], 1u64..600);
    let compressed = (prop_oneof![Just(1u64), Just(2), Just(4), Just(128)], 1u64..700, 0u64..200, 0u64..300);
    prop_oneof![
        heads.clone().prop_map(|(kv_heads, head_dim, element_bits, _)| {
            LayerState::Dense(DenseKv { kv_heads, head_dim, element_bits })
        }),
        heads.clone().prop_map(|(_, latent_dim, element_bits, index)| {
            LayerState::Mla(LatentKv { latent_dim, element_bits, index_entry_size: Bytes(index) })
        }),
        heads.prop_map(|(kv_heads, head_dim, element_bits, window)| {
            LayerState::SlidingWindow(WindowKv { kv_heads, head_dim, element_bits, window_tokens: Tokens(window) })
        }),
        compressed.prop_map(|(ratio, entry, index, window)| {
            LayerState::Csa(SequenceCompressedKv {
                compression_ratio: Tokens(ratio),
                entry_size: Bytes(entry),
                index_entry_size: Bytes(index),
                uncompressed_token_size: Bytes(entry),
                window_tokens: Tokens(window),
            })
        }),
    ]
}

fn spec() -> impl Strategy<Value = AttentionSpec> {
    let alignment = prop_oneof![Just(1u64), Just(64), Just(512)];
    (prop::collection::vec(layer(), 1..12), alignment)
        .prop_map(|(layers, alignment)| AttentionSpec::new(layers, Bytes(alignment)).unwrap())
}

fn policies() -> impl Strategy<Value = (WindowCheckpointInterval, u64)> {
    prop_oneof![
        Just((WindowCheckpointInterval::Full, 1)),
        Just((WindowCheckpointInterval::None, 1)),
        (1u64..9).prop_map(|n| (WindowCheckpointInterval::Full, n))
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn restore_never_costs_more_than_loading_or_computing_everything(
        spec in spec(), prices in price_ranges(), policy in policies(), lengths in (0u64..60, 0u64..60),
    ) {
        let unit = spec.block();
        let policy = if policy.1 == 1 { policy.0 } else { WindowCheckpointInterval::EveryTokens(unit * policy.1) };
        let spec = spec.with_checkpoints(policy).unwrap();
        let (held, until) = (unit * lengths.0.min(lengths.1), unit * lengths.0.max(lengths.1));
        let restore = RestorablePrefix { spec: &spec, cached: held, until, unit };
        let plan = prices.cheapest_plan(&restore);
        let load = if held == until { Micros::ZERO } else { prices.load_fixed + Micros((spec.range_bytes(held, until).0 as f64 * prices.load_byte) as u64) };
        let memory = |chance: f64| Micros((prices.memory_byte * chance * spec.range_bytes(held, until).0 as f64) as u64);
        let computing_all = prices.queue + prices.compute.span(held, until) + memory(prices.usage);
        prop_assert!(plan.total <= computing_all, "{plan:?}");
        if policy == WindowCheckpointInterval::Full {
            prop_assert!(plan.total <= prices.queue + load + memory(prices.usage), "{plan:?}");
        }
        prop_assert_eq!(plan.total, plan.wait + plan.recompute + plan.memory);
        prop_assert_eq!(prices.benefit(&restore), computing_all - plan.total);
    }

    #[test]
    fn no_other_restore_split_is_cheaper(
        spec in spec(), prices in price_ranges(), every in 1u64..9, lengths in (0u64..60, 0u64..60), extra in 0u64..9,
    ) {
        let unit = spec.block();
        let spec = spec.with_checkpoints(WindowCheckpointInterval::EveryTokens(unit * every)).unwrap();
        let (held, until) = (unit * lengths.0.min(lengths.1), unit * (lengths.0.max(lengths.1) + extra));
        let restore = RestorablePrefix { spec: &spec, cached: held, until, unit };
        let least = prices.cheapest_plan(&restore).total;
        let depth = spec.window_depth();
        for loaded in (held.0..=until.0).step_by(unit.0 as usize).map(Tokens) {
            let stored = depth == Tokens::ZERO || loaded.0 % (unit.0 * every) == 0;
            let with_windows = RestoreSplit { loaded, bytes: spec.range_bytes(held, loaded), start: loaded };
            let without = RestoreSplit { loaded, bytes: spec.entry_bytes(loaded) - spec.entry_bytes(held), start: (loaded - depth).max(held) };
            for split in [stored.then_some(with_windows), Some(without)].into_iter().flatten() {
                let price = prices.price(&restore, split, PrefetchMode::Never).total;
                // Each part of the cost is rounded to a microsecond.
                prop_assert!(least <= price + Micros(2), "{least} beside {price} of {split:?}");
            }
        }
    }
}
