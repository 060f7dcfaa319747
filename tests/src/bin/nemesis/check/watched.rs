//! Watches: in order, without a gap, without a repetition, also over reconnections.

use std::collections::BTreeSet;

use super::Broken;
use crate::history::{Answer, Operation};

/// One change as a watch told it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Change {
    /// The entry that made it.
    pub(crate) revision: u64,
    /// What changed.
    pub(crate) key: String,
    /// How.
    pub(crate) op: String,
}

/// What one watcher saw, over all its connections.
#[derive(Clone, Default, Debug)]
pub(crate) struct Watched {
    /// The first revision that it asked for, or that is not checked yet.
    pub(crate) from: u64,
    /// Changes before that, which were checked and forgotten.
    pub(crate) forgotten: usize,
    /// In the order of arrival.
    pub(crate) changes: Vec<Change>,
    /// How often it had to connect again.
    pub(crate) reconnections: u64,
    /// Revisions that no node kept any more when it asked for them: first and last.
    pub(crate) skipped: Vec<(u64, u64)>,
}

impl Watched {
    /// The revision to ask for next.
    pub(crate) fn next(&self) -> u64 {
        let told = self.changes.last().map(|change| change.revision);
        let skipped = self.skipped.last().map(|(_, last)| *last);
        told.max(skipped).map_or(self.from, |last| last + 1)
    }

    /// Goes on at a later revision, because nobody keeps what is before it.
    pub(crate) fn skip_to(&mut self, oldest: u64) {
        let next = self.next();
        if oldest > next {
            self.skipped.push((next, oldest - 1));
        }
    }

    fn covers(&self, revision: u64) -> bool {
        revision >= self.from && !self.skipped.iter().any(|(first, last)| (*first..=*last).contains(&revision))
    }

    /// Forgets what was told up to `revision`, because it is checked.
    pub(crate) fn forget(&mut self, revision: u64) {
        let before = self.changes.len();
        self.changes.retain(|change| change.revision > revision);
        self.forgotten += before - self.changes.len();
        self.from = self.from.max(revision + 1);
    }

    /// Whether everything up to `revision` was told.
    pub(crate) fn has(&self, revision: u64) -> bool {
        self.next() > revision
    }

    /// Revisions never fall, and nothing comes twice.
    pub(crate) fn ordered(&self) -> Vec<Broken> {
        let mut broken = Vec::new();
        let falls = self.changes.windows(2).find(|pair| pair[1].revision < pair[0].revision);
        if let Some(pair) = falls {
            let detail = format!("{:?} came before {:?}", pair[0], pair[1]);
            broken.push(Broken { promise: "a watch is ordered", detail });
        }
        if let Some(early) = self.changes.iter().find(|change| change.revision < self.from) {
            let detail = format!("{early:?} came, though all before {} was told or not asked for", self.from);
            broken.push(Broken { promise: "a watch tells each change once", detail });
        }
        let mut seen = BTreeSet::new();
        if let Some(twice) = self.changes.iter().find(|change| !seen.insert((change.revision, &change.key))) {
            broken.push(Broken { promise: "a watch tells each change once", detail: format!("{twice:?} came again") });
        }
        broken
    }

    /// Every grant that a client was told of, up to what the watcher has seen or should have, was told to the watcher.
    pub(crate) fn gapless(&self, operations: &[Operation], due: u64) -> Vec<Broken> {
        let upto = due.max(self.next().saturating_sub(1));
        let told: BTreeSet<(u64, &str)> = self.changes.iter().map(|it| (it.revision, it.key.as_str())).collect();
        let missing = operations.iter().find_map(|operation| {
            let Answer::Granted(epoch) = operation.answer else { return None };
            let watched = self.covers(epoch.index) && epoch.index <= upto;
            let key = operation.subject.to_string();
            (watched && !told.contains(&(epoch.index, key.as_str()))).then_some((epoch, key))
        });
        let detail = |(epoch, key)| format!("{key} was granted at {epoch}, of which the watch says nothing");
        missing.map(|missing| Broken { promise: "a watch has no gap", detail: detail(missing) }).into_iter().collect()
    }

    /// Two watchers, whatever nodes they were connected to, saw the same.
    pub(crate) fn equal(&self, other: &Watched) -> Vec<Broken> {
        let before = self.next().min(other.next());
        let both = |revision: u64| revision < before && self.covers(revision) && other.covers(revision);
        let part = |watched: &Watched| -> BTreeSet<Change> {
            watched.changes.iter().filter(|change| both(change.revision)).cloned().collect()
        };
        let (own, others) = (part(self), part(other));
        let odd = own.symmetric_difference(&others).next();
        let detail = |odd: &Change| format!("{odd:?} was told to one of two watchers");
        odd.map(|odd| Broken { promise: "all watches tell the same", detail: detail(odd) }).into_iter().collect()
    }
}
