//! Watches deliver every change exactly once, in order and in whole revisions, and report compaction.

use std::collections::BTreeMap;

use consensus::{ChangeEvent, CompactedRevision};
use ledger::{ChangeOp, RecordKey, RecordUpdate};

use crate::ensure;
use crate::property::{PropertyResult, PropertyViolation};

const SAME: &str = "at equal index, every node has the same changes";
const ORDER: &str = "a watch tells every change once, in order, without a gap";
const WHOLE: &str = "a watch tells revisions as a whole";
const COMPACTED: &str = "a watch is cut off only where something is gone, and told where to begin";
const SHOWN: &str = "what a watch tells, the view shows";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct WatchProgress {
    pub(crate) revision: u64,
    changes: usize,
}

impl WatchProgress {
    /// Returns the progress of a watcher that asks for everything from `revision` on.
    pub(crate) fn starting_at(revision: u64) -> Self {
        Self { revision, changes: 0 }
    }
}

#[derive(Debug, Default)]
pub(crate) struct ChangeHistory(BTreeMap<u64, Vec<(RecordKey, ChangeOp)>>);

impl ChangeHistory {
    pub(crate) fn on_applied(&mut self, node: u64, index: u64, changes: &[RecordUpdate]) -> PropertyResult {
        let changes: Vec<_> = changes.iter().map(|change| (change.key.clone(), change.op)).collect();
        match self.0.get(&index) {
            Some(first) => ensure!(*first == changes, SAME, "node {node} at {index}: {first:?}, then {changes:?}"),
            None => {
                self.0.insert(index, changes);
                Ok(())
            }
        }
    }

    /// Returns the next expected change and the position before it.
    fn next_change(&self, progress: WatchProgress) -> Option<(WatchProgress, &(RecordKey, ChangeOp))> {
        let first =
            self.0.get(&progress.revision).and_then(|all| all.get(progress.changes)).map(|change| (progress, change));
        let later = || {
            let mut rest = self.0.range(progress.revision + 1..);
            rest.find_map(|(revision, all)| all.first().map(|change| (WatchProgress::starting_at(*revision), change)))
        };
        first.or_else(later)
    }

    pub(crate) fn check_change(
        &self,
        watcher: &str,
        progress: &mut WatchProgress,
        change: &ChangeEvent,
    ) -> PropertyResult {
        let next = self.next_change(*progress);
        let is_next = next
            .is_some_and(|(at, (key, op))| at.revision == change.revision && *key == change.key && *op == change.op);
        ensure!(is_next, ORDER, "{watcher} was told {change:?}, and next was {next:?}")?;
        *progress = next.map_or(*progress, |(at, _)| WatchProgress { changes: at.changes + 1, ..at });
        Ok(())
    }

    /// Checks, when nothing more is available at once, that what was received are whole revisions.
    pub(crate) fn check_whole_revision(&self, watcher: &str, progress: &mut WatchProgress) -> PropertyResult {
        let all = self.0.get(&progress.revision).map_or(0, Vec::len);
        ensure!(
            progress.changes == 0 || progress.changes == all,
            WHOLE,
            "{watcher} was told {progress:?} of {all} changes"
        )?;
        if progress.changes > 0 {
            *progress = WatchProgress::starting_at(progress.revision + 1);
        }
        Ok(())
    }

    /// Returns whether all changes up to `index` were received.
    pub(crate) fn has_received_all(&self, progress: WatchProgress, index: u64) -> bool {
        self.next_change(progress).is_none_or(|(next, _)| next.revision > index)
    }

    /// Checks that a reader of every published change has received everything that the view shows.
    pub(crate) fn check_published(&self, watcher: &str, progress: WatchProgress, index: u64) -> PropertyResult {
        ensure!(
            self.has_received_all(progress, index),
            ORDER,
            "{watcher}: {index} is published, and told is {progress:?} only"
        )
    }
}

