//! File format that describes a model whose `config.json` is not understood:
//!
//! ```toml
//! layer_alignment = "512B"                      # every layer's part of a block begins at a multiple of it
//! window_checkpoints = { every_tokens = 4096 }  # when windows are stored with the blocks; "full", the default, or "none"
//!
//! [[layers]]                      # from the first layer to the last
//! repeat = 2
//! pattern = [{ kind = "sliding_window", kv_heads = 8, head_dim = 64, window_tokens = 128 }]
//!
//! [[layers]]
//! repeat = 29
//!
//! [[layers.pattern]]
//! kind = "csa"
//! compression_ratio = 4
//! entry_size = "584B"
//! index_entry_size = "132B"
//! uncompressed_token_size = "584B"
//! window_tokens = 128
//!
//! [[layers.pattern]]
//! kind = "hca"
//! compression_ratio = 128
//! entry_size = "584B"
//! uncompressed_token_size = "584B"
//! window_tokens = 128
//! ```

use serde::{Deserialize, Serialize};
use vocabulary::Bytes;

use super::layer::{LayerState, check_range};
use super::{AttentionSpec, SpecError, WindowCheckpointInterval};

#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct AttentionSpecFile {
    #[serde(default = "packed", with = "vocabulary::bytes_with_unit")]
    layer_alignment: Bytes,
    #[serde(default)]
    window_checkpoints: WindowCheckpointInterval,
    layers: Vec<RepeatedLayers>,
}

/// A sequence of layers, repeated.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct RepeatedLayers {
    #[serde(default = "once")]
    repeat: u32,
    pattern: Vec<LayerState>,
}

fn packed() -> Bytes {
    Bytes(1)
}

fn once() -> u32 {
    1
}

impl TryFrom<AttentionSpecFile> for AttentionSpec {
    type Error = SpecError;

    fn try_from(file: AttentionSpecFile) -> Result<Self, SpecError> {
        let count = |run: &RepeatedLayers| u64::from(run.repeat).saturating_mul(run.pattern.len() as u64);
        let layers = file.layers.iter().fold(0u64, |all, run| all.saturating_add(count(run)));
        check_range("layers", layers, 1, super::spec::MAX_LAYERS)?;
        let times = |run: &RepeatedLayers| run.pattern.repeat(run.repeat as usize);
        Self::new(file.layers.iter().flat_map(times).collect(), file.layer_alignment)?
            .with_checkpoints(file.window_checkpoints)
    }
}

impl From<AttentionSpec> for AttentionSpecFile {
    fn from(spec: AttentionSpec) -> Self {
        let runs = spec.layers().chunk_by(|a, b| a == b);
        let layers = runs.map(|run| RepeatedLayers { repeat: run.len() as u32, pattern: vec![run[0]] }).collect();
        Self { layer_alignment: spec.alignment(), window_checkpoints: spec.checkpoints(), layers }
    }
}
