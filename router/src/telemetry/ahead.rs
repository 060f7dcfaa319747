//! Metrics of prefixes that are sent between two steps.

use prometheus::{IntCounter, IntCounterVec};

use super::families::Families;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct AheadMetrics {
    /// `ahead_total{outcome}`: `sent` or `failed`; of those that were sent `used` or `unused`, once the next step is over.
    pub moves: IntCounterVec,
    /// `ahead_bytes_total`.
    pub bytes: IntCounter,
}

impl AheadMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let help = "Prefixes that were sent to another worker before a step asked for them: sent or failed, and of those that \
                    were sent, used or unused by the session's next step.";
        let moves = f.counters("ahead_total", help, &["outcome"]);
        ["sent", "failed", "used", "unused"].iter().for_each(|outcome| drop(moves.with_label_values(&[outcome])));
        Self { moves, bytes: f.counter("ahead_bytes_total", "KV that was sent before a step asked for it.") }
    }
}
