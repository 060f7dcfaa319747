//! What the simulated fleet keeps: the model of `--attention-file`, under each `--tier-policy`.

use std::path::PathBuf;
use std::sync::Arc;

use planner::{AttentionSpec, WindowCheckpointInterval};
use simulator::trace::Trace;
use simulator::{HardwareProfile, KvModel, KvModelError, TierPolicy};

use proxy::catalog::{self, AttentionError};

/// One policy of the tiers below device memory, with the fleet that has it.
pub(super) struct TierVariant {
    /// The policy; none if none was given.
    pub(super) policy: Option<TierPolicy>,
    /// The worker, in the model's tokens.
    pub(super) spec: HardwareProfile,
    /// The model, where one was named.
    pub(super) model: Option<Arc<KvModel>>,
}

/// Why a model or a tier policy cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum TierVariantError {
    #[error("--attention-file: {path}: {source}")]
    Attention { path: PathBuf, source: AttentionError },
    #[error("--tier-policy: {0}")]
    Model(#[from] KvModelError),
    #[error(
        "--tier-policy {0} depends on what a model's layers keep; give the model with --attention-file, or use none or lru"
    )]
    NoModel(TierPolicy),
}

/// Returns one variant for each given tier policy, or the default one.
pub(super) fn tier_variants(
    (attention, policies): (Option<&PathBuf>, &[TierPolicy]),
    spec: HardwareProfile,
    trace: &Trace,
) -> Result<Vec<TierVariant>, TierVariantError> {
    let attention = attention.map(|path| {
        catalog::load_spec(path).map_err(|source| TierVariantError::Attention { path: path.clone(), source })
    });
    let attention = attention.transpose()?;
    let named = policies.iter().copied().map(Some);
    let named: Vec<Option<TierPolicy>> = if policies.is_empty() { vec![None] } else { named.collect() };
    named.into_iter().map(|policy| tier_variant(attention.as_ref(), (policy, spec), trace)).collect()
}

fn tier_variant(
    attention: Option<&AttentionSpec>,
    (policy, spec): (Option<TierPolicy>, HardwareProfile),
    trace: &Trace,
) -> Result<TierVariant, TierVariantError> {
    let plain = |spec| Ok(TierVariant { policy, spec, model: None });
    match (attention, policy) {
        (Some(attention), _) => {
            let model = KvModel::new(attention, policy.unwrap_or(TierPolicy::Lru), spec, trace)?;
            Ok(TierVariant { policy, spec: model.worker(), model: Some(Arc::new(model)) })
        }
        (None, None | Some(TierPolicy::Lru)) => plain(spec),
        (None, Some(TierPolicy::DeviceOnly)) => plain(HardwareProfile { sizes: spec.sizes.device_only(), ..spec }),
        (None, Some(other)) => Err(TierVariantError::NoModel(other)),
    }
}

impl TierVariant {
    /// The traffic as its model takes it.
    pub(super) fn apply_model(&self, trace: &Trace) -> Trace {
        self.model.as_ref().map_or_else(|| trace.clone(), |model| model.scale_trace(trace.clone()))
    }

    pub(super) fn note(&self) -> Option<String> {
        let model = self.model.as_ref().filter(|_| self.policy == Some(TierPolicy::LowestCost))?;
        Some(match model.checkpoints() {
            WindowCheckpointInterval::Full => {
                "the cheapest is to store every token's windows (`lowest_cost`)".to_owned()
            }
            WindowCheckpointInterval::EveryTokens(period) => {
                format!("the cheapest is to store windows at every {period} tokens (`lowest_cost`)")
            }
            WindowCheckpointInterval::None => "the cheapest is to store no windows (`lowest_cost`)".to_owned(),
        })
    }
}
