//! Knowing prompts at the cost of what is new in them: what conversations leave for their next step, and the look at one
//! step in many, encoded again as a whole, whether that held. And whether the engines' own counts agree with it.
//!
//! A look is never waited for. One that finds a difference ends it for that model: its prompts are computed as a whole
//! from then on, and everything that tells how this router stands says so.

mod spot_check;
pub mod tokenizer_drift;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ownership::Supervision;
use prefix::{ConversationCache, LookupTier};
use serde::Deserialize;
use smart_default::SmartDefault;
use vocabulary::{Bytes, Tokens};

use crate::checkpoints::CheckpointStore;
use crate::config::units::ByteCount;
use crate::pipeline::identify::IdentifiedRequest;
use crate::telemetry::prefix_cache::PrefixCacheMetrics;
use spot_check::{SpotCheck, SpotCheckQueue};
use tokenizer_drift::TokenizerDrift;

/// Section `[identity]`.
#[derive(Clone, Debug, Deserialize, SmartDefault)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixCacheConfig {
    /// Memory for what conversations leave for their next step; 0 has every prompt computed as a whole.
    #[default(ByteCount::mebibytes(256))]
    pub memory: ByteCount,
    /// One step in so many is encoded again as a whole and compared; none where it is 0.
    #[default(256)]
    pub look_every: u64,
}

/// What is known of conversations, and the looks at whether it holds.
#[derive(Debug)]
pub struct PrefixCache {
    /// What they left.
    pub conversations: Arc<ConversationCache>,
    /// Whether engines count prompts as they are counted here.
    pub tokenizer_drift: TokenizerDrift,
    spot_checks: SpotCheckQueue,
    verify_every: Option<NonZeroU64>,
    steps: AtomicU64,
    checkpoints: Arc<CheckpointStore>,
    metrics: PrefixCacheMetrics,
}

impl PrefixCache {
    /// Knows nothing yet. Looks are taken for as long as it lives.
    pub fn start(
        config: &PrefixCacheConfig,
        checkpoints: Arc<CheckpointStore>,
        (metrics, tasks): (PrefixCacheMetrics, &Arc<Supervision>),
    ) -> Self {
        let conversations = Arc::new(ConversationCache::new(Bytes(config.memory.0 as u64)));
        Self {
            spot_checks: SpotCheckQueue::spawn((conversations.clone(), checkpoints.clone()), metrics.clone(), tasks),
            tokenizer_drift: TokenizerDrift::new(metrics.clone()),
            conversations,
            verify_every: NonZeroU64::new(config.look_every),
            steps: AtomicU64::new(0),
            checkpoints,
            metrics,
        }
    }

    /// Counts a step, and has it looked at when its turn has come, or when other routers should know its tokens.
    pub fn record_step(&self, prefixed: &IdentifiedRequest, known: Tokens) {
        let Some(rung) = prefixed.tier else { return };
        self.metrics.steps.with_label_values(&[rung.as_ref()]).inc();
        if matches!(rung, LookupTier::Cold | LookupTier::Checkpoint) {
            return;
        }
        let is_next = self.verify_every.is_some_and(|every| self.steps.fetch_add(1, Ordering::Relaxed) % every == 0);
        if is_next || self.checkpoints.should_publish(prefixed, known) {
            self.spot_checks.enqueue(SpotCheck::new(prefixed, rung, known));
        }
    }
}
