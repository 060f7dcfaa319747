//! Tensor- and pipeline-parallel shapes: what one rank keeps of a model's state, and whether two workers can exchange it.
//!
//! Tensor parallelism splits KV heads, pipeline parallelism splits layers; expert parallelism does not touch KV, data
//! parallelism repeats it. A latent or compressed entry serves all heads, so every tensor rank keeps all of it.

use serde::{Deserialize, Serialize};

use super::layer::LayerState;
use super::{AttentionSpec, DenseKv, WindowKv};

/// Ranks of one data-parallel replica of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct ParallelShape {
    /// Ranks that share out the KV heads, at least 1.
    pub tensor: u16,
    /// Stages that share out the layers, at least 1.
    pub pipeline: u16,
}

/// Why a shape does not fit a model, or another shape. The deployment's fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShapeError {
    /// A size of zero.
    #[error("tensor and pipeline sizes are 1 or more")]
    NoRanks,
    /// KV heads can neither be shared out nor repeated evenly.
    #[error("{kv_heads} KV heads cannot be shared out over {tensor} tensor-parallel ranks")]
    Heads {
        /// The layer's heads.
        kv_heads: u32,
        /// Ranks.
        tensor: u16,
    },
    /// A stage would have no layer.
    #[error("{layers} layers cannot be shared out over {pipeline} pipeline stages")]
    Layers {
        /// The model's layers.
        layers: usize,
        /// Stages.
        pipeline: u16,
    },
    /// There is no such stage.
    #[error("there is no pipeline stage {0}")]
    NoSuchStage(u16),
    /// A target's rank would need parts of several ranks of the source.
    #[error("{target} tensor-parallel ranks cannot read from {source_ranks}: accepted is a multiple")]
    Tensor {
        /// Ranks of the worker that sends.
        source_ranks: u16,
        /// Ranks of the worker that receives.
        target: u16,
    },
    /// A stage would need layers of several stages of the source.
    #[error("{target} pipeline stages cannot read from {source_stages}: accepted is as many")]
    Pipeline {
        /// Stages of the worker that sends.
        source_stages: u16,
        /// Stages of the worker that receives.
        target: u16,
    },
}

/// Whether a worker of one shape can read KV of one of the other. Where the model is not known, its layers and heads are
/// taken to fit.
///
/// The rule is that of the engines' groups (`KvGroups`): every rank of the target has one rank of the source that it reads
/// from, so the target's tensor size is a multiple of the source's, and stages are equal.
pub fn check_kv_compatibility(
    spec: Option<&AttentionSpec>,
    source: ParallelShape,
    target: ParallelShape,
) -> Result<(), ShapeError> {
    if source == target {
        return Ok(());
    }
    for shape in [source, target] {
        spec.map_or_else(|| some_ranks(shape), |spec| spec.check_shape(shape))?;
    }
    if !target.tensor.is_multiple_of(source.tensor) {
        Err(ShapeError::Tensor { source_ranks: source.tensor, target: target.tensor })
    } else if source.pipeline != target.pipeline {
        Err(ShapeError::Pipeline { source_stages: source.pipeline, target: target.pipeline })
    } else {
        Ok(())
    }
}

fn some_ranks(shape: ParallelShape) -> Result<(), ShapeError> {
    if shape.tensor == 0 || shape.pipeline == 0 { Err(ShapeError::NoRanks) } else { Ok(()) }
}

impl AttentionSpec {
    /// Whether workers of this shape can serve the model at all.
    pub fn check_shape(&self, shape: ParallelShape) -> Result<(), ShapeError> {
        let ParallelShape { tensor, pipeline } = shape;
        some_ranks(shape)?;
        let layers = self.layers().len();
        if usize::from(pipeline) > layers {
            return Err(ShapeError::Layers { layers, pipeline });
        }
        let ranks = u32::from(tensor);
        let uneven = |heads: &u32| heads.max(&ranks) % heads.min(&ranks) != 0;
        match self.layers().iter().filter_map(LayerState::kv_heads).find(uneven) {
            Some(kv_heads) => Err(ShapeError::Heads { kv_heads, tensor }),
            None => Ok(()),
        }
    }

