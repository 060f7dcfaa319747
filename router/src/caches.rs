//! The router's caches of client data outside the ledger.

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

/// The shared cache and everything built on it.
#[derive(Debug)]
pub struct RouterCaches {
    /// Cache shared with other routers; its loss breaks nothing.
    pub shared_cache: Arc<SharedCache>,
    /// Responses stored at workers.
    pub responses: Arc<StoredResponses>,
    /// Token checkpoints of conversations.
    pub checkpoints: Arc<CheckpointStore>,
    /// What conversations have left for their next step.
    pub prefix_cache: PrefixCache,
    /// Quotas of tenants.
    pub quotas: Quotas,
    /// Prompts with their token ids, for moving prefixes on an operator's request.
    pub prompts: Arc<PromptStore>,
    /// Parameters that decode workers have handed back for their sessions' next steps.
    pub reverse_pulls: ReversePullStore,
    metrics: SharedCacheMetrics,
}

impl RouterCaches {
    /// Starts empty caches.
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

    /// Stores and counts what a step has learned about its prompt.
    pub fn record(&self, prefixed: &IdentifiedRequest, known: Tokens, next: Option<TokenCheckpoint>) {
        self.prefix_cache.record_step(prefixed, known);
        let Some(rung) = prefixed.tier else { return };
        let source =
            if matches!(rung, LookupTier::Checkpoint | LookupTier::Cold) { "checkpoint" } else { "conversation" };
        let counted = |source: &str, tokens: Tokens| {
            self.metrics.identified.with_label_values(&[source]).inc_by(tokens.0);
        };
        counted(source, known);
        counted("encoded", prefixed.prompt.chain.tokens - known);
        let incoming = &prefixed.request.incoming;
        let tokenized =
            CheckpointUpdate { known_tokens: known, next_checkpoint: next, body_bytes: incoming.body.len() };
        self.checkpoints.store(&incoming.tenant, prefixed.affinity_key, tokenized);
    }
}
