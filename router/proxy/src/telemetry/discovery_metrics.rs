//! Metrics of worker discovery: which sources list workers, and how workers come and go.

use prometheus::{IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{families, label_values};
use crate::discovery::WorkerSource;

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct DiscoveryMetrics {
        workers: IntGaugeVec = "discovery_workers" {source = label_values::<WorkerSource>()}, "Workers by who lists them.";
        up: IntGaugeVec = "discovery_up" {source = label_values::<WorkerSource>()},
            "1 while a source of workers can be read; at 0 its last list is kept.";
        left_out: IntGauge = "discovery_workers_over_limit", "Workers that are listed beyond what a router can have.";
        changes: IntCounterVec = "worker_changes_total" {change = ["joined", "changed", "left"]},
            "Workers that joined, changed or left.";
        drained: IntCounterVec = "drain_sessions_total" {outcome = ["moved", "failed"]},
            "Sessions of workers that drain: moved to another worker, or failed because they cannot be.";
        drained_bytes: IntCounter = "drain_transfer_bytes_total", "KV bytes moved away from workers that drain.";
    }
}
