//! What the directory did, as plain numbers that the router's metrics read.

use std::collections::BTreeMap;

use consensus::AppliedEntry;
use ledger::Outcome;
use parking_lot::Mutex;

use crate::error::SubmitError;

/// Running totals; clones of the directory share them.
#[derive(Debug, Default)]
pub(crate) struct DirectoryCounters(Mutex<DirectoryStats>);

/// A reading of a directory's counters and gauges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DirectoryStats {
    /// Log entries applied since the start.
    pub entries: u64,
    /// Commands applied since the start, those in batches counted one by one.
    pub commands: u64,
    /// Leases renewed since the start.
    pub renewals: u64,
    /// Leases ended since the start.
    pub expired: u64,
    /// Snapshots written since the start.
    pub snapshots: u64,
    /// Commands that wait for their entry.
    pub queue_depth: u64,
    /// Entries in the log that are not applied yet.
    pub apply_lag: u64,
    /// Bytes of log on disk.
    pub log_bytes: u64,
    /// Callers at the address for other nodes that TLS kept out.
    pub tls_refusals: u64,
    /// Calls that were refused there because the caller is no member, or its certificate does not name it.
    pub non_member_calls: u64,
    /// Messages that were not handed to Raft because they name terms or log positions that no sound node names.
    pub implausible: u64,
    /// Attempts to open a file or to begin a thread that failed because the process lacked something, and were repeated.
    pub shortage_retries: u64,
    /// Tasks of this node that ended in a panic and were begun anew.
    pub tasks_ended: BTreeMap<&'static str, u64>,
    /// Commands that the ledger refused, by cause.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Commands that were not taken or whose outcome is unknown, by cause.
    pub failures: BTreeMap<&'static str, u64>,
}

impl DirectoryCounters {
    pub(crate) fn record_applied(&self, applied: &AppliedEntry<'_>) {
        let mut now = self.0.lock();
        now.entries += u64::from(applied.entry.is_some());
        applied.outcomes.iter().for_each(|outcome| now.count_outcome(outcome));
    }

    pub(crate) fn record_failure(&self, error: SubmitError) {
        *self.0.lock().failures.entry(error.cause()).or_default() += 1;
    }

    pub(crate) fn record_lease_end(&self) {
        self.0.lock().expired += 1;
    }

    pub(crate) fn record_snapshot_request(&self) {
        self.0.lock().snapshots += 1;
    }

    pub(crate) fn read(&self) -> DirectoryStats {
        self.0.lock().clone()
    }
}

impl DirectoryStats {
    fn count_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Batch(parts) => return parts.iter().for_each(|part| self.count_outcome(part)),
            Outcome::Renewed { renewed, .. } => self.renewals += u64::from(*renewed),
            Outcome::Refused(refusal) => *self.refusals.entry(refusal.cause()).or_default() += 1,
            _ => {}
        }
        self.commands += 1;
    }
}
