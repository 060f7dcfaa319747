//! Metrics of the decision log, and of prices held against what was seen.

use prometheus::{GaugeVec, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec};
use strum::VariantArray as _;

use super::families::{Families, SECONDS};
use super::outliers::OutlierMetrics;
use crate::correctness::Outcome;
use crate::pipeline::turns::Until;

/// Counted where it happens; clones share their values.
#[derive(Clone, Debug)]
pub struct DecisionMetrics {
    /// `decision_log_records_total{outcome}`: `written`, `no_room` where the queue was full, `disk` where the disk refused.
    pub records: IntCounterVec,
    /// `steps_waiting`: refreshed when scraped.
    pub waiting: IntGauge,
    /// `step_waited_seconds{until}`: by what ended it.
    pub waited: HistogramVec,
    /// `first_token_by_price_ratio{action}`: of steps that one worker served alone, seen by foretold.
    pub foretold: HistogramVec,
    /// `worker_prefill_tokens_per_second{worker}`: as it is believed now; refreshed when scraped.
    pub prefill_speed: GaugeVec,
    /// `worker_mispriced{worker, off}`: 1 while its first tokens come late or early by its prices; refreshed when scraped.
    pub mispriced: IntGaugeVec,
    /// `guardrail_first_token_ratio{action}`: sessions with it by the control group's; 0 before there are enough; refreshed
    /// when scraped, as the next two.
    pub guard_ratio: GaugeVec,
    /// `guardrail_sessions{action, arm}`: sessions that are compared.
    pub guard_sessions: IntGaugeVec,
    /// `guardrail_reverted{action}`: 1 while it is switched off because it made sessions slower.
    pub reverted: IntGaugeVec,
    /// Workers that are left out because requests failed there.
    pub outliers: OutlierMetrics,
    /// `correctness_checks_total{result}`: transfers that were to be checked, by what came of it.
    pub checks: IntCounterVec,
    /// `correctness_barred_links`: refreshed when scraped.
    pub barred_links: IntGauge,
}

impl DecisionMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let records = f.counters(
            "decision_log_records_total",
            "Receipts for the decision log on disk: written, left out because the queue was full, or refused by the disk.",
            &["outcome"],
        );
        ["written", "no_room", "disk"].iter().for_each(|outcome| drop(records.with_label_values(&[outcome])));
        let waited = f.histograms(
            "step_waited_seconds",
            "How long steps waited rather than push out others' KV, by what ended it: room, longest, no_place or left.",
            (&["until"], SECONDS),
        );
        Until::VARIANTS.iter().for_each(|until| drop(waited.with_label_values(&[until.as_ref()])));
        let checks = f.counters(
            "correctness_checks_total",
            "Transfers whose KV was held against computing the prompt, by result; no_room where another check was running.",
            &["result"],
        );
        Outcome::VARIANTS.iter().for_each(|outcome| drop(checks.with_label_values(&[outcome.as_ref()])));
        Self {
            outliers: OutlierMetrics::new(f),
            checks,
            barred_links: f.gauge("correctness_barred_links", "Links over which nothing moves, because KV came as something else."),
            waiting: f.gauge("steps_waiting", "Steps that wait rather than push out others' KV."),
            waited,
            records,
            foretold: f.histograms(
                "first_token_by_price_ratio",
                "First-token time by what its price foretold, of steps that one worker served alone.",
                (&["action"], &[0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0]),
            ),
            prefill_speed: f.fractions(
                "worker_prefill_tokens_per_second",
                "Prompt tokens a second that it computes, as learnt from its steps.",
                &["worker"],
            ),
            mispriced: f.gauges(
                "worker_mispriced",
                "1 while its first tokens come later or earlier than prices foretell.",
                &["worker", "off"],
            ),
            guard_ratio: f.fractions(
                "guardrail_first_token_ratio",
                "First-token time of sessions that an action served, by that of the control group; 0 while too few are known.",
                &["action"],
            ),
            guard_sessions: f.gauges(
                "guardrail_sessions",
                "Sessions whose steps are compared, by the action that the planner chose and by arm.",
                &["action", "arm"],
            ),
            reverted: f.gauges(
                "guardrail_reverted",
                "1 while an action is switched off because it made sessions slower.",
                &["action"],
            ),
        }
    }

    /// Forgets workers that are not configured any more.
    pub fn reset(&self) {
        self.prefill_speed.reset();
        self.mispriced.reset();
        self.outliers.ejected.reset();
    }
}
