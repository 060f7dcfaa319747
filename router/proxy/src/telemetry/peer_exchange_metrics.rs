//! Metrics of the exchange between routers, and of commits that the ledger does not have yet.

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::families;

families! {
    /// Metrics of the exchange between routers.
    #[derive(Clone, Debug)]
    pub struct ExchangeMetrics {
        tables: IntCounterVec = "peer_load_reports_total" {outcome},
            "Reports of requests in flight between routers, by outcome.";
        table_age: GaugeVec = "peer_load_report_age_seconds" {router},
            "Age of the newest report of each other router that is heard.";
        residency_snapshots: IntCounterVec = "residency_snapshots_total" {outcome},
            "Snapshots of what engines hold between routers, by outcome.";
        // Seldom asked for: without series from the start there would be nothing to see before.
        prompts: IntCounterVec = "peer_prompt_transfers_total" {outcome = ["sent", "received", "not_found", "busy"]},
            "Prompts between routers, for moving a session's blocks by hand, by outcome.";
        exact_seconds: Gauge = "kv_index_warmup_seconds",
            "From the start until the blocks of every worker were known exactly; 0 until then.";
        pending_commits: IntGauge = "ledger_pending_commit_sessions",
            "Sessions whose last step the ledger has not answered for.";
        dropped_commits: IntCounter = "ledger_pending_commits_dropped_total",
            "Sessions whose last step was never told to the ledger.";
        ledger_faults: IntGaugeVec = "ledger_degraded" {reason}, "1 for what is wrong with this node's ledger.";
    }
}
