//! Metrics of the exchange between routers, and of commits that the ledger does not have yet.

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::families;

families! {
    /// Metrics of the exchange between routers.
    #[derive(Clone, Debug)]
    pub struct ExchangeMetrics {
        tables: IntCounterVec = "exchange_tables_total" {outcome},
            "Tables of requests in flight between routers, by outcome.";
        table_age: GaugeVec = "exchange_table_age_seconds" {router},
            "Age of the newest table of each other router that is heard.";
        residency_snapshots: IntCounterVec = "residency_imprints_total" {outcome},
            "Imprints of what engines hold between routers, by outcome.";
        // Rare, so the series exist from the start; otherwise there would be nothing to see before the first use.
        prompts: IntCounterVec = "exchange_prompts_total" {outcome = ["lent", "borrowed", "not_known", "no_room"]},
            "Prompts between routers, for moving a session's blocks by hand, by outcome.";
        exact_seconds: Gauge = "residency_exact_seconds",
            "From the start until the blocks of every worker were known exactly; 0 until then.";
        pending_commits: IntGauge = "unapplied_sessions", "Sessions whose last step the ledger has not answered for.";
        dropped_commits: IntCounter = "unapplied_dropped_total", "Sessions whose last step was never told to the ledger.";
        ledger_faults: IntGaugeVec = "ledger_trouble" {kind}, "1 for what is wrong with this node's ledger.";
    }
}
