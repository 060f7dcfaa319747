//! Who lists workers, and how they come and go.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};
use strum::VariantArray as _;

use super::families::Families;
use crate::membership::Source;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct DiscoveryMetrics {
    /// `discovery_workers{source}`: workers that are its.
    pub workers: IntGaugeVec,
    /// `discovery_failing{source}`: 1 while it cannot be read; refreshed when scraped.
    pub failing: IntGaugeVec,
    /// `discovery_left_out`: workers that are listed beyond what a router can have.
    pub left_out: IntGauge,
    /// `worker_changes_total{change}`: joined, changed or left.
    pub changes: IntCounterVec,
    /// `drained_sessions_total{outcome}`: of workers that drain, moved, or stuck where they are.
    pub drained: IntCounterVec,
    /// `drained_bytes_total`: KV that was moved for that.
    pub drained_bytes: IntCounter,
}

impl DiscoveryMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let changes = f.counters("worker_changes_total", "Workers that joined, changed or left.", &["change"]);
        ["joined", "changed", "left"].iter().for_each(|change| drop(changes.with_label_values(&[change])));
        let drained = f.counters(
            "drained_sessions_total",
            "Sessions of workers that drain: moved to another worker, or stuck because they cannot be.",
            &["outcome"],
        );
        ["moved", "stuck"].iter().for_each(|outcome| drop(drained.with_label_values(&[outcome])));
        let metrics = Self {
            drained,
            drained_bytes: f.counter("drained_bytes_total", "KV bytes moved away from workers that drain."),
            workers: f.gauges("discovery_workers", "Workers by who lists them.", &["source"]),
            failing: f.gauges(
                "discovery_failing",
                "1 while a source of workers cannot be read, and what it last said is kept.",
                &["source"],
            ),
            left_out: f.gauge("discovery_left_out", "Workers that are listed beyond what a router can have."),
            changes,
        };
        for source in Source::VARIANTS {
            metrics.workers.with_label_values(&[source.as_ref()]).set(0);
            metrics.failing.with_label_values(&[source.as_ref()]).set(0);
        }
        metrics
    }
}
