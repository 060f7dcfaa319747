//! What this router remembers of its clients beside the ledger, and the uses it makes of it.

use std::sync::Arc;

use ownership::Supervision;
use prefix::{LookupTier, TokenCheckpoint};
use vocabulary::Tokens;

use crate::checkpoints::{CheckpointStore, CheckpointUpdate};
use crate::config::Config;
use crate::pipeline::identify::IdentifiedRequest;
use crate::pipeline::prompts::PromptStore;
use crate::pipeline::reverse_pull::ReversePullStore;
use crate::prefix_cache::PrefixCache;
use crate::quotas::Quotas;
use crate::shared_cache::{SharedCache, SharedCacheError};
use crate::stored_responses::{StoredResponses, TenantMode};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::shared_cache::SharedCacheMetrics;

/// One store and its uses.
#[derive(Debug)]
pub struct RouterCaches {
    /// What makes requests cheaper and may be lost.
    pub shared_cache: Arc<SharedCache>,
    /// Responses that workers have stored.
    pub responses: Arc<StoredResponses>,
    /// What was tokenized before.
    pub checkpoints: Arc<CheckpointStore>,
    /// What conversations have left for their next step.
    pub prefix_cache: PrefixCache,
    /// What tenants may use.
    pub quotas: Quotas,
    /// Prompts by their token ids, for moving them by hand.
    pub prompts: Arc<PromptStore>,
    /// What targets have handed back for their sessions' next steps.
    pub reverse_pulls: ReversePullStore,
    metrics: SharedCacheMetrics,
}

impl RouterCaches {
    /// Nothing yet.
    pub fn start(
        config: &Config,
        (cluster, tasks): (&str, &Arc<Supervision>),
        metrics: &Metrics,
    ) -> Result<Self, SharedCacheError> {
        let identity_metrics = metrics.prefix_cache.clone();
        let metrics = &metrics.shared_cache;
        let state = Arc::new(SharedCache::start(&config.soft_state, (cluster, tasks), metrics.clone())?);
        let quotas = Quotas::new(&config.tenants, &state, metrics);
        let checkpoints = Arc::new(CheckpointStore::new(state.clone()));
        let identity = PrefixCache::start(&config.identity, checkpoints.clone(), (identity_metrics, tasks));
        let tenancy = if config.auth.keys_file.is_some() { TenantMode::Several } else { TenantMode::Single };
        let responses = Arc::new(StoredResponses::new(state.clone(), tenancy));
        let (prompts, readbacks, metrics) = (Arc::default(), ReversePullStore::default(), metrics.clone());
        Ok(Self {
            checkpoints,
            prefix_cache: identity,
            responses,
            quotas,
            shared_cache: state,
            prompts,
            reverse_pulls: readbacks,
            metrics,
        })
    }

    /// Keeps what a step has found out of its prompt, and counts it.
    pub fn record(&self, prefixed: &IdentifiedRequest, known: Tokens, next: Option<TokenCheckpoint>) {
        self.prefix_cache.record_step(prefixed, known);
        let Some(rung) = prefixed.tier else { return };
        let source =
            if matches!(rung, LookupTier::Checkpoint | LookupTier::Cold) { "checkpoint" } else { "conversation" };
        let counted = |source: &str, tokens: Tokens| {
            self.metrics.identified.with_label_values(&[source]).inc_by(tokens.0);
        };
        counted(source, known);
        counted("computed", prefixed.prompt.chain.tokens - known);
        let incoming = &prefixed.request.incoming;
        let tokenized =
            CheckpointUpdate { known_tokens: known, next_checkpoint: next, body_bytes: incoming.body.len() };
        self.checkpoints.store(&incoming.tenant, prefixed.affinity_key, tokenized);
    }
}
