//! Bytes of ranges, blocks and kinds, and the attention file.

use proptest::prelude::*;
use vocabulary::{Bytes, Tokens};

use super::{hybrid, read};
use crate::attention::*;

#[test]
fn hybrid_block_size_is_the_common_multiple_of_its_ratios() {
    let spec = hybrid();
    assert_eq!(spec.block(), Tokens(128));
    assert_eq!(read("llama-3.1-8b").block(), Tokens(1));
    // A pair of layers in 128 tokens: 32 main and 32 index entries in one, a single entry in the other.
    assert_eq!(spec.entry_bytes(Tokens(128)), Bytes(30 * (32 * (640 + 132) + 640)));
}

#[test]
fn hybrid_model_stores_a_fraction_of_a_dense_models_kv() {
    let tokens = Tokens(128_000);
    let (hybrid, dense) = (hybrid().entry_bytes(tokens), read("llama-3.1-8b").entry_bytes(tokens));
    assert_eq!(hybrid, Bytes(1_000 * 30 * (32 * 772 + 640)));
    assert!(hybrid * 20 < dense, "{hybrid} {dense}");
}

#[test]
fn each_state_kind_has_its_expected_bytes() {
    let spec = hybrid();
    let of = |kind, tokens| spec.kind_bytes(kind, Tokens(tokens)).0;
    assert_eq!(of(StateKind::CompressedCsaMain, 1_000), 30 * 250 * 640);
    assert_eq!(of(StateKind::CompressedCsaIndex, 1_000), 30 * 250 * 132);
    assert_eq!(of(StateKind::CompressedHca, 1_000), 30 * 7 * 640);
    assert_eq!(of(StateKind::WindowSwa, 1_000), 60 * 128 * 640);
    assert_eq!(of(StateKind::WindowSwa, 100), 60 * 100 * 640);
    // 1,002 tokens: the last 2 do not fill an entry of 4, the last 106 not one of 128.
    assert_eq!(of(StateKind::TailState, 1_002), 30 * (2 + 106) * 640);
    assert_eq!(of(StateKind::DenseKv, 1_000), 0);
    let kinds: Vec<_> = spec.kinds().collect();
    assert_eq!(kinds, StateKind::ALL[1..]);
    assert_eq!(read("llama-3.1-8b").kinds().collect::<Vec<_>>(), [StateKind::DenseKv]);
    assert_eq!(read("deepseek-v3").kinds().collect::<Vec<_>>(), [StateKind::DenseKv]);
    assert_eq!(read("mistral-7b-v0.1").kinds().collect::<Vec<_>>(), [StateKind::WindowSwa]);
    assert_eq!(read("gpt-oss-20b").kinds().collect::<Vec<_>>(), [StateKind::DenseKv, StateKind::WindowSwa]);
}

#[test]
fn block_layout_aligns_each_layers_part() {
    let layer = SequenceCompressedKv {
        compression_ratio: Tokens(4),
        entry_size: Bytes(10),
        index_entry_size: Bytes(3),
        uncompressed_token_size: Bytes(1),
        window_tokens: Tokens(0),
    };
    let heavy = SequenceCompressedKv {
        compression_ratio: Tokens(6),
        entry_size: Bytes(20),
        index_entry_size: Bytes(0),
        ..layer
    };
    let spec = AttentionSpec::new(vec![LayerState::Csa(layer), LayerState::Hca(heavy)], Bytes(32)).unwrap();
    let layout = spec.layout();
    let parts: Vec<_> = layout.parts.iter().map(|p| (p.layer, p.offset.0, p.entries, p.bytes.0)).collect();
    assert_eq!(parts, [(0, 0, 3, 30), (0, 32, 3, 9), (1, 64, 2, 40)]);
    assert_eq!((layout.tokens, layout.bytes), (Tokens(12), Bytes(128)));
    assert_eq!(spec.entry_bytes(Tokens(24)), Bytes(256), "blocks are kept with their padding");
    assert_eq!(spec.entry_bytes(Tokens(30)), Bytes(256 + 10 + 3 + 20), "single entries without");
}

#[test]
fn range_bytes_cover_new_entries_and_new_window_tokens() {
    let spec = read("gpt-oss-20b");
    let layer = 2_048;
    assert_eq!(spec.range_bytes(Tokens(0), Tokens(1_000)), Bytes(12 * layer * (1_000 + 128)));
    assert_eq!(spec.range_bytes(Tokens(900), Tokens(1_000)), Bytes(12 * layer * (100 + 100)));
    assert_eq!(spec.range_bytes(Tokens(1_000), Tokens(1_000)), Bytes::ZERO);
    assert_eq!(spec.range_bytes(Tokens(2_000), Tokens(1_000)), Bytes::ZERO);
}

#[test]
fn window_only_model_counts_window_bytes_per_token() {
    assert_eq!(read("mistral-7b-v0.1").bytes_per_token(), Bytes(131_072));
}

