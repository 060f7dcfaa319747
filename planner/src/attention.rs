//! KV-state model of each attention family: which state the layers of a model keep, how many bytes it takes, how a
//! stored prefix is restored, and whether it fits the ranks of another worker.
//!
//! Pure. It never guesses: an unknown model is refused by name, and can be described in a file instead.

mod checkpoints;
mod config_fields;
mod error;
mod file;
mod layer;
mod model_families;
mod restore;
mod shape;
mod spec;

pub use checkpoints::{WindowCheckpointCosts, WindowCheckpointInterval};
pub use error::SpecError;
pub use layer::{DenseKv, LatentKv, LayerState, SequenceCompressedKv, StateKind, WindowKv};
pub use restore::{RestorablePrefix, RestoreSplit};
pub use shape::{EngineInstances, KvTransferGroups, ParallelShape, ParallelShapeError, check_kv_compatibility};
pub use spec::{AttentionSpec, BlockLayout, LayerBlockSlice};

#[cfg(test)]
pub(crate) mod tests;
