//! Limits on how much the ledger holds, and for how long.

use serde::{Deserialize, Serialize};
use smart_default::SmartDefault;
use vocabulary::Micros;

const HOUR: u64 = 3_600_000_000;

/// Limits of every table. Part of the state, so that all nodes agree on them.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, SmartDefault)]
pub struct LedgerLimits {
    /// Workers, including retired ones.
    #[default(4_096)]
    pub workers: u32,
    /// Sessions. Beyond it the session that was idle longest is closed.
    #[default(1 << 20)]
    pub sessions: u32,
    /// Artifacts. Beyond it the coldest unreferenced ones are evicted.
    #[default(1 << 21)]
    pub artifacts: u32,
    /// Heads per session. Beyond it the coldest head is removed.
    #[default(16)]
    pub heads: u32,
    /// Copies per artifact. Beyond it the one that expires first is removed.
    #[default(64)]
    pub replicas: u32,
    /// Sessions with intents.
    #[default(1 << 16)]
    pub intents: u32,
    /// Clients (boots of nodes) that may write.
    #[default(64)]
    pub clients: u32,
    /// Outcomes remembered per client.
    #[default(1_024)]
    pub outcomes: u32,
    /// Commands per batch.
    #[default(1_024)]
    pub batch: u32,
    /// Records that one entry's sweep may touch.
    #[default(64)]
    pub sweep: u32,
    /// How long an idle session is remembered.
    #[default(Micros(24 * HOUR))]
    pub session_idle: Micros,
    /// How long an idle, unreferenced artifact is remembered.
    #[default(Micros(HOUR))]
    pub artifact_idle: Micros,
}

impl LedgerLimits {
    /// Returns whether no limit is lower than in `other`.
    pub fn covers(&self, other: &LedgerLimits) -> bool {
        let counts = |limits: &LedgerLimits| {
            [
                limits.workers,
                limits.sessions,
                limits.artifacts,
                limits.heads,
                limits.replicas,
                limits.intents,
                limits.clients,
                limits.outcomes,
                limits.batch,
                limits.sweep,
            ]
        };
        counts(self).iter().zip(counts(other)).all(|(own, other)| *own >= other)
    }
}
