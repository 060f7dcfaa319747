//! Which records an entry changed, for those who watch. No part of the state: neither compared, nor cloned, nor written.

use std::collections::BTreeSet;

use vocabulary::{ArtifactId, NodeId, SessionId, TenantId, WorkerId};

use crate::ledger::Ledger;

/// A record.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum RecordKey {
    /// A worker and its lease.
    Worker(WorkerId),
    /// A session.
    Session(SessionId),
    /// An extent.
    Artifact(ArtifactId),
    /// A node of the cluster.
    Node(NodeId),
    /// A tenant's quota.
    Quota(TenantId),
}

/// What became of a record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum ChangeOp {
    /// It was written.
    Put,
    /// It was forgotten.
    Removed,
}

/// A record that an entry changed. A lease that was only renewed and an intent are no change.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RecordUpdate {
    /// Which record.
    pub key: RecordKey,
    /// How it is now.
    pub op: ChangeOp,
}

/// What the last entry changed.
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
    /// A clone is a view: nobody takes changes from it.
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
    /// What the last entry changed, each record once and as it is now, in the order of its last change.
    pub fn take_changes(&mut self) -> Vec<RecordUpdate> {
        let changed = self.pending_changes();
        self.changes.clear();
        changed
    }

    /// The same, left in place.
    pub(crate) fn pending_changes(&self) -> Vec<RecordUpdate> {
        let mut seen = BTreeSet::new();
        let mut last: Vec<_> = self.changes.0.iter().rev().filter(|change| seen.insert(&change.key)).cloned().collect();
        last.reverse();
        last
    }
}
