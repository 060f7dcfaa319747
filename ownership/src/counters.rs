//! What the directory did, as plain numbers that the router's metrics read.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use consensus::Applied;
use ledger::{Outcome, Refusal};

use crate::error::SubmitError;

/// Running totals; clones of the directory share them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    entries: AtomicU64,
    commands: AtomicU64,
    renewals: AtomicU64,
    expired: AtomicU64,
    snapshots: AtomicU64,
    refusals: Mutex<BTreeMap<&'static str, u64>>,
    failures: Mutex<BTreeMap<&'static str, u64>>,
}

/// A reading of a directory's counters and gauges.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Readings {
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
    pub strangers: u64,
    /// Commands that the ledger refused, by cause.
    pub refusals: BTreeMap<&'static str, u64>,
    /// Commands that were not taken or whose outcome is unknown, by cause.
    pub failures: BTreeMap<&'static str, u64>,
}

impl Counters {
    pub(crate) fn applied(&self, applied: &Applied<'_>) {
        self.entries.fetch_add(u64::from(applied.entry.is_some()), Relaxed);
        for outcome in applied.outcomes {
            self.count(outcome);
        }
    }

    fn count(&self, outcome: &Outcome) {
        match outcome {
            Outcome::Batch(parts) => return parts.iter().for_each(|part| self.count(part)),
            Outcome::Renewed { renewed, .. } => drop(self.renewals.fetch_add(u64::from(*renewed), Relaxed)),
            Outcome::Refused(refusal) => self.refused(refusal),
            _ => {}
        }
        self.commands.fetch_add(1, Relaxed);
    }

    fn refused(&self, refusal: &Refusal) {
        *self.refusals.lock().unwrap_or_else(PoisonError::into_inner).entry(refusal.cause()).or_default() += 1;
    }

    pub(crate) fn failed(&self, error: SubmitError) {
        *self.failures.lock().unwrap_or_else(PoisonError::into_inner).entry(error.cause()).or_default() += 1;
    }

    pub(crate) fn lease_ended(&self) {
        self.expired.fetch_add(1, Relaxed);
    }

    pub(crate) fn snapshot_asked(&self) {
        self.snapshots.fetch_add(1, Relaxed);
    }

    pub(crate) fn read(&self) -> Readings {
        Readings {
            entries: self.entries.load(Relaxed),
            commands: self.commands.load(Relaxed),
            renewals: self.renewals.load(Relaxed),
            expired: self.expired.load(Relaxed),
            snapshots: self.snapshots.load(Relaxed),
            refusals: self.refusals.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            failures: self.failures.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            ..Readings::default()
        }
    }
}
