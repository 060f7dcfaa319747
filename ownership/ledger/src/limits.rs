//! How much the ledger holds, and for how long.

use serde::{Deserialize, Serialize};
use vocabulary::Micros;

/// Bounds on every table. Part of the state, so that all nodes agree on them.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Limits {
    /// Workers, retired ones included.
    pub workers: u32,
    /// Sessions; beyond it the one that was idle longest is closed.
    pub sessions: u32,
    /// Extents; beyond it the coldest unreferenced ones go.
    pub artifacts: u32,
    /// Heads of one session; beyond it the coldest goes.
    pub heads: u32,
    /// Copies of one extent; beyond it the one that ends first goes.
    pub replicas: u32,
    /// Sessions with intents.
    pub intents: u32,
    /// Boots of nodes that may write.
    pub clients: u32,
    /// Outcomes remembered for each of them.
    pub outcomes: u32,
    /// Commands in a batch.
    pub batch: u32,
    /// Records that one entry's sweep may touch.
    pub sweep: u32,
    /// How long an untouched session is remembered.
    pub session_idle: Micros,
    /// How long an unreferenced extent is remembered.
    pub artifact_idle: Micros,
}

impl Default for Limits {
    fn default() -> Self {
        const HOUR: Micros = Micros(3_600_000_000);
        Self {
            workers: 4_096,
            sessions: 1 << 20,
            artifacts: 1 << 21,
            heads: 16,
            replicas: 64,
            intents: 1 << 16,
            clients: 64,
            outcomes: 1_024,
            batch: 1_024,
            sweep: 64,
            session_idle: HOUR * 24,
            artifact_idle: HOUR,
        }
    }
}

impl Limits {
    /// Whether no bound is lower than in `other`.
    pub fn holds(&self, other: &Limits) -> bool {
        let counts = |limits: &Limits| {
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
