//! Which records an entry changed, for those who watch. No part of the state: neither compared, nor cloned, nor written.

use std::collections::BTreeSet;

use vocabulary::{ArtifactId, NodeId, SessionId, TenantId, WorkerId};

use crate::ledger::Ledger;

/// A record.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Key {
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
pub enum Op {
    /// It was written.
    Put,
    /// It was forgotten.
    Gone,
}

/// A record that an entry changed. A lease that was only renewed and an intent are no change.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Changed {
    /// Which record.
    pub key: Key,
    /// How it is now.
    pub op: Op,
}

/// What the last entry changed.
#[derive(Default, Debug)]
pub(crate) struct Changes(Vec<Changed>);

impl Changes {
    pub(crate) fn put(&mut self, key: Key) {
        self.0.push(Changed { key, op: Op::Put });
    }

    pub(crate) fn gone(&mut self, key: Key) {
        self.0.push(Changed { key, op: Op::Gone });
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl Clone for Changes {
    /// A clone is a view: nobody takes changes from it.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Changes {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Changes {}

impl Ledger {
    /// What the last entry changed, each record once and as it is now, in the order of its last change.
    pub fn take_changes(&mut self) -> Vec<Changed> {
        let changed = self.changed();
        self.changes.clear();
        changed
    }

    /// The same, left in place.
    pub(crate) fn changed(&self) -> Vec<Changed> {
        let mut seen = BTreeSet::new();
        let mut last: Vec<_> = self.changes.0.iter().rev().filter(|change| seen.insert(&change.key)).cloned().collect();
        last.reverse();
        last
    }
}
