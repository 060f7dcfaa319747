//! The KV-state model of each attention family: which states a model's layers keep, how many bytes they take, how a
//! stored prefix comes back, and whether it fits the ranks of another worker.
//!
//! Pure. It never guesses: a model that is not known is refused by name, and can be described in a file.

mod checkpoints;
mod error;
mod families;
mod fields;
mod file;
mod layer;
mod restore;
mod shape;
mod spec;

pub use checkpoints::{CheckpointCosts, CheckpointInterval};
pub use error::SpecError;
pub use layer::{CompressedKv, DenseKv, LatentKv, LayerState, StateKind, WindowKv};
pub use restore::{PrefetchMode, PrefixRestore, RestorePlan, RestorePrices, RestoreSplit};
pub use shape::{Instances, KvGroups, ParallelShape, ShapeError, check_kv_compatibility};
pub use spec::{AttentionSpec, BlockLayout, BlockPart};

#[cfg(test)]
pub(crate) mod tests;
