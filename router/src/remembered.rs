//! What this router remembers of its clients beside the ledger, and the uses it makes of it.

use std::sync::Arc;

use ownership::Supervision;
use prefix::{Checkpoint, Rung};
use vocabulary::Tokens;

use crate::checkpoints::{Checkpoints, Tokenized};
use crate::config::Config;
use crate::identity::Identity;
use crate::pipeline::identify::Prefixed;
use crate::pipeline::prompts::Prompts;
use crate::pipeline::readback::Readbacks;
use crate::quotas::Quotas;
use crate::resources::{Resources, Tenancy};
use crate::soft_state::{SoftState, SoftStateError};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::soft_state::SoftStateMetrics;

/// One store and its uses.
#[derive(Debug)]
pub struct Remembered {
    /// What makes requests cheaper and may be lost.
    pub state: Arc<SoftState>,
    /// Responses that workers have stored.
    pub responses: Arc<Resources>,
    /// What was tokenized before.
    pub checkpoints: Arc<Checkpoints>,
    /// What conversations have left for their next step.
    pub identity: Identity,
    /// What tenants may use.
    pub quotas: Quotas,
    /// Prompts by their token ids, for moving them by hand.
    pub prompts: Arc<Prompts>,
    /// What targets have handed back for their sessions' next steps.
    pub readbacks: Readbacks,
    metrics: SoftStateMetrics,
}

impl Remembered {
    /// Nothing yet.
    pub fn start(
        config: &Config,
        (cluster, tasks): (&str, &Arc<Supervision>),
        metrics: &Metrics,
    ) -> Result<Self, SoftStateError> {
        let identity_metrics = metrics.identity.clone();
        let metrics = &metrics.soft_state;
        let state = Arc::new(SoftState::start(&config.soft_state, (cluster, tasks), metrics.clone())?);
        let quotas = Quotas::new(&config.tenants, &state, metrics);
        let checkpoints = Arc::new(Checkpoints::new(state.clone()));
        let identity = Identity::start(&config.identity, checkpoints.clone(), (identity_metrics, tasks));
        let tenancy = if config.auth.keys_file.is_some() { Tenancy::Several } else { Tenancy::Single };
        let responses = Arc::new(Resources::new(state.clone(), tenancy));
        let (prompts, readbacks, metrics) = (Arc::default(), Readbacks::default(), metrics.clone());
        Ok(Self { checkpoints, identity, responses, quotas, state, prompts, readbacks, metrics })
    }

    /// Keeps what a step has found out of its prompt, and counts it.
    pub fn keep(&self, prefixed: &Prefixed, known: Tokens, next: Option<Checkpoint>) {
        self.identity.identified(prefixed, known);
        let Some(rung) = prefixed.rung else { return };
        let source = if matches!(rung, Rung::Checkpoint | Rung::Cold) { "checkpoint" } else { "conversation" };
        let counted = |source: &str, tokens: Tokens| {
            self.metrics.identified.with_label_values(&[source]).inc_by(tokens.0);
        };
        counted(source, known);
        counted("computed", prefixed.prompt.chain.tokens - known);
        let incoming = &prefixed.request.incoming;
        let tokenized = Tokenized { known, next, body_bytes: incoming.body.len() };
        self.checkpoints.keep(&incoming.tenant, prefixed.pin, tokenized);
    }
}
