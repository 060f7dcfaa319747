//! What this router remembers of its clients beside the ledger, and the uses it makes of it.

use std::sync::Arc;

use crate::checkpoints::Checkpoints;
use crate::config::Config;
use crate::pipeline::prompts::Prompts;
use crate::quotas::Quotas;
use crate::resources::Resources;
use crate::soft_state::{SoftState, SoftStateError};
use crate::telemetry::soft_state::SoftStateMetrics;

/// One store and its uses.
#[derive(Debug)]
pub struct Remembered {
    /// What makes requests cheaper and may be lost.
    pub state: Arc<SoftState>,
    /// Responses that workers have stored.
    pub responses: Arc<Resources>,
    /// What was tokenized before.
    pub checkpoints: Checkpoints,
    /// What tenants may use.
    pub quotas: Quotas,
    /// Prompts by their token ids, for moving them by hand.
    pub prompts: Arc<Prompts>,
}

impl Remembered {
    /// Nothing yet.
    pub fn start(config: &Config, cluster: &str, metrics: &SoftStateMetrics) -> Result<Self, SoftStateError> {
        let state = Arc::new(SoftState::start(&config.soft_state, cluster, metrics.clone())?);
        let quotas = Quotas::new(&config.tenants, &state, metrics);
        let checkpoints = Checkpoints::new(state.clone(), metrics.clone());
        let responses = Arc::new(Resources::new(state.clone()));
        Ok(Self { checkpoints, responses, quotas, state, prompts: Arc::default() })
    }
}
