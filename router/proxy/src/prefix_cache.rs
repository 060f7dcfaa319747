//! Prefix cache: identifies prompts at the cost of their new part, from what earlier steps of a conversation have
//! cached. One step in many is spot-checked by encoding its whole prompt again, and the engines' own token counts are
//! compared.
//!
//! No request waits for a spot check. One that finds a difference disables the cache for that model: its prompts are
//! computed as a whole from then on, and all status reports say so.

mod spot_check;
pub mod tokenizer_drift;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ownership::SupervisedTasks;
use prefix::{ConversationCache, LookupTier};
use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{ByteCount, Bytes, Tokens};

use crate::checkpoints::TokenCheckpointStore;
use crate::identified_request::IdentifiedRequest;
use crate::request_body_cache::RequestBodyCache;
use crate::telemetry::prefix_cache_metrics::PrefixCacheMetrics;
use spot_check::{PendingSpotCheck, SpotCheckQueue};
use tokenizer_drift::TokenizerDrift;

/// Section `[prefix_cache]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixCacheConfig {
    /// Memory for what conversations leave for their next step; with 0 every prompt is computed as a whole.
    #[default(ByteCount::mebibytes(256))]
    pub memory_limit: ByteCount,
    /// Memory for each session's last body, so that of the next one only what is new is read; with 0 every body is read
    /// as a whole.
    #[default(ByteCount::mebibytes(128))]
    pub body_memory_limit: ByteCount,
    /// One in this many steps is encoded again as a whole and compared; 0 disables these checks.
    #[default(256)]
    pub verify_every: u64,
}

/// The cached conversations, and the checks of their correctness.
#[derive(Debug)]
pub struct PrefixCache {
    /// What conversations have left for their next step.
    pub conversations: Arc<ConversationCache>,
    /// Each session's last body.
    pub bodies: Arc<RequestBodyCache>,
    /// Compares token counts with those of the engines.
    pub tokenizer_drift: Arc<TokenizerDrift>,
    spot_checks: SpotCheckQueue,
    verify_every: Option<NonZeroU64>,
    steps: AtomicU64,
    checkpoints: Arc<TokenCheckpointStore>,
    metrics: PrefixCacheMetrics,
}

impl PrefixCache {
    /// Returns an empty cache. Spot checks run as long as it lives.
    pub fn start(
        config: &PrefixCacheConfig,
        checkpoints: Arc<TokenCheckpointStore>,
        (metrics, tasks): (PrefixCacheMetrics, &Arc<SupervisedTasks>),
    ) -> Self {
        let conversations = Arc::new(ConversationCache::new(Bytes(config.memory_limit.0 as u64)));
        Self {
            spot_checks: SpotCheckQueue::spawn((conversations.clone(), checkpoints.clone()), metrics.clone(), tasks),
            tokenizer_drift: Arc::new(TokenizerDrift::new(metrics.clone())),
            bodies: Arc::new(RequestBodyCache::new(config.body_memory_limit.0, metrics.body_memory_bytes.clone())),
            conversations,
            verify_every: NonZeroU64::new(config.verify_every),
            steps: AtomicU64::new(0),
            checkpoints,
            metrics,
        }
    }

    /// Counts a step, and queues a spot check if one is due or if other routers should get its checkpoint.
    pub fn record_step(&self, identified: &IdentifiedRequest, known: Tokens) {
        let Some(tier) = identified.tier else { return };
        self.metrics.steps.with_label_values(&[tier.as_ref()]).inc();
        if matches!(tier, LookupTier::Miss | LookupTier::Checkpoint) {
            return;
        }
        let is_next = self.verify_every.is_some_and(|every| self.steps.fetch_add(1, Ordering::Relaxed) % every == 0);
        if is_next || self.checkpoints.should_publish(identified, known) {
            self.spot_checks.enqueue(PendingSpotCheck::new(identified, tier, known));
        }
    }
}