const FILE: &str = r#"{"layer_alignment": "64B", "layers": [
    {"pattern": [{"kind": "mla", "latent_dim": 576, "element_bits": 8, "index_entry_size": "132B"}]},
    {"repeat": 2, "pattern": [{"kind": "sliding_window", "kv_heads": 8, "head_dim": 64, "window_tokens": 128}]},
    {"repeat": 3, "pattern": [
        {"kind": "csa", "compression_ratio": 4, "entry_size": "640B", "index_entry_size": "132B",
         "uncompressed_token_size": "640B", "window_tokens": 128},
        {"kind": "hca", "compression_ratio": 128, "entry_size": "640B", "uncompressed_token_size": "640B",
         "window_tokens": 128}]}]}"#;

#[test]
fn attention_spec_can_be_read_from_a_file() {
    let spec: AttentionSpec = serde_json::from_str(FILE).unwrap();
    assert_eq!((spec.layers().len(), spec.block()), (9, Tokens(128)));
    assert_eq!(spec.kind_bytes(StateKind::DenseKv, Tokens(10)), Bytes(10 * (576 + 132)));
    assert_eq!(spec.kind_bytes(StateKind::WindowSwa, Tokens(1_000)), Bytes(2 * 128 * 2_048 + 6 * 128 * 640));
    let again: AttentionSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
    assert_eq!(again, spec);
}

#[test]
fn invalid_spec_file_error_names_the_field() {
    let refused = |from: &str, to: &str| {
        let text = FILE.replacen(from, to, 1);
        assert_ne!(text, FILE);
        serde_json::from_str::<AttentionSpec>(&text).unwrap_err().to_string()
    };
    assert!(refused("\"latent_dim\": 576", "\"latent_dim\": 0").contains("latent_dim is 0; accepted: 1 to 16384"));
    assert!(
        refused("\"element_bits\": 8", "\"element_bits\": 7").contains("element_bits is 7; accepted: 4, 8, 16 or 32")
    );
    assert!(refused("\"compression_ratio\": 4", "\"compression_ratio\": 0").contains("compression_ratio is 0"));
    assert!(refused("\"repeat\": 2", "\"repeat\": 4000000000").contains("layers is 4000000007; accepted: 1 to 1024"));
    assert!(refused("\"64B\"", "\"0B\"").contains("layer_alignment is 0"));
    assert!(refused("\"window_tokens\": 128}]}", "\"window_tokens\": 0}]}").contains("window_tokens is 0"));
    assert!(
        refused("\"compression_ratio\": 128", "\"compression_ratio\": 65521").contains("common multiple"),
        "65,521 x 4"
    );
}

#[test]
fn layer_sizes_are_bounded() {
    let refused = |layer| AttentionSpec::new(vec![layer], Bytes(1)).unwrap_err().to_string();
    let heads = DenseKv { kv_heads: 8, head_dim: 128, element_bits: 16 };
    assert!(refused(LayerState::Dense(DenseKv { kv_heads: 0, ..heads })).starts_with("kv_heads is 0"));
    assert!(refused(LayerState::Dense(DenseKv { kv_heads: 1_025, ..heads })).starts_with("kv_heads is 1025"));
    assert!(refused(LayerState::Dense(DenseKv { head_dim: u32::MAX, ..heads })).starts_with("head_dim is 4294967295"));
    let latent = LatentKv { latent_dim: 576, element_bits: 16, index_entry_size: Bytes(0) };
    assert!(
        refused(LayerState::Mla(LatentKv { index_entry_size: Bytes(u64::MAX), ..latent }))
            .starts_with("index_entry_size is")
    );
    let window = WindowKv { kv_heads: 8, head_dim: 128, element_bits: 16, window_tokens: Tokens(u64::MAX) };
    assert!(refused(LayerState::SlidingWindow(window)).starts_with("window_tokens is"));
    let layer = SequenceCompressedKv {
        compression_ratio: Tokens(4),
        entry_size: Bytes(8),
        index_entry_size: Bytes(1),
        uncompressed_token_size: Bytes(8),
        window_tokens: Tokens(0),
    };
    assert!(
        refused(LayerState::Csa(SequenceCompressedKv { compression_ratio: Tokens(1 << 40), ..layer }))
            .starts_with("compression_ratio is")
    );
    assert!(
        refused(LayerState::Csa(SequenceCompressedKv { entry_size: Bytes(0), ..layer })).starts_with("entry_size is 0")
    );
    assert!(
        refused(LayerState::Csa(SequenceCompressedKv { uncompressed_token_size: Bytes(0), ..layer }))
            .starts_with("uncompressed_token_size is 0")
    );
    assert_eq!(
        refused(LayerState::Hca(layer)),
        "index_entry_size is 1; accepted: 0 to 0",
        "heavy compression has no indexer"
    );
    let none = AttentionSpec::new(Vec::new(), Bytes(1)).unwrap_err().to_string();
    assert_eq!(none, "layers is 0; accepted: 1 to 1024");
}

