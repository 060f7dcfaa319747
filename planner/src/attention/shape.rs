//! Tensor- and pipeline-parallel shapes: what one rank keeps of a model's KV state, and whether two workers can
//! exchange it.
//!
//! Tensor parallelism splits KV heads, pipeline parallelism splits layers, expert parallelism does not affect KV, and
//! data parallelism duplicates it. A latent or compressed entry serves all heads, so every tensor rank keeps all of it.

use serde::{Deserialize, Serialize};

use super::layer::LayerState;
use super::{AttentionSpec, DenseKv, WindowKv};

/// Tensor- and pipeline-parallel sizes of one data-parallel replica of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct ParallelShape {
    /// Tensor-parallel ranks, which split the KV heads; at least 1.
    pub tensor: u16,
    /// Pipeline stages, which split the layers; at least 1.
    pub pipeline: u16,
}

/// Why a shape does not fit a model or another shape. The fault of the deployment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ParallelShapeError {
    /// A size is zero.
    #[error("tensor and pipeline sizes are 1 or more")]
    NoRanks,
    /// KV heads can neither be split nor replicated evenly over the ranks.
    #[error("{kv_heads} KV heads cannot be shared out over {tensor} tensor-parallel ranks")]
    Heads {
        /// KV heads of the layer.
        kv_heads: u32,
        /// Tensor-parallel ranks.
        tensor: u16,
    },
    /// A stage would have no layer.
    #[error("{layers} layers cannot be shared out over {pipeline} pipeline stages")]
    Layers {
        /// Layers of the model.
        layers: usize,
        /// Pipeline stages.
        pipeline: u16,
    },
    /// The pipeline stage does not exist.
    #[error("there is no pipeline stage {0}")]
    NoSuchStage(u16),
    /// A rank of the target would need parts of several ranks of the source.
    #[error("{target} tensor-parallel ranks cannot read from {source_ranks}: accepted is a multiple")]
    Tensor {
        /// Tensor-parallel ranks of the sender.
        source_ranks: u16,
        /// Tensor-parallel ranks of the receiver.
        target: u16,
    },
    /// A stage of the target would need layers of several stages of the source.
    #[error("{target} pipeline stages cannot read from {source_stages}: accepted is as many")]
    Pipeline {
        /// Pipeline stages of the sender.
        source_stages: u16,
        /// Pipeline stages of the receiver.
        target: u16,
    },
}

/// Checks whether a worker with the target shape can read KV from one with the source shape. For an unknown model,
/// layers and heads are assumed to fit.
///
/// The rule is that of the engines' KV groups ([`KvTransferGroups`]): every rank of the target reads from exactly one
/// rank of the source, so the target's tensor size must be a multiple of the source's, and both must have equally many
/// stages.
pub fn check_kv_compatibility(
    spec: Option<&AttentionSpec>,
    source: ParallelShape,
    target: ParallelShape,
) -> Result<(), ParallelShapeError> {
    if source == target {
        return Ok(());
    }
    for shape in [source, target] {
        spec.map_or_else(|| some_ranks(shape), |spec| spec.check_shape(shape))?;
    }
    if !target.tensor.is_multiple_of(source.tensor) {
        Err(ParallelShapeError::Tensor { source_ranks: source.tensor, target: target.tensor })
    } else if source.pipeline != target.pipeline {
        Err(ParallelShapeError::Pipeline { source_stages: source.pipeline, target: target.pipeline })
    } else {
        Ok(())
    }
}

fn some_ranks(shape: ParallelShape) -> Result<(), ParallelShapeError> {
    if shape.tensor == 0 || shape.pipeline == 0 { Err(ParallelShapeError::NoRanks) } else { Ok(()) }
}

impl AttentionSpec {
    /// Checks whether workers of this shape can serve the model.
    pub fn check_shape(&self, shape: ParallelShape) -> Result<(), ParallelShapeError> {
        let ParallelShape { tensor, pipeline } = shape;
        some_ranks(shape)?;
        let layers = self.layers().len();
        if usize::from(pipeline) > layers {
            return Err(ParallelShapeError::Layers { layers, pipeline });
        }
        let ranks = u32::from(tensor);
        let uneven = |heads: &u32| heads.max(&ranks) % heads.min(&ranks) != 0;
        match self.layers().iter().filter_map(LayerState::kv_heads).find(uneven) {
            Some(kv_heads) => Err(ParallelShapeError::Heads { kv_heads, tensor }),
            None => Ok(()),
        }
    }