/// Checks a compaction error from a node that shows `applied`.
pub(crate) fn check_compaction(
    watcher: &str,
    progress: WatchProgress,
    compacted: CompactedRevision,
    applied: u64,
) -> PropertyResult {
    let CompactedRevision { oldest } = compacted;
    ensure!(oldest > progress.revision, COMPACTED, "{watcher} was told {progress:?}, and cut off before {oldest}")?;
    ensure!(oldest <= applied + 1, COMPACTED, "{watcher} is sent to {oldest} by a node that shows {applied}")
}

/// Checks that a node which delivers a revision shows it in its view.
pub(crate) fn check_shown(watcher: &str, revision: u64, applied: u64) -> Result<(), PropertyViolation> {
    ensure!(revision <= applied, SHOWN, "{watcher} was told of {revision}, the view shows {applied}")
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    fn record_update(n: u128) -> RecordUpdate {
        RecordUpdate { key: RecordKey::Session(SessionId(n)), op: ChangeOp::Put }
    }

    fn change(revision: u64, n: u128) -> ChangeEvent {
        ChangeEvent { revision, op: ChangeOp::Put, key: RecordKey::Session(SessionId(n)) }
    }

    fn history() -> ChangeHistory {
        let mut history = ChangeHistory::default();
        for (index, changes) in
            [(1, vec![record_update(1), record_update(2)]), (2, vec![]), (3, vec![record_update(3)])]
        {
            assert_eq!(history.on_applied(1, index, &changes), Ok(()));
        }
        history
    }

    fn progress_after(from: u64, changes: &[ChangeEvent]) -> Result<WatchProgress, PropertyViolation> {
        let (history, mut progress) = (history(), WatchProgress::starting_at(from));
        changes.iter().try_for_each(|change| history.check_change("a watcher", &mut progress, change))?;
        history.check_whole_revision("a watcher", &mut progress)?;
        Ok(progress)
    }

    #[test]
    fn a_watch_with_each_change_once_in_order_passes() {
        let all = progress_after(0, &[change(1, 1), change(1, 2), change(3, 3)]).unwrap();
        assert!(history().has_received_all(all, 3) && history().check_published("a watcher", all, 3).is_ok());
        assert_eq!(progress_after(2, &[change(3, 3)]).unwrap(), all);
        assert!(!history().has_received_all(progress_after(0, &[]).unwrap(), 1));
        assert!(history().check_published("a watcher", progress_after(0, &[]).unwrap(), 1).is_err());
    }

    #[test]
    fn missing_repeated_partial_and_invented_changes_are_violations() {
        for (from, changes, check) in [
            (0, vec![change(3, 3)], ORDER),
            (0, vec![change(1, 2)], ORDER),
            (0, vec![change(1, 1), change(1, 1)], ORDER),
            (2, vec![change(1, 1)], ORDER),
            (0, vec![change(1, 1), change(1, 2), change(3, 3), change(4, 4)], ORDER),
            (0, vec![change(1, 1)], WHOLE),
        ] {
            assert_eq!(progress_after(from, &changes).unwrap_err().check, check, "{changes:?}");
        }
        assert!(
            history().on_applied(2, 3, &[record_update(4)]).is_err()
                && history().on_applied(2, 3, &[record_update(3)]).is_ok()
        );
    }

    #[test]
    fn a_compacted_watch_needs_a_cause_and_a_resume_revision() {
        let at = WatchProgress::starting_at(5);
        assert_eq!(check_compaction("a watcher", at, CompactedRevision { oldest: 9 }, 8), Ok(()));
        assert!(check_compaction("a watcher", at, CompactedRevision { oldest: 5 }, 8).is_err());
        assert!(check_compaction("a watcher", at, CompactedRevision { oldest: 9 }, 7).is_err());
        assert!(check_shown("a watcher", 9, 8).is_err() && check_shown("a watcher", 8, 8).is_ok());
    }
}
