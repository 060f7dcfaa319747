//! Token checkpoints of conversations: what one step has tokenized, the next one need not, whichever router it reaches.
//!
//! They only save work. A checkpoint that is missing, late or of another text is not used, and the ids are the same.

use std::sync::Arc;

use prefix::TokenCheckpoint;
use vocabulary::{SessionId, TenantId, Tokens};

use crate::identified_request::IdentifiedRequest;
use crate::shared_cache::{CacheEntryKind, CacheKey, SharedCache};

/// Minimum size of a body for a lookup; smaller ones are tokenized again. Measured: the tokenizer, which caches words
/// itself, takes 0.05 ms for 32 KB that it has seen, as long as reading a checkpoint, and 0.2 ms for 128 KB, three
/// times as long.
const MIN_BODY_BYTES: usize = 128 << 10;
/// Minimum size of a body for a lookup in Redis. Measured: text that this router has not seen takes 0.7 ms at 128 KB
/// and 3 ms or more at 512 KB; fetching and reading its ids takes about 1 ms.
const MIN_REDIS_LOOKUP_BYTES: usize = 256 << 10;
/// Growth factor of a conversation after which its checkpoint is written to Redis again.
const PUBLISH_GROWTH_FACTOR: f64 = 1.25;

/// Checkpoints of all conversations.
#[derive(Debug)]
pub struct TokenCheckpointStore {
    shared_cache: Arc<SharedCache>,
}

impl TokenCheckpointStore {
    /// Stores the checkpoints in `shared_cache`.
    pub fn new(shared_cache: Arc<SharedCache>) -> Self {
        Self { shared_cache }
    }

    /// Returns the checkpoint of a conversation that a body of this size continues.
    pub async fn lookup(
        &self,
        tenant: &TenantId,
        affinity_key: SessionId,
        body_bytes: usize,
    ) -> Option<TokenCheckpoint> {
        if body_bytes < MIN_BODY_BYTES {
            return None;
        }
        let key = key(tenant, affinity_key);
        let stored = match body_bytes < MIN_REDIS_LOOKUP_BYTES {
            true => self.shared_cache.get_local(&key),
            false => self.shared_cache.get(&key).await,
        };
        TokenCheckpoint::from_bytes(&stored?)
    }

    /// Whether to publish a step to other routers although its tokens were known from the step before: otherwise they
    /// would encode the conversation from its last full computation on.
    pub fn should_publish(&self, identified: &IdentifiedRequest, known: Tokens) -> bool {
        let is_long = identified.request.incoming.body.len() >= MIN_REDIS_LOOKUP_BYTES;
        is_long
            && self.shared_cache.health().is_some()
            && publish_level(identified.prompt.chain.tokens) > publish_level(known)
    }

    /// Stores what a step has tokenized. Never waits.
    pub fn store(&self, tenant: &TenantId, affinity_key: SessionId, tokenized: TokenCheckpointUpdate) {
        let TokenCheckpointUpdate { known_tokens: known, next_checkpoint: next, body_bytes } = tokenized;
        let next = next.filter(|next| body_bytes >= MIN_BODY_BYTES && next.token_count() > known);
        let Some((tokens, bytes)) = next.and_then(|next| Some((next.token_count(), next.to_bytes()?))) else { return };
        if body_bytes >= MIN_REDIS_LOOKUP_BYTES && publish_level(tokens) > publish_level(known) {
            self.shared_cache.put(key(tenant, affinity_key), bytes.into());
        } else {
            self.shared_cache.put_local(key(tenant, affinity_key), bytes.into());
        }
    }
}

/// What a step has tokenized.
#[derive(Debug)]
pub struct TokenCheckpointUpdate {
    /// Tokens that were known from earlier steps.
    pub known_tokens: Tokens,
    /// The next checkpoint.
    pub next_checkpoint: Option<TokenCheckpoint>,
    /// Size of the request's body.
    pub body_bytes: usize,
}

fn key(tenant: &TenantId, affinity_key: SessionId) -> CacheKey {
    CacheKey::new(CacheEntryKind::Checkpoint, tenant, &affinity_key.to_string())
}

/// Logarithm of the token count to the base `PUBLISH_GROWTH_FACTOR`, rounded down.
fn publish_level(tokens: Tokens) -> u32 {
    (tokens.0.max(1) as f64).log(PUBLISH_GROWTH_FACTOR) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_conversation_writes_few_checkpoints_to_redis() {
        let steps = (1..1000u64).map(|step| Tokens(1000 * step));
        let mut last = Tokens(0);
        let told = steps.filter(|step| publish_level(*step) > publish_level(std::mem::replace(&mut last, *step)));
        assert!((20..45).contains(&told.count()));
    }
}
