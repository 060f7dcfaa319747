//! File format that describes a model whose `config.json` is not understood:
//!
//! ```toml
//! alignment = 512                 # bytes; every layer's part of a block begins at a multiple of it
//! checkpoints = { every = 4096 }  # when windows are stored beside the blocks; or "full", which is usual, or "none"
//!
//! [[layers]]                      # from the first layer to the last
//! times = 2
//! each = [{ state = "window", kv_heads = 8, head_dim = 64, window = 128 }]
//!
//! [[layers]]
//! times = 29
//! each = [
//!     { state = "csa", ratio = 4, entry = 584, index = 132, raw = 584, window = 128 },
//!     { state = "hca", ratio = 128, entry = 584, raw = 584, window = 128 },
//! ]
//! ```

use serde::{Deserialize, Serialize};
use vocabulary::Bytes;

use super::layer::{LayerState, check_range};
use super::{AttentionSpec, CheckpointInterval, SpecError};

#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub(super) struct AttentionFile {
    #[serde(default = "packed")]
    alignment: Bytes,
    #[serde(default)]
    checkpoints: CheckpointInterval,
    layers: Vec<LayerGroup>,
}

/// A sequence of layers, repeated.
#[derive(Clone, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct LayerGroup {
    #[serde(default = "once")]
    times: u32,
    each: Vec<LayerState>,
}

fn packed() -> Bytes {
    Bytes(1)
}

fn once() -> u32 {
    1
}

impl TryFrom<AttentionFile> for AttentionSpec {
    type Error = SpecError;

    fn try_from(file: AttentionFile) -> Result<Self, SpecError> {
        let count = |run: &LayerGroup| u64::from(run.times).saturating_mul(run.each.len() as u64);
        let layers = file.layers.iter().fold(0u64, |all, run| all.saturating_add(count(run)));
        check_range("layers", layers, 1, super::spec::MAX_LAYERS)?;
        let times = |run: &LayerGroup| run.each.repeat(run.times as usize);
        Self::new(file.layers.iter().flat_map(times).collect(), file.alignment)?.with_checkpoints(file.checkpoints)
    }
}

impl From<AttentionSpec> for AttentionFile {
    fn from(spec: AttentionSpec) -> Self {
        let runs = spec.layers().chunk_by(|a, b| a == b);
        let layers = runs.map(|run| LayerGroup { times: run.len() as u32, each: vec![run[0]] }).collect();
        Self { alignment: spec.alignment(), checkpoints: spec.checkpoints(), layers }
    }
}
