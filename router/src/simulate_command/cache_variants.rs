//! What the simulated fleet keeps: the model of `--attention`, under each `--cache`.

use std::path::PathBuf;
use std::sync::Arc;

use planner::{AttentionSpec, CheckpointInterval};
use simulator::trace::Trace;
use simulator::{CacheStrategy, HardwareProfile, KvModel, KvModelError};

use crate::catalog::{self, AttentionError};

/// One way to keep slower tiers, with the fleet that does.
pub(super) struct CacheVariant {
    /// As it was asked for; none where nothing was.
    pub(super) cache: Option<CacheStrategy>,
    /// The worker, in the model's tokens.
    pub(super) spec: HardwareProfile,
    /// The model, where one was named.
    pub(super) model: Option<Arc<KvModel>>,
}

/// Why a model or a cache management cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CacheVariantError {
    #[error("--attention: {path}: {source}")]
    Attention { path: PathBuf, source: AttentionError },
    #[error("--cache: {0}")]
    Model(#[from] KvModelError),
    #[error("--cache {0} is of what a model's layers keep; name the model with --attention, or use hbm or lru")]
    NoModel(CacheStrategy),
}

/// One for every cache management that was named, else one as it always is.
pub(super) fn cache_variants(
    (attention, caches): (Option<&PathBuf>, &[CacheStrategy]),
    spec: HardwareProfile,
    trace: &Trace,
) -> Result<Vec<CacheVariant>, CacheVariantError> {
    let attention = attention.map(|path| {
        catalog::load_spec(path).map_err(|source| CacheVariantError::Attention { path: path.clone(), source })
    });
    let attention = attention.transpose()?;
    let named = caches.iter().copied().map(Some);
    let named: Vec<Option<CacheStrategy>> = if caches.is_empty() { vec![None] } else { named.collect() };
    named.into_iter().map(|cache| cache_variant(attention.as_ref(), (cache, spec), trace)).collect()
}

fn cache_variant(
    attention: Option<&AttentionSpec>,
    (cache, spec): (Option<CacheStrategy>, HardwareProfile),
    trace: &Trace,
) -> Result<CacheVariant, CacheVariantError> {
    let plain = |spec| Ok(CacheVariant { cache, spec, model: None });
    match (attention, cache) {
        (Some(attention), _) => {
            let model = KvModel::new(attention, cache.unwrap_or(CacheStrategy::Lru), spec, trace)?;
            Ok(CacheVariant { cache, spec: model.worker(), model: Some(Arc::new(model)) })
        }
        (None, None | Some(CacheStrategy::Lru)) => plain(spec),
        (None, Some(CacheStrategy::Hbm)) => plain(HardwareProfile { sizes: spec.sizes.device_only(), ..spec }),
        (None, Some(other)) => Err(CacheVariantError::NoModel(other)),
    }
}

impl CacheVariant {
    /// The traffic as its model takes it.
    pub(super) fn apply_model(&self, trace: &Trace) -> Trace {
        self.model.as_ref().map_or_else(|| trace.clone(), |model| model.scale_trace(trace.clone()))
    }

    pub(super) fn note(&self) -> Option<String> {
        let model = self.model.as_ref().filter(|_| self.cache == Some(CacheStrategy::Cost))?;
        Some(match model.checkpoints() {
            CheckpointInterval::Full => "the cheapest is to store every token's windows (`cost`)".to_owned(),
            CheckpointInterval::Every(period) => {
                format!("the cheapest is to store windows at every {period} tokens (`cost`)")
            }
            CheckpointInterval::None => "the cheapest is to store no windows (`cost`)".to_owned(),
        })
    }
}
