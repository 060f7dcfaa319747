//! Metrics of the soft state: what was found where, what was written, and how Redis stands.

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{FINE_SECONDS, Families};
use crate::soft_state::{Kind, Standing};

/// How a lookup can end, as `soft_state_lookups_total` names it.
pub const LOOKUPS: [&str; 8] = ["near", "shared", "miss", "forgotten", "not_asked", "timeout", "error", "corrupt"];
/// How a write can end, as `soft_state_writes_total` names it.
pub const WRITES: [&str; 5] = ["saved", "not_asked", "failed", "no_room", "too_large"];
const RESOLVED: [&str; 2] = ["resolved", "incomplete"];
const STANDINGS: [&str; 4] = ["alone", "up", "slow", "gone"];

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct SoftStateMetrics {
    /// `soft_state_lookups_total{kind, outcome}`.
    pub lookups: IntCounterVec,
    /// `soft_state_lookup_seconds`: lookups that went to Redis.
    pub lookup_seconds: Histogram,
    /// `soft_state_writes_total{kind, outcome}`: writes to Redis.
    pub writes: IntCounterVec,
    /// `soft_state_standing{standing}`: 1 for the one that holds; `alone` where no Redis is configured.
    pub standing: IntGaugeVec,
    /// `soft_state_resolved_total{outcome}`: responses whose history was put together here, and those for which it could
    /// not be.
    pub resolved: IntCounterVec,
    /// `identified_tokens_total{source}`: prompt tokens that an earlier step of the conversation or a checkpoint
    /// knew, and those that were computed.
    pub identified: IntCounterVec,
    /// `soft_state_routers`: routers that share it, as far as known; each one's share of a quota while Redis is gone.
    pub routers: IntGauge,
    /// `quota_refusals_total{tenant, unit}`: requests beyond a tenant's quota.
    pub quota_refusals: IntCounterVec,
    /// `quota_repeats_total`: requests that were sent again without having come to their end, and were not charged again.
    pub quota_repeats: IntCounter,
    /// `tenant_tokens_total{tenant}`: tokens that requests have used, each once, of tenants with a section of their own.
    pub tenant_tokens: IntCounterVec,
    /// `soft_state_flushes_total`: times that Redis was found to have forgotten everything.
    pub flushes: IntCounter,
    /// `soft_state_memory_bytes`, refreshed when scraped.
    pub memory_bytes: IntGauge,
}

impl SoftStateMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let kinds_and_outcomes = &["kind", "outcome"];
        let metrics = Self {
            lookups: f.counters(
                "soft_state_lookups_total",
                "Lookups of soft state, by where they ended.",
                kinds_and_outcomes,
            ),
            lookup_seconds: f.histogram(
                "soft_state_lookup_seconds",
                "Time that lookups waited for Redis.",
                FINE_SECONDS,
            ),
            writes: f.counters(
                "soft_state_writes_total",
                "Writes of soft state to Redis, by outcome.",
                kinds_and_outcomes,
            ),
            standing: f.gauges(
                "soft_state_standing",
                "1 for how Redis stands: alone, up, slow or gone.",
                &["standing"],
            ),
            resolved: f.counters(
                "soft_state_resolved_total",
                "Responses away from the maker of the one before: resolved, or incomplete.",
                &["outcome"],
            ),
            identified: f.counters(
                "identified_tokens_total",
                "Prompt tokens that were identified: known from an earlier step or a checkpoint, or computed.",
                &["source"],
            ),
            routers: f.gauge("soft_state_routers", "Routers that share soft state, as far as known."),
            quota_refusals: f.counters(
                "quota_refusals_total",
                "Requests refused because they were beyond their tenant's quota of requests or tokens.",
                &["tenant", "unit"],
            ),
            quota_repeats: f.counter(
                "quota_repeats_total",
                "Requests sent again under their Idempotency-Key because they had not come to their end, and not charged again.",
            ),
            tenant_tokens: f.counters(
                "tenant_tokens_total",
                "Tokens used by requests of tenants with a section in the configuration, those of a repeated request once.",
                &["tenant"],
            ),
            flushes: f.counter("soft_state_flushes_total", "Times that Redis had forgotten everything."),
            memory_bytes: f.gauge("soft_state_memory_bytes", "Soft state in this router's memory."),
        };
        for kind in [Kind::Maker, Kind::Transcript, Kind::Checkpoint, Kind::Charge] {
            LOOKUPS.iter().for_each(|outcome| drop(metrics.lookups.with_label_values(&[kind.as_ref(), outcome])));
            WRITES.iter().for_each(|outcome| drop(metrics.writes.with_label_values(&[kind.as_ref(), outcome])));
        }
        let sources = ["conversation", "checkpoint", "computed"];
        sources.iter().for_each(|source| drop(metrics.identified.with_label_values(&[source])));
        RESOLVED.iter().for_each(|outcome| drop(metrics.resolved.with_label_values(&[outcome])));
        metrics
    }

    /// A history was put together, or could not be.
    pub fn resolved(&self, history: Option<()>) {
        let outcome = history.map_or("incomplete", |()| "resolved");
        self.resolved.with_label_values(&[outcome]).inc();
    }

    /// How Redis stands now; none where there is none.
    pub fn standing(&self, standing: Option<Standing>) {
        let holds = standing.map_or("alone", Into::into);
        for name in STANDINGS {
            self.standing.with_label_values(&[name]).set(i64::from(name == holds));
        }
    }

    /// A lookup ended.
    pub fn looked_up(&self, kind: Kind, outcome: &str) {
        self.lookups.with_label_values(&[kind.as_ref(), outcome]).inc();
    }

    /// A write ended.
    pub fn written(&self, kind: Kind, outcome: &str) {
        self.writes.with_label_values(&[kind.as_ref(), outcome]).inc();
    }
}
