//! Metrics of the decision log, of predictions compared with observations, and of ejected workers.

use prometheus::{GaugeVec, HistogramVec, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::{SECONDS, families, label_values};
use crate::outliers::EjectionReason;
use crate::receipt::WaitOutcome;
use crate::transfer_check::TransferCheckOutcome;

families! {
    /// Counters are updated when something happens, gauges when scraped; clones share their values.
    #[derive(Clone, Debug)]
    pub struct DecisionMetrics {
        records: IntCounterVec = "decision_log_records_total" {outcome = ["written", "queue_full", "write_failed"]},
            "Receipts for the decision log on disk: written, left out because the queue was full, or refused by the disk.";
        waiting: IntGauge = "admission_queue_depth", "Steps that wait rather than push out others' KV.";
        admission_wait: HistogramVec = "admission_wait_seconds" {outcome = label_values::<WaitOutcome>()} [SECONDS],
            "How long steps waited rather than push out others' KV, by what ended it: admitted, max_wait_reached, queue_full or abandoned.";
        ttft_prediction_ratio: HistogramVec = "ttft_prediction_ratio" {action}
            [&[0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0]],
            "First-token time by its prediction, of steps that one worker served alone.";
        prefill_speed: GaugeVec = "worker_prefill_tokens_per_second" {worker},
            "Prompt tokens a second that it computes, as learnt from its steps.";
        cost_drift: IntGaugeVec = "worker_cost_drift" {worker, direction},
            "1 while its first tokens come later or earlier than predicted.";
        guard_ratio: GaugeVec = "guardrail_ttft_ratio" {action},
            "First-token time of sessions that an action served, by that of the control group; 0 while too few are known.";
        guard_sessions: IntGaugeVec = "guardrail_sessions" {action, arm},
            "Sessions whose steps are compared, by the action that the planner chose and by arm.";
        reverted: IntGaugeVec = "guardrail_action_disabled" {action},
            "1 while an action is disabled because it made sessions slower.";
        checks: IntCounterVec = "transfer_checks_total" {outcome = label_values::<TransferCheckOutcome>()},
            "Transfers whose KV was held against computing the prompt, by outcome; skipped where another check was running.";
        disabled_links: IntGauge = "transfer_links_disabled",
            "Links over which nothing moves, because KV came as something else.";
        + outliers: OutlierMetrics, "Workers that are left out because requests failed there.";
    }
}

families! {
    /// Workers that are ejected because requests failed there.
    #[derive(Clone, Debug)]
    pub struct OutlierMetrics {
        ejections: IntCounterVec = "worker_ejections_total" {reason = label_values::<EjectionReason>()},
            "Workers that were left out for a while because requests failed there, by why: consecutive_failures, \
             failure_percentage or trial_failed.";
        ejected: IntGaugeVec = "worker_ejected" {worker},
            "1 while no requests but trials go there because requests failed there.";
    }
}

impl DecisionMetrics {
    /// Resets the series of all workers, so that those that are no longer configured disappear.
    pub fn reset(&self) {
        self.prefill_speed.reset();
        self.cost_drift.reset();
        self.outliers.ejected.reset();
    }
}
