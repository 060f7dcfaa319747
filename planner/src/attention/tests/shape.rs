//! What a rank keeps, which ranks can read from which, and how ranks are numbered.

use std::collections::BTreeSet;

use proptest::prelude::*;
use vocabulary::{Bytes, Tokens};

use super::{hybrid, read, sizes};
use crate::attention::*;

fn shape(tensor: u16, pipeline: u16) -> ParallelShape {
    ParallelShape { tensor, pipeline }
}

/// Returns the bytes of a token on every tensor rank of each stage.
fn stages(spec: &AttentionSpec, shape: ParallelShape) -> Vec<u64> {
    (0..shape.pipeline).map(|stage| spec.for_rank(shape, stage).unwrap().state_bytes(Tokens(1)).0).collect()
}

#[test]
fn tensor_ranks_divide_kv_heads_down_to_one() {
    let llama = read("llama-3.1-8b");
    assert_eq!(stages(&llama, shape(4, 1)), [131_072 / 4]);
    assert_eq!(stages(&llama, shape(8, 1)), [131_072 / 8]);
    assert_eq!(stages(&llama, shape(16, 1)), [131_072 / 8], "two ranks keep the same head");
}

#[test]
fn latent_entries_are_replicated_on_every_tensor_rank() {
    assert_eq!(stages(&read("deepseek-v3"), shape(8, 1)), [70_272]);
    let hybrid = hybrid();
    let rank = hybrid.for_rank(shape(8, 2), 0).unwrap();
    assert_eq!(rank.entry_bytes(Tokens(128)), Bytes(hybrid.entry_bytes(Tokens(128)).0 / 2));
}

#[test]
fn pipeline_stages_divide_layers_with_the_remainder_before_the_last() {
    let layers = |count, stages| -> Vec<usize> {
        let layer = LayerState::Mla(LatentKv { latent_dim: 1, element_bits: 8, index_entry_size: Bytes(0) });
        let spec = AttentionSpec::new(vec![layer; count], Bytes(1)).unwrap();
        (0..stages).map(|stage| spec.for_rank(shape(1, stages), stage).unwrap().layers().len()).collect()
    };
    assert_eq!(layers(32, 4), [8, 8, 8, 8]);
    assert_eq!(layers(61, 4), [15, 15, 16, 15]);
    assert_eq!(layers(62, 4), [15, 16, 16, 15]);
    assert_eq!(layers(63, 4), [16, 16, 16, 15]);
}

#[test]
fn target_reads_from_a_source_whose_tensor_size_divides_its_own() {
    let llama = read("llama-3.1-8b");
    let of = |source, target| check_kv_compatibility(Some(&llama), source, target).map_err(|error| error.to_string());
    assert_eq!(of(shape(2, 1), shape(2, 1)), Ok(()));
    assert_eq!(of(shape(2, 1), shape(8, 1)), Ok(()));
    assert_eq!(of(shape(2, 4), shape(4, 4)), Ok(()));
    let refused = |source, target| of(source, target).unwrap_err();
    assert_eq!(refused(shape(4, 1), shape(2, 1)), "2 tensor-parallel ranks cannot read from 4: accepted is a multiple");
    assert_eq!(refused(shape(1, 1), shape(1, 2)), "2 pipeline stages cannot read from 1: accepted is as many");
    assert_eq!(refused(shape(1, 1), shape(3, 1)), "8 KV heads cannot be shared out over 3 tensor-parallel ranks");
    assert_eq!(refused(shape(1, 1), shape(1, 33)), "32 layers cannot be shared out over 33 pipeline stages");
    assert_eq!(refused(shape(1, 1), shape(0, 1)), "tensor and pipeline sizes are 1 or more");
    assert_eq!(
        check_kv_compatibility(None, shape(1, 1), shape(3, 1)),
        Ok(()),
        "heads that are not known are taken to fit"
    );
    assert_eq!(check_kv_compatibility(None, shape(0, 1), shape(3, 1)), Err(ParallelShapeError::NoRanks));
    assert_eq!(llama.for_rank(shape(1, 2), 2), Err(ParallelShapeError::NoSuchStage(2)));
}

