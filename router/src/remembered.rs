//! What this router remembers of its clients beside the ledger, and the uses it makes of it.

use std::sync::Arc;

use crate::resources::Resources;
use crate::soft_state::{SoftState, SoftStateConfig, SoftStateError};
use crate::telemetry::soft_state::SoftStateMetrics;

/// One store and its uses.
#[derive(Debug)]
pub struct Remembered {
    /// What makes requests cheaper and may be lost.
    pub state: Arc<SoftState>,
    /// Responses that workers have stored.
    pub responses: Arc<Resources>,
}

impl Remembered {
    /// Nothing yet.
    pub fn start(config: &SoftStateConfig, cluster: &str, metrics: SoftStateMetrics) -> Result<Self, SoftStateError> {
        let state = Arc::new(SoftState::start(config, cluster, metrics)?);
        Ok(Self { responses: Arc::new(Resources::new(state.clone())), state })
    }
}
