//! Metrics of workers that are left out because requests failed there.

use prometheus::{IntCounterVec, IntGaugeVec};
use strum::VariantArray as _;

use super::families::Families;
use crate::outliers::Cause;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct OutlierMetrics {
    /// `ejections_total{cause}`.
    pub ejections: IntCounterVec,
    /// `worker_ejected{worker}`: 1 while it is; refreshed when scraped.
    pub ejected: IntGaugeVec,
}

impl OutlierMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let ejections = f.counters(
            "ejections_total",
            "Workers that were left out for a while because requests failed there, by why: consecutive_failures, \
             failure_percentage or trial_failed.",
            &["cause"],
        );
        Cause::VARIANTS.iter().for_each(|cause| drop(ejections.with_label_values(&[cause.as_ref()])));
        let help = "1 while no requests but trials go there because requests failed there.";
        Self { ejections, ejected: f.gauges("worker_ejected", help, &["worker"]) }
    }
}
