//! Metrics of KV that moves, or waits to, between two steps of a session.

use prometheus::{IntCounter, IntCounterVec};
use strum::VariantArray as _;

use super::families::Families;
use crate::pipeline::readback::Fate;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct BetweenSteps {
    /// `ahead_total{outcome}`: `sent` or `failed`; of those that were sent `used` or `unused`, once the next step is over.
    pub ahead: IntCounterVec,
    /// `ahead_bytes_total`.
    pub ahead_bytes: IntCounter,
    /// `readbacks_total{outcome}`: what targets handed back for the next step, by what came of it.
    pub readbacks: IntCounterVec,
}

impl BetweenSteps {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let help = "Prefixes that were sent to another worker before a step asked for them: sent or failed, and of those that \
                    were sent, used or unused by the session's next step.";
        let ahead = f.counters("ahead_total", help, &["outcome"]);
        ["sent", "failed", "used", "unused"].iter().for_each(|outcome| drop(ahead.with_label_values(&[outcome])));
        let help = "KV that decode workers handed back for their sessions' next steps, by what came of it.";
        let readbacks = f.counters("readbacks_total", help, &["outcome"]);
        Fate::VARIANTS.iter().for_each(|fate| drop(readbacks.with_label_values(&[fate.as_ref()])));
        Self {
            ahead,
            ahead_bytes: f.counter("ahead_bytes_total", "KV that was sent before a step asked for it."),
            readbacks,
        }
    }
}
