//! Metrics of the decision log.

use prometheus::IntCounterVec;

use super::families::Families;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct DecisionMetrics {
    /// `decision_log_records_total{outcome}`: `written`, `no_room` where the queue was full, `disk` where the disk refused.
    pub records: IntCounterVec,
}

impl DecisionMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let records = f.counters(
            "decision_log_records_total",
            "Receipts for the decision log on disk: written, left out because the queue was full, or refused by the disk.",
            &["outcome"],
        );
        ["written", "no_room", "disk"].iter().for_each(|outcome| drop(records.with_label_values(&[outcome])));
        Self { records }
    }
}
