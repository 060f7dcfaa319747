//! What routers told each other, and what of this router's work the ledger does not know yet.

use prometheus::{Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::families::Families;

/// Routers among themselves.
#[derive(Clone, Debug)]
pub struct ExchangeMetrics {
    /// Tables of requests in flight, by what became of them: told, not_told, heard, old, too_many, unreadable.
    pub tables: IntCounterVec,
    /// Age of the newest table of each router that is heard.
    pub table_age: GaugeVec,
    /// Imprints of what engines hold, by what became of them: lent, borrowed, not_known, or why they were of no use.
    pub imprints: IntCounterVec,
    /// Prompts that blocks were to be moved by, by what became of them: lent, borrowed, not_known, no_room where too many
    /// waited here to be encoded again, or why not.
    pub prompts: IntCounterVec,
    /// From the start until every worker was known exactly; 0 until then.
    pub exact_seconds: Gauge,
    /// Sessions whose last step the ledger has not answered for.
    pub unapplied: IntGauge,
    /// Sessions whose last step was forgotten before that.
    pub dropped: IntCounter,
    /// 1 for what is wrong with this node's ledger: no_quorum, removed, failed, folder_gone.
    pub trouble: IntGaugeVec,
}

impl ExchangeMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        let metrics = Self {
            tables: f.counters(
                "exchange_tables_total",
                "Tables of requests in flight between routers, by outcome.",
                &["outcome"],
            ),
            table_age: f.fractions(
                "exchange_table_age_seconds",
                "Age of the newest table of each other router that is heard.",
                &["router"],
            ),
            imprints: f.counters(
                "residency_imprints_total",
                "Imprints of what engines hold between routers, by outcome.",
                &["outcome"],
            ),
            prompts: f.counters(
                "exchange_prompts_total",
                "Prompts between routers, for moving a session's blocks by hand, by outcome.",
                &["outcome"],
            ),
            exact_seconds: f.fraction(
                "residency_exact_seconds",
                "From the start until the blocks of every worker were known exactly; 0 until then.",
            ),
            unapplied: f.gauge("unapplied_sessions", "Sessions whose last step the ledger has not answered for."),
            dropped: f.counter("unapplied_dropped_total", "Sessions whose last step was never told to the ledger."),
            trouble: f.gauges("ledger_trouble", "1 for what is wrong with this node's ledger.", &["kind"]),
        };
        // Seldom asked for: without this there would be nothing to see before.
        for outcome in ["lent", "borrowed", "not_known", "no_room"] {
            metrics.prompts.with_label_values(&[outcome]).inc_by(0);
        }
        metrics
    }
}
