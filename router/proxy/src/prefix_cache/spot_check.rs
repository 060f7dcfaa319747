//! Spot checks: a step whose prompt was extended from an earlier one is encoded again as a whole and compared. They run
//! off the request path, one at a time, with a short queue.

use std::sync::Arc;

use ownership::SupervisedTasks;
use prefix::{ConversationCache, ConversationQuery, IncrementalPromptMismatch, LookupTier, Prompt, ResolvedPrompt};
use tokio::sync::{Mutex as AsyncMutex, mpsc};
use vocabulary::{ModelId, RequestId, SessionId, TenantId, Tokens};

use crate::checkpoints::{TokenCheckpointStore, TokenCheckpointUpdate};
use crate::identified_request::IdentifiedRequest;
use crate::telemetry::prefix_cache_metrics::PrefixCacheMetrics;
use crate::token_ids::EncodableRequest;

/// Limit of queued checks; others are skipped.
const MAX_QUEUED_CHECKS: usize = 4;

pub(super) struct PendingSpotCheck {
    encodable: EncodableRequest,
    /// The model name that the client used: an adapter has a name of its own.
    model: ModelId,
    prompt: Prompt,
    tier: LookupTier,
    known_tokens: Tokens,
    request: RequestId,
    tenant: TenantId,
    session: Option<SessionId>,
    affinity_key: SessionId,
}

impl PendingSpotCheck {
    pub(super) fn new(identified: &IdentifiedRequest, tier: LookupTier, known_tokens: Tokens) -> Self {
        Self {
            encodable: EncodableRequest::of(identified),
            model: identified.request.model.clone(),
            prompt: identified.prompt.clone(),
            tier,
            known_tokens,
            request: identified.request.incoming.id,
            tenant: identified.request.incoming.tenant.clone(),
            session: identified.named_session,
            affinity_key: identified.affinity_key,
        }
    }

    /// Encodes the whole prompt and compares it. Returns the difference, if any, and the prompt.
    fn run(&self) -> (Option<IncrementalPromptMismatch>, ResolvedPrompt) {
        let whole = self.encodable.identify();
        (self.prompt.mismatch(&whole.prompt), whole)
    }
}

/// Sender of the queue of spot checks.
#[derive(Debug)]
pub(super) struct SpotCheckQueue {
    queue: mpsc::Sender<PendingSpotCheck>,
    metrics: PrefixCacheMetrics,
}

impl SpotCheckQueue {
    pub(super) fn spawn(
        (conversations, checkpoints): (Arc<ConversationCache>, Arc<TokenCheckpointStore>),
        metrics: PrefixCacheMetrics,
        tasks: &Arc<SupervisedTasks>,
    ) -> Self {
        let (queue, next) = mpsc::channel::<PendingSpotCheck>(MAX_QUEUED_CHECKS);
        let (task_metrics, next) = (metrics.clone(), Arc::new(AsyncMutex::new(next)));
        // The task ends when the last sender, this one, is dropped.
        drop(tasks.supervise("spot_checks", move || {
            let (next, metrics) = (next.clone(), task_metrics.clone());
            let caches = (conversations.clone(), checkpoints.clone());
            async move { run_all(&mut *next.lock().await, &metrics, (&caches.0, &caches.1)).await }
        }));
        Self { queue, metrics }
    }

    /// Queues a check, unless the queue is full.
    pub(super) fn enqueue(&self, check: PendingSpotCheck) {
        if self.queue.try_send(check).is_err() {
            self.metrics.verifications.with_label_values(&["skipped"]).inc();
        }
    }
}

async fn run_all(
    next: &mut mpsc::Receiver<PendingSpotCheck>,
    metrics: &PrefixCacheMetrics,
    (conversations, checkpoints): (&Arc<ConversationCache>, &TokenCheckpointStore),
) {
    while let Some(check) = next.recv().await {
        let checked = tokio::task::spawn_blocking(move || (check.run(), check)).await;
        let Ok(((difference, whole), check)) = checked else { continue };
        report(metrics, &check, (difference, conversations));
        if difference.is_none() {
            let body_bytes = check.encodable.bytes();
            let tokenized = TokenCheckpointUpdate {
                known_tokens: check.known_tokens,
                next_checkpoint: whole.next_checkpoint,
                body_bytes,
            };
            checkpoints.store(&check.tenant, check.affinity_key, tokenized);
        }
    }
}

fn report(
    metrics: &PrefixCacheMetrics,
    check: &PendingSpotCheck,
    (difference, conversations): (Option<IncrementalPromptMismatch>, &ConversationCache),
) {
    let outcome = difference.map_or("match", IncrementalPromptMismatch::label);
    metrics.verifications.with_label_values(&[outcome]).inc();
    let Some(difference) = difference else { return };
    let model = check.encodable.model();
    let name = &check.model;
    if let IncrementalPromptMismatch::Refused(reason) = difference {
        // Engines refuse it, too, or it has become too long to be checked here: no other prompt is affected.
        let session = check.session.map(|session| session.0);
        check.encodable.forget(ConversationQuery { cache: conversations, tenant: &check.tenant.0, session });
        tracing::warn!(
            model = %name, request = %check.request, reason = reason.as_ref(),
            "a prompt that was put together from an earlier step cannot be computed as a whole; what was remembered of \
             its conversation is forgotten"
        );
    } else if model.disable_by_spot_check() {
        tracing::error!(
            model = %name, request = %check.request, tier = check.tier.as_ref(), reason = difference.label(),
            tokens = check.prompt.chain.tokens.0,
            "a prompt that was put together from an earlier step differs from the whole one; prompts of this model are \
             computed as a whole until this router is started again"
        );
    }
}

#[cfg(test)]
mod tests;
