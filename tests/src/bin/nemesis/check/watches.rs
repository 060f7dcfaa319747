//! Checks watches: changes in order, without gaps or repetitions, across reconnections.

use std::collections::BTreeSet;

use super::violation::GuaranteeViolation;
use crate::history::{ClientOperation, OwnershipReply};

/// A change as reported by a watch.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct WatchedChange {
    /// Index of the entry that made the change.
    pub(crate) revision: u64,
    /// Key that changed.
    pub(crate) key: String,
    /// Kind of change.
    pub(crate) op: String,
}

/// Everything one watcher saw over all its connections.
#[derive(Clone, Default, Debug)]
pub(crate) struct WatcherHistory {
    /// First revision requested, or first one not checked yet.
    pub(crate) from: u64,
    /// Number of earlier changes, already checked and dropped.
    pub(crate) checked: usize,
    /// Changes in order of arrival.
    pub(crate) changes: Vec<WatchedChange>,
    /// Number of reconnections.
    pub(crate) reconnections: u64,
    /// Ranges of revisions (first and last) that no node kept any more when they were requested.
    pub(crate) skipped: Vec<(u64, u64)>,
}

impl WatcherHistory {
    /// Revision to request next.
    pub(crate) fn next_revision(&self) -> u64 {
        let told = self.changes.last().map(|change| change.revision);
        let skipped = self.skipped.last().map(|(_, last)| *last);
        told.max(skipped).map_or(self.from, |last| last + 1)
    }

    /// Continues at a later revision because no node keeps the earlier ones.
    pub(crate) fn skip_to(&mut self, oldest: u64) {
        let next = self.next_revision();
        if oldest > next {
            self.skipped.push((next, oldest - 1));
        }
    }

    fn covers(&self, revision: u64) -> bool {
        revision >= self.from && !self.skipped.iter().any(|(first, last)| (*first..=*last).contains(&revision))
    }

    /// Drops changes up to `revision`, which have been checked.
    pub(crate) fn forget_checked(&mut self, revision: u64) {
        let before = self.changes.len();
        self.changes.retain(|change| change.revision > revision);
        self.checked += before - self.changes.len();
        self.from = self.from.max(revision + 1);
    }

    /// Returns whether everything up to `revision` was received.
    pub(crate) fn has_received(&self, revision: u64) -> bool {
        self.next_revision() > revision
    }

    /// Checks that revisions never decrease and nothing is repeated.
    pub(crate) fn check_order(&self) -> Vec<GuaranteeViolation> {
        let mut broken = Vec::new();
        let falls = self.changes.windows(2).find(|pair| pair[1].revision < pair[0].revision);
        if let Some(pair) = falls {
            let detail = format!("{:?} came before {:?}", pair[0], pair[1]);
            broken.push(GuaranteeViolation { guarantee: "a watch is ordered", detail });
        }
        if let Some(early) = self.changes.iter().find(|change| change.revision < self.from) {
            let detail = format!("{early:?} came, though all before {} was told or not asked for", self.from);
            broken.push(GuaranteeViolation { guarantee: "a watch tells each change once", detail });
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.changes.iter().find(|change| !seen.insert((change.revision, &change.key))) {
            broken.push(GuaranteeViolation {
                guarantee: "a watch tells each change once",
                detail: format!("{twice:?} came again"),
            });
        }
        broken
    }

    /// Checks that the watcher received every grant that a client was told of, up to what it has seen or should have
    /// seen.
    pub(crate) fn check_no_gap(&self, operations: &[ClientOperation], due: u64) -> Vec<GuaranteeViolation> {
        let upto = due.max(self.next_revision().saturating_sub(1));
        let told: BTreeSet<(u64, &str)> = self.changes.iter().map(|it| (it.revision, it.key.as_str())).collect();
        let missing = operations.iter().find_map(|operation| {
            let OwnershipReply::Granted(epoch) = operation.answer else { return None };
            let watched = self.covers(epoch.index) && epoch.index <= upto;
            let key = operation.subject.to_string();
            (watched && !told.contains(&(epoch.index, key.as_str()))).then_some((epoch, key))
        });
        let detail = |(epoch, key)| format!("{key} was granted at {epoch}, of which the watch says nothing");
        missing
            .map(|missing| GuaranteeViolation { guarantee: "a watch has no gap", detail: detail(missing) })
            .into_iter()
            .collect()
    }

    /// Checks that two watchers saw the same, whatever nodes they were connected to.
    pub(crate) fn check_equal(&self, other: &WatcherHistory) -> Vec<GuaranteeViolation> {
        let before = self.next_revision().min(other.next_revision());
        let both = |revision: u64| revision < before && self.covers(revision) && other.covers(revision);
        let part = |watched: &WatcherHistory| -> BTreeSet<WatchedChange> {
            watched.changes.iter().filter(|change| both(change.revision)).cloned().collect()
        };
        let (own, others) = (part(self), part(other));
        let odd = own.symmetric_difference(&others).next();
        let detail = |odd: &WatchedChange| format!("{odd:?} was told to one of two watchers");
        odd.map(|odd| GuaranteeViolation { guarantee: "all watches tell the same", detail: detail(odd) })
            .into_iter()
            .collect()
    }
}
