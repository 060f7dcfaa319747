//! The records that an entry changed, for watchers. Not part of the state: not compared, cloned or serialized.

use std::collections::BTreeSet;

use vocabulary::{ArtifactId, NodeId, SessionId, TenantId, WorkerId};

use crate::ledger::Ledger;

/// Key of a record.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RecordKey {
    /// A worker and its lease.
    Worker(WorkerId),
    /// A session.
    Session(SessionId),
    /// An artifact.
    Artifact(ArtifactId),
    /// A node of the cluster.
    Node(NodeId),
    /// A tenant's quota.
    Quota(TenantId),
}

/// Kind of change.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ChangeOp {
    /// The record was written.
    Put,
    /// The record was removed.
    Removed,
}

/// A record that an entry changed. Lease renewals and intents do not count as changes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecordUpdate {
    /// Key of the record.
    pub key: RecordKey,
    /// Whether the record exists now.
    pub op: ChangeOp,
}

/// Changes of the last entry.
#[derive(Default, Debug)]
pub(crate) struct EntryChanges(Vec<RecordUpdate>);

impl EntryChanges {
    pub(crate) fn put(&mut self, key: RecordKey) {
        self.0.push(RecordUpdate { key, op: ChangeOp::Put });
    }

    pub(crate) fn gone(&mut self, key: RecordKey) {
        self.0.push(RecordUpdate { key, op: ChangeOp::Removed });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Clone for EntryChanges {
    /// A clone is a read view, so it starts without changes.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for EntryChanges {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for EntryChanges {}

impl Ledger {
    /// Takes the changes of the last entry: each record once, with its final state, in the order of its last change.
    pub fn take_changes(&mut self) -> Vec<RecordUpdate> {
        let changed = self.pending_changes();
        self.changes.clear();
        changed
    }

    /// Returns the same changes without taking them.
    pub(crate) fn pending_changes(&self) -> Vec<RecordUpdate> {
        let mut seen = BTreeSet::new();
        let mut last: Vec<_> = self.changes.0.iter().rev().filter(|change| seen.insert(&change.key)).cloned().collect();
        last.reverse();
        last
    }
}
