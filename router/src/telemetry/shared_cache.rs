//! Metrics of the soft state: what was found where, what was written, and how Redis stands.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{FINE_SECONDS, families};
use crate::shared_cache::{CacheEntryKind, SharedCacheHealth};

const ENTRY_KINDS: [CacheEntryKind; 5] = [
    CacheEntryKind::Maker,
    CacheEntryKind::Holder,
    CacheEntryKind::Transcript,
    CacheEntryKind::Checkpoint,
    CacheEntryKind::Charge,
];
/// How a lookup can end, as `soft_state_lookups_total` names it.
const LOOKUP_OUTCOMES: [&str; 8] = ["near", "shared", "miss", "forgotten", "not_asked", "timeout", "error", "corrupt"];
/// How a write can end, as `soft_state_writes_total` names it.
const WRITE_OUTCOMES: [&str; 5] = ["saved", "not_asked", "failed", "no_room", "too_large"];
const HEALTH_STATES: [&str; 4] = ["alone", "up", "slow", "gone"];

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct SharedCacheMetrics {
        lookups: IntCounterVec = "soft_state_lookups_total" {kind = ENTRY_KINDS.map(<&str>::from), outcome = LOOKUP_OUTCOMES},
            "Lookups of soft state, by where they ended.";
        lookup_seconds: Histogram = "soft_state_lookup_seconds" [FINE_SECONDS], "Time that lookups waited for Redis.";
        writes: IntCounterVec = "soft_state_writes_total" {kind = ENTRY_KINDS.map(<&str>::from), outcome = WRITE_OUTCOMES},
            "Writes of soft state to Redis, by outcome.";
        health: IntGaugeVec = "soft_state_standing" {standing}, "1 for how Redis stands: alone, up, slow or gone.";
        resolutions: IntCounterVec = "soft_state_resolved_total" {outcome = ["resolved", "incomplete"]},
            "Responses away from the maker of the one before: resolved, or incomplete.";
        identified: IntCounterVec = "identified_tokens_total" {source = ["conversation", "checkpoint", "computed"]},
            "Prompt tokens that were identified: known from an earlier step or a checkpoint, or computed.";
        routers: IntGauge = "soft_state_routers", "Routers that share soft state, as far as known.";
        quota_refusals: IntCounterVec = "quota_refusals_total" {tenant, unit},
            "Requests refused because they were beyond their tenant's quota of requests or tokens, or too many at once.";
        quota_repeats: IntCounter = "quota_repeats_total",
            "Requests sent again under their Idempotency-Key because they had not come to their end, and not charged again.";
        tenant_tokens: IntCounterVec = "tenant_tokens_total" {tenant},
            "Tokens used by requests of tenants with a section in the configuration, those of a repeated request once.";
        flushes: IntCounter = "soft_state_flushes_total", "Times that Redis had forgotten everything.";
        memory_bytes: IntGauge = "soft_state_memory_bytes", "Soft state in this router's memory.";
    }
}

impl SharedCacheMetrics {
    /// Counts whether a conversation's history could be assembled.
    pub fn count_resolution(&self, history: Option<()>) {
        let outcome = history.map_or("incomplete", |()| "resolved");
        self.resolutions.with_label_values(&[outcome]).inc();
    }

    /// Sets the health of Redis; `None` where none is configured.
    pub fn set_health(&self, standing: Option<SharedCacheHealth>) {
        let holds = standing.map_or("alone", Into::into);
        for name in HEALTH_STATES {
            self.health.with_label_values(&[name]).set(i64::from(name == holds));
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
