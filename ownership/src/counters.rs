//! Counters and gauges of a ledger node, which the router exports as metrics.

use std::collections::BTreeMap;

use consensus::AppliedEntry;
use ledger::Outcome;
use parking_lot::Mutex;

use crate::error::SubmitError;

/// Running totals of a ledger node, shared by its clones.
#[derive(Debug, Default)]
pub(crate) struct LedgerNodeCounters(Mutex<LedgerNodeStats>);

/// Snapshot of a ledger node's counters and gauges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LedgerNodeStats {
    /// Log entries applied since the start.
    pub entries: u64,
    /// Commands applied since the start; commands in batches count individually.
    pub commands: u64,
    /// Leases renewed since the start.
    pub renewals: u64,
    /// Leases expired since the start.
    pub expired: u64,
    /// Snapshots written since the start.
    pub snapshots: u64,
    /// Commands in the queue that are not in an entry yet.
    pub queue_depth: u64,
    /// Log entries that are not applied yet.
    pub apply_lag: u64,
    /// Bytes of log on disk.
    pub log_bytes: u64,
    /// Connections at the node port that TLS rejected.
    pub tls_refusals: u64,
    /// Calls rejected because the caller is not a member or its certificate does not name it.
    pub non_member_calls: u64,
    /// Messages not passed to Raft because they contain implausible terms or log positions.
    pub implausible: u64,
    /// Retries of opening a file or starting a thread after a resource shortage of the process.
    pub shortage_retries: u64,
    /// Tasks of this node that ended in a panic and were restarted, by name.
    pub tasks_ended: BTreeMap<&'static str, u64>,
    /// Commands that the ledger refused, by cause.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Commands that were not accepted or whose outcome is unknown, by cause.
    pub failures: BTreeMap<&'static str, u64>,
}

impl LedgerNodeCounters {
    pub(crate) fn record_applied(&self, applied: &AppliedEntry<'_>) {
        let mut now = self.0.lock();
        now.entries += u64::from(applied.entry.is_some());
        applied.outcomes.iter().for_each(|outcome| now.count_outcome(outcome));
    }

    pub(crate) fn record_failure(&self, error: SubmitError) {
        *self.0.lock().failures.entry(error.reason()).or_default() += 1;
    }

    pub(crate) fn record_lease_end(&self) {
        self.0.lock().expired += 1;
    }

    pub(crate) fn record_snapshot_request(&self) {
        self.0.lock().snapshots += 1;
    }

    pub(crate) fn read(&self) -> LedgerNodeStats {
        self.0.lock().clone()
    }
}

impl LedgerNodeStats {
    fn count_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Batch(parts) => return parts.iter().for_each(|part| self.count_outcome(part)),
            Outcome::Renewed { renewed, .. } => self.renewals += u64::from(*renewed),
            Outcome::Refused(refusal) => *self.refusals.entry(refusal.reason()).or_default() += 1,
            _ => {}
        }
        self.commands += 1;
    }
}