    /// Returns what one tensor rank of a stage keeps: the stage's layers, with the rank's share of the heads, at least
    /// one. All tensor ranks of a stage keep the same amount.
    ///
    /// If layers do not split evenly, the extra ones go one each to the stages before the last, as in vLLM
    /// (`get_pp_indices`).
    pub fn for_rank(&self, shape: ParallelShape, stage: u16) -> Result<Self, ParallelShapeError> {
        self.check_shape(shape)?;
        if stage >= shape.pipeline {
            return Err(ParallelShapeError::NoSuchStage(stage));
        }
        let (begin, end) = stage_layers(self.layers().len(), shape.pipeline.into(), stage.into());
        let share = |layer: &LayerState| match layer.kv_heads() {
            Some(heads) => layer.with_kv_heads((heads / u32::from(shape.tensor)).max(1)),
            None => *layer,
        };
        let layers = self.layers()[begin..end].iter().map(share).collect();
        let part = Self::new(layers, self.alignment()).expect("a part of a model is within its bounds");
        Ok(part.with_checkpoints(self.checkpoints()).expect("a part's block divides the model's"))
    }
}

/// Returns the range of layers of a stage: the first one, and the one after the last.
fn stage_layers(layers: usize, stages: usize, stage: usize) -> (usize, usize) {
    let (each, rest) = (layers / stages, layers % stages);
    // Among the stages before the last, the last `rest` ones have one more layer.
    let before = |stage: usize| stage * each + (stage + rest + 1).saturating_sub(stages).min(rest);
    (before(stage), before(stage + 1))
}

impl LayerState {
    /// Returns the KV heads that tensor-parallel ranks split; none if every rank keeps the whole state.
    fn kv_heads(&self) -> Option<u32> {
        match self {
            Self::Dense(DenseKv { kv_heads, .. }) | Self::SlidingWindow(WindowKv { kv_heads, .. }) => Some(*kv_heads),
            Self::Mla(_) | Self::Csa(_) | Self::Hca(_) => None,
        }
    }

    fn with_kv_heads(self, kv_heads: u32) -> Self {
        match self {
            Self::Dense(heads) => Self::Dense(DenseKv { kv_heads, ..heads }),
            Self::SlidingWindow(layer) => Self::SlidingWindow(WindowKv { kv_heads, ..layer }),
            Self::Mla(_) | Self::Csa(_) | Self::Hca(_) => self,
        }
    }
}

/// Groups that connect the ranks of prefill and decode instances: each prefill rank forms a group with the decode ranks
/// that read from it. Instance numbers run over both kinds, prefill first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvTransferGroups {
    prefill: EngineInstances,
    decode: EngineInstances,
}

/// Engine instances of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineInstances {
    /// Number of instances.
    pub count: u16,
    /// Tensor-parallel ranks per instance.
    pub tensor: u16,
}

impl KvTransferGroups {
    /// Builds the groups of these instances; decode ranks must be a multiple of prefill ranks.
    pub fn new(prefill: EngineInstances, decode: EngineInstances) -> Result<Self, ParallelShapeError> {
        let shape = |instances: EngineInstances| ParallelShape { tensor: instances.tensor, pipeline: 1 };
        some_ranks(shape(prefill)).and_then(|()| some_ranks(shape(decode)))?;
        check_kv_compatibility(None, shape(prefill), shape(decode))?;
        Ok(Self { prefill, decode })
    }

    /// Returns the decode ranks of one instance that read from one prefill rank (TPM).
    pub fn readers(&self) -> u32 {
        u32::from(self.decode.tensor / self.prefill.tensor)
    }

    /// Returns the number of ranks in a group.
    pub fn group_size(&self) -> u32 {
        u32::from(self.prefill.count) + u32::from(self.decode.count) * self.readers()
    }

    /// Returns the group of an instance's rank: that of the prefill rank it reads from.
    pub fn group(&self, instance: u32, rank: u16) -> u32 {
        if self.is_prefill_instance(instance) { rank.into() } else { u32::from(rank) / self.readers() }
    }

    /// Returns the number of an instance's rank within its group.
    pub fn group_rank(&self, instance: u32, rank: u16) -> u32 {
        match self.is_prefill_instance(instance) {
            true => instance,
            false => {
                let prefill = u32::from(self.prefill.count);
                prefill + (instance - prefill) * self.readers() + u32::from(rank) % self.readers()
            }
        }
    }

    /// Returns the number of an instance's rank among all ranks of all instances.
    pub fn global_rank(&self, instance: u32, rank: u16) -> u64 {
        let [count, prefill, decode] = [self.prefill.count, self.prefill.tensor, self.decode.tensor].map(u64::from);
        let instance = u64::from(instance);
        let before = if instance < count { instance * prefill } else { count * prefill + (instance - count) * decode };
        before + u64::from(rank)
    }

    fn is_prefill_instance(&self, instance: u32) -> bool {
        instance < u32::from(self.prefill.count)
    }
}
