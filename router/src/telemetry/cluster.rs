//! The quorum that keeps the ledger, as this node knows it.

use prometheus::{IntCounter, IntGauge, IntGaugeVec};

use super::families::Families;

/// Refreshed from the directory when scraped.
#[derive(Debug)]
pub struct ClusterMetrics {
    /// `ledger_leads`: 1 where this node leads.
    pub leads: IntGauge,
    /// `ledger_members{standing}`: voters and learners.
    pub members: IntGaugeVec,
    /// `ledger_member_lag_entries{node}`: what each member lacks of the log; only at the leader.
    pub lag: IntGaugeVec,
    /// `ledger_level`: the cluster's feature level.
    pub level: IntGauge,
    /// `ledger_tls_refused_total`: callers at the address for other nodes that TLS kept out.
    pub tls_refused: IntCounter,
}

impl ClusterMetrics {
    pub(super) fn new(f: &Families<'_>) -> Self {
        Self {
            leads: f.gauge("ledger_leads", "1 where this node leads the ledger's quorum."),
            members: f.gauges("ledger_members", "Nodes that keep the ledger, voters and learners.", &["standing"]),
            lag: f.gauges(
                "ledger_member_lag_entries",
                "Log entries that a member lacks; told by the leader.",
                &["node"],
            ),
            level: f.gauge("ledger_level", "Feature level of the ledger's cluster."),
            tls_refused: f.counter(
                "ledger_tls_refused_total",
                "Callers at the address for other nodes that TLS kept out, or that refused this node's certificate.",
            ),
        }
    }
}
