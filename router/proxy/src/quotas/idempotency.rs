//! Idempotency: a request that is sent again under its `Idempotency-Key` is not charged again for what was charged when
//! it did not complete. The charge is shared by all routers with the same Redis, so a killed router need not be asked.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName};
use ring::digest::{SHA256, digest};
use vocabulary::{TenantId, Tokens};
use xxhash_rust::xxh3::xxh3_128;

use crate::shared_cache::{CacheEntryKind, CacheKey, CounterLease, SharedCache};

/// The header. OpenAI's client libraries send it by themselves, with the same value on a retry.
const IDEMPOTENCY_HEADER: HeaderName = HeaderName::from_static("idempotency-key");
const MAX_KEY_BYTES: usize = 256;
/// How often per minute a request may be sent again without a charge: the earlier attempt may still be running.
const REPEATS_PER_MINUTE: u64 = 2;
/// How often it may be in all. Who leaves each attempt would otherwise get answers for the price of one for as long as
/// the charge is kept.
const MAX_REPEATS: u64 = 2;

/// The idempotency key under which a client sends a request in all of its attempts.
#[derive(Clone, Debug)]
pub(super) struct IdempotencyKey {
    charge: CacheKey,
    repeats: CacheKey,
    shared_cache: Arc<SharedCache>,
}

/// What was charged for a request that has not completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct QuotaCharge {
    /// Digest of its body: another body is another request.
    pub(super) body_digest: u128,
    pub(super) tokens: Tokens,
    /// Tokens of these that were counted as used.
    pub(super) used: Tokens,
    /// How often it was sent again without a charge.
    pub(super) repeats: u64,
}

impl QuotaCharge {
    const BYTES: usize = 40;

    fn encode(self) -> Bytes {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(self.body_digest.to_le_bytes());
        bytes.extend(self.tokens.0.to_le_bytes());
        bytes.extend(self.used.0.to_le_bytes());
        bytes.extend(self.repeats.to_le_bytes());
        bytes.into()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (body, counts) = bytes.split_first_chunk()?;
        let (taken, counts) = counts.split_first_chunk()?;
        let (used, repeats) = counts.split_first_chunk()?;
        let count = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes);
        let (tokens, used, repeats) = (Tokens(count(taken)), Tokens(count(used)), count(repeats.first_chunk()?));
        Some(Self { body_digest: u128::from_le_bytes(*body), tokens, used, repeats })
    }
}

impl IdempotencyKey {
    /// Reads the key from the headers. `None` where there is no valid key, and without a shared cache: then no other
    /// router can have received the request before.
    pub(super) fn of(headers: &HeaderMap, tenant: &TenantId, state: &Arc<SharedCache>) -> Option<Self> {
        let mut keys = headers.get_all(IDEMPOTENCY_HEADER).iter();
        let key = keys.next().filter(|key| (1..=MAX_KEY_BYTES).contains(&key.len()))?;
        if keys.next().is_some() || state.max_propagation_delay().is_none() {
            return None;
        }
        let name: String = digest(&SHA256, key.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let repeats = CacheKey::new(CacheEntryKind::Quota, tenant, &format!("repeats:{name}"));
        Some(Self {
            charge: CacheKey::new(CacheEntryKind::QuotaCharge, tenant, &name),
            repeats,
            shared_cache: state.clone(),
        })
    }

    /// Returns what was charged for it before. Waits for Redis no longer than its timeout.
    pub(super) async fn previous_charge(&self) -> Option<QuotaCharge> {
        QuotaCharge::decode(&self.shared_cache.get_shared(&self.charge).await?)
    }

    /// Whether it may be sent again without a charge. Waits no longer than the same timeout.
    pub(super) async fn may_repeat(&self, before: QuotaCharge) -> bool {
        if before.repeats >= MAX_REPEATS {
            return false;
        }
        let leased = self.shared_cache.lease(&self.repeats, REPEATS_PER_MINUTE, 1).await;
        matches!(leased, CounterLease::Granted { units: 1, .. })
    }

    pub(super) fn record(&self, charge: QuotaCharge) {
        self.shared_cache.put(self.charge.clone(), charge.encode());
    }

    /// Forgets the charge of a completed request: if it is sent again, the client wants another answer.
    pub(super) fn close(&self) {
        self.shared_cache.forget(&self.charge);
    }
}

/// Digest that distinguishes bodies.
pub(super) fn body_digest(bytes: &[u8]) -> u128 {
    xxh3_128(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_encoded_charge_decodes() {
        let (tokens, used) = (Tokens(1_000), Tokens(u64::MAX));
        let charge = QuotaCharge { body_digest: u128::MAX - 7, tokens, used, repeats: 2 };
        assert_eq!(QuotaCharge::decode(&charge.encode()), Some(charge));
        for wrong in [&b""[..], &[0; 32], &[0; 39], &[0; 41]] {
            assert_eq!(QuotaCharge::decode(wrong), None);
        }
    }
}