#[test]
fn sizes_at_their_bounds_saturate_instead_of_wrapping() {
    let widest = WindowKv { kv_heads: 1_024, head_dim: 16_384, element_bits: 32, window_tokens: Tokens(1 << 24) };
    let spec = AttentionSpec::new(vec![LayerState::SlidingWindow(widest); 1_024], Bytes(1)).unwrap();
    assert_eq!(spec.window_bytes(Tokens(u64::MAX)), Bytes((1 << 27) * (1 << 24) * 1_024));
    assert_eq!(spec.window_depth(), Tokens(1 << 34));
    let dense = LayerState::Dense(DenseKv { kv_heads: 1_024, head_dim: 16_384, element_bits: 32 });
    let spec = AttentionSpec::new(vec![dense; 1_024], Bytes(1)).unwrap();
    assert_eq!(spec.state_bytes(Tokens(u64::MAX)), Bytes(u64::MAX));
}

#[test]
fn unknown_spec_fields_are_rejected() {
    for (from, to) in
        [("layer_alignment", "aligned"), ("\"window_tokens\": 128}", "\"windows\": 128}"), ("\"csa\"", "\"csb\"")]
    {
        assert!(serde_json::from_str::<AttentionSpec>(&FILE.replacen(from, to, 1)).is_err(), "{to}");
    }
}

pub(super) fn layer() -> impl Strategy<Value = LayerState> {
    let heads = (1u32..9, 1u32..130, prop_oneof![Just(4u32), Just(8), Just(16)], 1u64..600);
    let compressed = (prop_oneof![Just(1u64), Just(2), Just(4), Just(128)], 1u64..700, 0u64..200, 0u64..300);
    prop_oneof![
        heads.clone().prop_map(|(kv_heads, head_dim, bits, _)| LayerState::Dense(DenseKv {
            kv_heads,
            head_dim,
            element_bits: bits
        })),
        heads.clone().prop_map(|(_, width, bits, index)| LayerState::Mla(LatentKv {
            latent_dim: width,
            element_bits: bits,
            index_entry_size: Bytes(index)
        })),
        heads.prop_map(|(kv_heads, head_dim, bits, window)| {
            LayerState::SlidingWindow(WindowKv {
                kv_heads,
                head_dim,
                element_bits: bits,
                window_tokens: Tokens(window),
            })
        }),
        compressed.prop_map(|(ratio, entry, index, window)| {
            let (ratio, window) = (Tokens(ratio), Tokens(window));
            LayerState::Csa(SequenceCompressedKv {
                compression_ratio: ratio,
                entry_size: Bytes(entry),
                index_entry_size: Bytes(index),
                uncompressed_token_size: Bytes(entry),
                window_tokens: window,
            })
        }),
    ]
}

pub(super) fn spec() -> impl Strategy<Value = AttentionSpec> {
    let alignment = prop_oneof![Just(1u64), Just(64), Just(512)];
    (prop::collection::vec(layer(), 1..12), alignment)
        .prop_map(|(layers, alignment)| AttentionSpec::new(layers, Bytes(alignment)).unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn more_tokens_never_take_fewer_bytes(spec in spec(), tokens in 0u64..5_000, more in 0u64..700) {
        let (few, many) = (Tokens(tokens), Tokens(tokens + more));
        prop_assert!(spec.entry_bytes(few) <= spec.entry_bytes(many));
        prop_assert!(spec.window_bytes(few) <= spec.window_bytes(many));
    }

    #[test]
    fn entry_bytes_of_adjacent_ranges_add_up(spec in spec(), cuts in prop::array::uniform3(0u64..5_000)) {
        let mut cuts = cuts.map(Tokens);
        cuts.sort_unstable();
        let [a, b, c] = cuts;
        let kept = |from, to| spec.range_bytes(from, to) - if from < to { spec.window_bytes(to - from) + spec.tail_bytes(to) } else { Bytes::ZERO };
        prop_assert_eq!(kept(a, b) + kept(b, c), kept(a, c));
        prop_assert!(spec.range_bytes(a, b) + spec.range_bytes(b, c) >= spec.range_bytes(a, c), "a window in between is moved for nothing");
    }

    #[test]
    fn state_kinds_add_up_to_the_whole_state_without_padding(spec in spec(), tokens in 0u64..5_000) {
        let packed = AttentionSpec::new(spec.layers().to_vec(), Bytes(1)).unwrap();
        let kinds: Bytes = StateKind::ALL.into_iter().map(|kind| packed.kind_bytes(kind, Tokens(tokens))).sum();
        prop_assert_eq!(kinds, packed.state_bytes(Tokens(tokens)));
        prop_assert!(spec.state_bytes(Tokens(tokens)) >= kinds, "padding only adds");
    }

    #[test]
    fn block_layout_size_matches_block_bytes(spec in spec()) {
        let layout = spec.layout();
        prop_assert_eq!((layout.tokens, layout.bytes), (spec.block(), spec.entry_bytes(spec.block())));
        let mut end = Bytes::ZERO;
        for part in &layout.parts {
            prop_assert!(part.offset >= end && part.offset.0 % spec.alignment().0 == 0, "{:?}", part);
            end = part.offset + part.bytes;
        }
    }

    #[test]
    fn attention_spec_round_trips_through_its_file(spec in spec()) {
        let text = serde_json::to_string(&spec).unwrap();
        prop_assert_eq!(serde_json::from_str::<AttentionSpec>(&text).unwrap(), spec);
    }
}
