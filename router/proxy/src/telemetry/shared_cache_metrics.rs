//! Metrics of the shared cache: what was found where, what was written, and the state of Redis.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{FINE_SECONDS, families};
use crate::shared_cache::{CacheEntryKind, SharedCacheHealth};

const ENTRY_KINDS: [CacheEntryKind; 5] = [
    CacheEntryKind::ResponseWorker,
    CacheEntryKind::ResponseTenant,
    CacheEntryKind::Transcript,
    CacheEntryKind::Checkpoint,
    CacheEntryKind::QuotaCharge,
];
/// How a lookup can end, as `shared_cache_lookups_total` names it.
const LOOKUP_OUTCOMES: [&str; 8] =
    ["local_hit", "shared_hit", "miss", "deleted", "skipped", "timeout", "error", "corrupt"];
/// How a write can end, as `shared_cache_writes_total` names it.
const WRITE_OUTCOMES: [&str; 5] = ["stored", "skipped", "failed", "queue_full", "too_large"];
const HEALTH_STATES: [&str; 4] = ["disabled", "up", "slow", "unreachable"];

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct SharedCacheMetrics {
        lookups: IntCounterVec = "shared_cache_lookups_total"
            {kind = ENTRY_KINDS.map(<&str>::from), outcome = LOOKUP_OUTCOMES},
            "Lookups in the shared cache, by where they ended.";
        lookup_seconds: Histogram = "shared_cache_lookup_duration_seconds" [FINE_SECONDS],
            "Time that lookups waited for Redis.";
        writes: IntCounterVec = "shared_cache_writes_total"
            {kind = ENTRY_KINDS.map(<&str>::from), outcome = WRITE_OUTCOMES},
            "Writes of the shared cache to Redis, by outcome.";
        up: IntGauge = "shared_cache_up", "1 while Redis answers in time, or while none is configured.";
        state: IntGaugeVec = "shared_cache_state" {state = HEALTH_STATES},
            "1 for the state of Redis: disabled (none is configured), up, slow or unreachable.";
        resolutions: IntCounterVec = "response_history_resolutions_total" {outcome = ["resolved", "incomplete"]},
            "Responses away from the maker of the one before: resolved, or incomplete.";
        identified: IntCounterVec = "prefix_lookup_tokens_total" {source = ["conversation", "checkpoint", "encoded"]},
            "Prompt tokens that were identified: known from an earlier step or a checkpoint, or encoded.";
        routers: IntGauge = "shared_cache_routers", "Routers that share the cache, as far as known.";
        quota_refusals: IntCounterVec = "quota_rejections_total" {tenant, unit},
            "Requests refused because they were beyond their tenant's quota of requests or tokens, or too many at once.";
        quota_repeats: IntCounter = "quota_idempotent_retries_total",
            "Requests sent again under their Idempotency-Key because they had not come to their end, and not charged again.";
        tenant_tokens: IntCounterVec = "tenant_tokens_total" {tenant},
            "Tokens used by requests of tenants with a section in the configuration, those of a repeated request once.";
        flushes: IntCounter = "shared_cache_flushes_total", "Times that Redis had forgotten everything.";
        memory_bytes: IntGauge = "shared_cache_memory_bytes", "The shared cache in this router's memory.";
    }
}

impl SharedCacheMetrics {
    /// Counts whether a conversation's history could be assembled.
    pub fn count_resolution(&self, history: Option<()>) {
        let outcome = history.map_or("incomplete", |()| "resolved");
        self.resolutions.with_label_values(&[outcome]).inc();
    }

    /// Sets the health of Redis; `None` where none is configured.
    pub fn set_health(&self, health: Option<SharedCacheHealth>) {
        let state = health.map_or("disabled", Into::into);
        self.up.set(i64::from(matches!(state, "disabled" | "up")));
        for name in HEALTH_STATES {
            self.state.with_label_values(&[name]).set(i64::from(name == state));
        }
    }

    /// Counts a finished lookup.
    pub fn count_lookup(&self, kind: CacheEntryKind, outcome: &str) {
        self.lookups.with_label_values(&[kind.as_ref(), outcome]).inc();
    }

    /// Counts a finished write.
    pub fn count_write(&self, kind: CacheEntryKind, outcome: &str) {
        self.writes.with_label_values(&[kind.as_ref(), outcome]).inc();
    }
}
