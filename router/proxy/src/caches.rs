//! The router's caches of client data outside the ledger.

use std::collections::BTreeMap;
use std::sync::Arc;

use ownership::SupervisedTasks;

use crate::checkpoints::TokenCheckpointStore;
use crate::prefix_cache::{PrefixCache, PrefixCacheConfig};
use crate::prompts::RetainedPromptStore;
use crate::quotas::{Quotas, TenantConfig};
use crate::shared_cache::{RedisUrlError, SharedCache, SharedCacheConfig};
use crate::stored_responses::{StoredResponses, TenantMode};
use crate::telemetry::metrics::Metrics;

/// The shared cache and everything built on it.
#[derive(Debug)]
pub struct RouterCaches {
    /// Cache shared with other routers; its loss breaks nothing.
    pub shared_cache: Arc<SharedCache>,
    /// Responses stored at workers.
    pub responses: Arc<StoredResponses>,
    /// Token checkpoints of conversations.
    pub checkpoints: Arc<TokenCheckpointStore>,
    /// What conversations have left for their next step.
    pub prefix_cache: Arc<PrefixCache>,
    /// Quotas of tenants.
    pub quotas: Quotas,
    /// Prompts with their token ids, for moving prefixes on an operator's request.
    pub prompts: Arc<RetainedPromptStore>,
}

/// Settings of the caches.
#[derive(Clone, Copy, Debug)]
pub struct CacheSettings<'a> {
    /// The shared cache.
    pub shared_cache: &'a SharedCacheConfig,
    /// What conversations leave for their next step.
    pub prefix_cache: &'a PrefixCacheConfig,
    /// Quotas, by tenant.
    pub tenants: &'a BTreeMap<String, TenantConfig>,
    /// Whether there are several tenants.
    pub tenancy: TenantMode,
}

impl RouterCaches {
    /// Starts empty caches.
    pub fn start(
        settings: CacheSettings<'_>,
        (cluster, tasks): (&str, &Arc<SupervisedTasks>),
        metrics: &Metrics,
    ) -> Result<Self, RedisUrlError> {
        let identity_metrics = metrics.prefix_cache.clone();
        let metrics = &metrics.shared_cache;
        let state = Arc::new(SharedCache::start(settings.shared_cache, (cluster, tasks), metrics.clone())?);
        let quotas = Quotas::new(settings.tenants, &state, metrics);
        let checkpoints = Arc::new(TokenCheckpointStore::new(state.clone()));
        let identity = PrefixCache::start(settings.prefix_cache, checkpoints.clone(), (identity_metrics, tasks));
        let responses = Arc::new(StoredResponses::new(state.clone(), settings.tenancy));
        Ok(Self {
            checkpoints,
            prefix_cache: Arc::new(identity),
            responses,
            quotas,
            shared_cache: state,
            prompts: Arc::default(),
        })
    }
}
