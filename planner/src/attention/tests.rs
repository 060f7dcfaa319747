//! Sizes of published models, computed by hand.

mod checkpoints;
mod configs;
mod restore;
mod shape;
mod sizes;

use super::*;

/// Models with committed files, which contain the attention parts of the published ones.
pub(crate) fn read(name: &str) -> AttentionSpec {
    AttentionSpec::from_config(text_of(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

pub(super) fn text_of(name: &str) -> &'static str {
    match name {
        "llama-3.1-8b" => include_str!("tests/configs/llama-3.1-8b.json"),
        "qwen3-32b" => include_str!("tests/configs/qwen3-32b.json"),
        "qwen2.5-0.5b" => include_str!("tests/configs/qwen2.5-0.5b.json"),
        "mistral-7b-v0.1" => include_str!("tests/configs/mistral-7b-v0.1.json"),
        "mistral-7b-v0.3" => include_str!("tests/configs/mistral-7b-v0.3.json"),
        "deepseek-v2-lite" => include_str!("tests/configs/deepseek-v2-lite.json"),
        "deepseek-v3" => include_str!("tests/configs/deepseek-v3.json"),
        "gpt-oss-20b" => include_str!("tests/configs/gpt-oss-20b.json"),
        "gemma-2-9b" => include_str!("tests/configs/gemma-2-9b.json"),
        "gemma-3-4b" => include_str!("tests/configs/gemma-3-4b.json"),
        "gemma-3-27b" => include_str!("tests/configs/gemma-3-27b.json"),
        other => panic!("no such file: {other}"),
    }
}

/// Model of 30 pairs of compressed layers: m = 4, m' = 128, windows of 128. An entry has 512 numbers of 8 bits and 64
/// of 16 bits; an index entry has 128 of 8 bits and a scale.
pub(crate) fn hybrid() -> AttentionSpec {
    let layer = |ratio, index| SequenceCompressedKv {
        compression_ratio: vocabulary::Tokens(ratio),
        entry_size: vocabulary::Bytes(640),
        index_entry_size: vocabulary::Bytes(index),
        uncompressed_token_size: vocabulary::Bytes(640),
        window_tokens: vocabulary::Tokens(128),
    };
    let pair = [LayerState::Csa(layer(4, 132)), LayerState::Hca(layer(128, 0))];
    AttentionSpec::new(pair.repeat(30), vocabulary::Bytes(1)).unwrap()
}
