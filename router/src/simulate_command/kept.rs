//! What the simulated fleet keeps: the model of `--attention`, under each `--cache`.

use std::path::PathBuf;
use std::sync::Arc;

use planner::{AttentionSpec, Checkpoints};
use simulator::trace::Trace;
use simulator::{Cache, KvError, KvModel, Spec};

use crate::catalog::{self, AttentionError};

/// One way to keep slower tiers, with the fleet that does.
pub(super) struct Kept {
    /// As it was asked for; none where nothing was.
    pub(super) cache: Option<Cache>,
    /// The worker, in the model's tokens.
    pub(super) spec: Spec,
    /// The model, where one was named.
    pub(super) model: Option<Arc<KvModel>>,
}

/// Why a model or a cache management cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeptError {
    #[error("--attention: {path}: {source}")]
    Attention { path: PathBuf, source: AttentionError },
    #[error("--cache: {0}")]
    Model(#[from] KvError),
    #[error("--cache {0} is of what a model's layers keep; name the model with --attention, or use hbm or lru")]
    NoModel(Cache),
}

/// One for every cache management that was named, else one as it always is.
pub(super) fn all(
    (attention, caches): (Option<&PathBuf>, &[Cache]),
    spec: Spec,
    trace: &Trace,
) -> Result<Vec<Kept>, KeptError> {
    let attention = attention
        .map(|path| catalog::attention_of(path).map_err(|source| KeptError::Attention { path: path.clone(), source }));
    let attention = attention.transpose()?;
    let named = caches.iter().copied().map(Some);
    let named: Vec<Option<Cache>> = if caches.is_empty() { vec![None] } else { named.collect() };
    named.into_iter().map(|cache| one(attention.as_ref(), (cache, spec), trace)).collect()
}

fn one(
    attention: Option<&AttentionSpec>,
    (cache, spec): (Option<Cache>, Spec),
    trace: &Trace,
) -> Result<Kept, KeptError> {
    let plain = |spec| Ok(Kept { cache, spec, model: None });
    match (attention, cache) {
        (Some(attention), _) => {
            let model = KvModel::new(attention, cache.unwrap_or(Cache::Lru), spec, trace)?;
            Ok(Kept { cache, spec: model.worker(), model: Some(Arc::new(model)) })
        }
        (None, None | Some(Cache::Lru)) => plain(spec),
        (None, Some(Cache::Hbm)) => plain(Spec { sizes: spec.sizes.device_only(), ..spec }),
        (None, Some(other)) => Err(KeptError::NoModel(other)),
    }
}

impl Kept {
    /// The traffic as its model takes it.
    pub(super) fn weigh(&self, trace: &Trace) -> Trace {
        self.model.as_ref().map_or_else(|| trace.clone(), |model| model.weigh(trace.clone()))
    }

    pub(super) fn note(&self) -> Option<String> {
        let model = self.model.as_ref().filter(|_| self.cache == Some(Cache::Cost))?;
        Some(match model.checkpoints() {
            Checkpoints::Full => "the cheapest is to store every token's windows (`cost`)".to_owned(),
            Checkpoints::Every(period) => format!("the cheapest is to store windows at every {period} tokens (`cost`)"),
            Checkpoints::None => "the cheapest is to store no windows (`cost`)".to_owned(),
        })
    }
}