    /// What one tensor rank of a stage keeps: its layers, with its share of the heads and never less than one. All tensor
    /// ranks of a stage keep as much.
    ///
    /// Layers that cannot be shared out evenly go one each to the stages before the last, as vLLM does (`get_pp_indices`).
    pub fn for_rank(&self, shape: ParallelShape, stage: u16) -> Result<Self, ShapeError> {
        self.check_shape(shape)?;
        if stage >= shape.pipeline {
            return Err(ShapeError::NoSuchStage(stage));
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

/// The first layer of a stage, and the one after its last.
fn stage_layers(layers: usize, stages: usize, stage: usize) -> (usize, usize) {
    let (each, rest) = (layers / stages, layers % stages);
    // Of the stages before the last, the later `rest` ones have one more.
    let before = |stage: usize| stage * each + (stage + rest + 1).saturating_sub(stages).min(rest);
    (before(stage), before(stage + 1))
}

impl LayerState {
    /// KV heads that tensor-parallel ranks share out; none where every rank keeps all of it.
    fn kv_heads(&self) -> Option<u32> {
        match self {
            Self::Dense(DenseKv { kv_heads, .. }) | Self::Window(WindowKv { kv_heads, .. }) => Some(*kv_heads),
            Self::Latent(_) | Self::Csa(_) | Self::Hca(_) => None,
        }
    }

    fn with_kv_heads(self, kv_heads: u32) -> Self {
        match self {
            Self::Dense(heads) => Self::Dense(DenseKv { kv_heads, ..heads }),
            Self::Window(layer) => Self::Window(WindowKv { kv_heads, ..layer }),
            Self::Latent(_) | Self::Csa(_) | Self::Hca(_) => self,
        }
    }
}

/// How the ranks of prefill and decode instances find each other: each prefill rank makes a group with the decode ranks
/// that read from it. Instances are counted over both kinds, prefill first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvGroups {
    prefill: Instances,
    decode: Instances,
}

/// Instances of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instances {
    /// How many.
    pub count: u16,
    /// Tensor-parallel ranks of each.
    pub tensor: u16,
}

impl KvGroups {
    /// The groups of these instances; decode ranks must be a multiple of prefill ranks.
    pub fn new(prefill: Instances, decode: Instances) -> Result<Self, ShapeError> {
        let shape = |instances: Instances| ParallelShape { tensor: instances.tensor, pipeline: 1 };
        some_ranks(shape(prefill)).and_then(|()| some_ranks(shape(decode)))?;
        check_kv_compatibility(None, shape(prefill), shape(decode))?;
        Ok(Self { prefill, decode })
    }

    /// Decode ranks of one instance that read from one prefill rank (TPM).
    pub fn readers(&self) -> u32 {
        u32::from(self.decode.tensor / self.prefill.tensor)
    }

    /// Ranks in a group.
    pub fn group_size(&self) -> u32 {
        u32::from(self.prefill.count) + u32::from(self.decode.count) * self.readers()
    }

    /// Which group a rank of an instance is in: that of the prefill rank it reads from.
    pub fn group(&self, instance: u32, rank: u16) -> u32 {
        if self.is_prefill_instance(instance) { rank.into() } else { u32::from(rank) / self.readers() }
    }

    /// Its number in that group.
    pub fn group_rank(&self, instance: u32, rank: u16) -> u32 {
        match self.is_prefill_instance(instance) {
            true => instance,
            false => {
                let prefill = u32::from(self.prefill.count);
                prefill + (instance - prefill) * self.readers() + u32::from(rank) % self.readers()
            }
        }
    }

    /// Its number among all ranks of all instances.
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