#[test]
fn kv_group_ranks_match_the_engines_numbering() {
    // Two prefill instances of 2 ranks and one decode instance of 4: TPM = 2.
    let (prefill, decode) = (EngineInstances { count: 2, tensor: 2 }, EngineInstances { count: 1, tensor: 4 });
    let groups = KvTransferGroups::new(prefill, decode).unwrap();
    assert_eq!((groups.readers(), groups.group_size()), (2, 4));
    assert_eq!([0, 1].map(|rank| groups.group_rank(1, rank)), [1, 1]);
    assert_eq!(
        [0, 1, 2, 3].map(|rank| (groups.group(2, rank), groups.group_rank(2, rank))),
        [(0, 2), (0, 3), (1, 2), (1, 3)]
    );
    assert_eq!([0, 1].map(|rank| groups.global_rank(1, rank)), [2, 3]);
    assert_eq!([0, 3].map(|rank| groups.global_rank(2, rank)), [4, 7]);
    assert!(KvTransferGroups::new(decode, prefill).is_err(), "4 ranks cannot prefill for 2");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rank_bytes_sum_to_the_model_bytes_when_heads_are_divided(
        spec in sizes::spec(), tensor in 1u16..10, pipeline in 1u16..8, tokens in 0u64..3_000,
    ) {
        let packed = AttentionSpec::new(spec.layers().to_vec(), Bytes(1)).unwrap();
        let (shape, tokens) = (shape(tensor, pipeline), Tokens(tokens));
        if packed.check_shape(shape).is_err() {
            prop_assert!(packed.for_rank(shape, 0).is_err());
            return Ok(());
        }
        // Expected copies: a layer with heads exists once, or as often as ranks replicate its heads; any other layer
        // exists on every rank.
        let copies = |layer: &LayerState| match layer {
            LayerState::Dense(DenseKv { kv_heads, .. }) | LayerState::SlidingWindow(WindowKv { kv_heads, .. }) => {
                (u64::from(tensor) / u64::from(*kv_heads)).max(1)
            }
            _ => u64::from(tensor),
        };
        let one = |layer: &LayerState| AttentionSpec::new(vec![*layer], Bytes(1)).unwrap().state_bytes(tokens);
        let expected: Bytes = packed.layers().iter().map(|layer| one(layer) * copies(layer)).sum();
        let ranks = (0..pipeline).map(|stage| packed.for_rank(shape, stage).unwrap());
        prop_assert_eq!(ranks.map(|rank| rank.state_bytes(tokens) * u64::from(tensor)).sum::<Bytes>(), expected);
    }

    #[test]
    fn kv_group_and_global_ranks_are_unique(
        prefill in (0u16..4, 1u16..5), decode in (0u16..4, 1u16..4),
    ) {
        let prefill = EngineInstances { count: prefill.0, tensor: prefill.1 };
        let decode = EngineInstances { count: decode.0, tensor: prefill.tensor * decode.1 };
        let groups = KvTransferGroups::new(prefill, decode).unwrap();
        let all: Vec<(u32, u16)> = (0..u32::from(prefill.count + decode.count))
            .flat_map(|instance| {
                let tensor = if instance < u32::from(prefill.count) { prefill.tensor } else { decode.tensor };
                (0..tensor).map(move |rank| (instance, rank))
            })
            .collect();
        let global: BTreeSet<_> = all.iter().map(|(instance, rank)| groups.global_rank(*instance, *rank)).collect();
        prop_assert_eq!(global, (0..all.len() as u64).collect::<BTreeSet<_>>());
        for group in 0..u32::from(prefill.tensor) {
            let members = all.iter().filter(|(instance, rank)| groups.group(*instance, *rank) == group);
            let numbers: BTreeSet<_> = members.map(|(instance, rank)| groups.group_rank(*instance, *rank)).collect();
            prop_assert_eq!(numbers, (0..groups.group_size()).collect::<BTreeSet<_>>());
        }
    }
}
