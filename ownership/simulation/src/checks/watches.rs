//! Watches: every change exactly once, in the order of revisions, whole revisions, and compaction told.

use std::collections::BTreeMap;

use consensus::{Change, Compacted};
use ledger::{Changed, Key, Op};

use crate::book::{Broken, Checked};
use crate::ensure;

const SAME: &str = "at equal index, every node has the same changes";
const ORDER: &str = "a watch tells every change once, in order, without a gap";
const WHOLE: &str = "a watch tells revisions as a whole";
const COMPACTED: &str = "a watch is cut off only where something is gone, and told where to begin";
const SHOWN: &str = "what a watch tells, the view shows";

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Told {
    pub(crate) revision: u64,
    changes: usize,
}

impl Told {
    /// Somebody who asks for everything from `revision` on.
    pub(crate) fn before(revision: u64) -> Self {
        Self { revision, changes: 0 }
    }
}

#[derive(Debug, Default)]
pub(crate) struct History(BTreeMap<u64, Vec<(Key, Op)>>);

impl History {
    pub(crate) fn applied(&mut self, node: u64, index: u64, changes: &[Changed]) -> Checked {
        let changes: Vec<_> = changes.iter().map(|change| (change.key.clone(), change.op)).collect();
        match self.0.get(&index) {
            Some(first) => ensure!(*first == changes, SAME, "node {node} at {index}: {first:?}, then {changes:?}"),
            None => {
                self.0.insert(index, changes);
                Ok(())
            }
        }
    }

    /// What comes next, if there was anything: the position before it.
    fn next(&self, told: Told) -> Option<(Told, &(Key, Op))> {
        let first = self.0.get(&told.revision).and_then(|all| all.get(told.changes)).map(|change| (told, change));
        let later = || {
            let mut rest = self.0.range(told.revision + 1..);
            rest.find_map(|(revision, all)| all.first().map(|change| (Told::before(*revision), change)))
        };
        first.or_else(later)
    }

    pub(crate) fn tell(&self, who: &str, told: &mut Told, change: &Change) -> Checked {
        let next = self.next(*told);
        let is_next = next
            .is_some_and(|(at, (key, op))| at.revision == change.revision && *key == change.key && *op == change.op);
        ensure!(is_next, ORDER, "{who} was told {change:?}, and next was {next:?}")?;
        *told = next.map_or(*told, |(at, _)| Told { changes: at.changes + 1, ..at });
        Ok(())
    }

    /// Nothing more came at once: then what came was whole revisions.
    pub(crate) fn pause(&self, who: &str, told: &mut Told) -> Checked {
        let all = self.0.get(&told.revision).map_or(0, Vec::len);
        ensure!(told.changes == 0 || told.changes == all, WHOLE, "{who} was told {told:?} of {all} changes")?;
        if told.changes > 0 {
            *told = Told::before(told.revision + 1);
        }
        Ok(())
    }

    /// Whether all that happened up to `index` was told.
    pub(crate) fn is_told(&self, told: Told, index: u64) -> bool {
        self.next(told).is_none_or(|(next, _)| next.revision > index)
    }

    /// Somebody reads along whenever something is published: what the view shows must be there to be told.
    pub(crate) fn check_published(&self, who: &str, told: Told, index: u64) -> Checked {
        ensure!(self.is_told(told, index), ORDER, "{who}: {index} is published, and told is {told:?} only")
    }
}

/// Somebody is cut off by a node that shows `applied`.
pub(crate) fn check_cut(who: &str, told: Told, compacted: Compacted, applied: u64) -> Checked {
    let Compacted { oldest } = compacted;
    ensure!(oldest > told.revision, COMPACTED, "{who} was told {told:?}, and cut off before {oldest}")?;
    ensure!(oldest <= applied + 1, COMPACTED, "{who} is sent to {oldest} by a node that shows {applied}")
}

/// Somebody is told of a revision by a node that shows `applied`.
pub(crate) fn check_shown(who: &str, revision: u64, applied: u64) -> Result<(), Broken> {
    ensure!(revision <= applied, SHOWN, "{who} was told of {revision}, the view shows {applied}")
}

#[cfg(test)]
mod tests {
    use vocabulary::SessionId;

    use super::*;

    fn changed(n: u128) -> Changed {
        Changed { key: Key::Session(SessionId(n)), op: Op::Put }
    }

    fn change(revision: u64, n: u128) -> Change {
        Change { revision, op: Op::Put, key: Key::Session(SessionId(n)) }
    }

    fn history() -> History {
        let mut history = History::default();
        for (index, changes) in [(1, vec![changed(1), changed(2)]), (2, vec![]), (3, vec![changed(3)])] {
            assert_eq!(history.applied(1, index, &changes), Ok(()));
        }
        history
    }

    fn told(from: u64, changes: &[Change]) -> Result<Told, Broken> {
        let (history, mut told) = (history(), Told::before(from));
        changes.iter().try_for_each(|change| history.tell("a watcher", &mut told, change))?;
        history.pause("a watcher", &mut told)?;
        Ok(told)
    }

    #[test]
    fn everything_once_and_in_order_is_fine() {
        let all = told(0, &[change(1, 1), change(1, 2), change(3, 3)]).unwrap();
        assert!(history().is_told(all, 3) && history().check_published("a watcher", all, 3).is_ok());
        assert_eq!(told(2, &[change(3, 3)]).unwrap(), all);
        assert!(!history().is_told(told(0, &[]).unwrap(), 1));
        assert!(history().check_published("a watcher", told(0, &[]).unwrap(), 1).is_err());
    }

    #[test]
    fn gaps_repetitions_parts_and_inventions_are_found() {
        for (from, changes, check) in [
            (0, vec![change(3, 3)], ORDER),
            (0, vec![change(1, 2)], ORDER),
            (0, vec![change(1, 1), change(1, 1)], ORDER),
            (2, vec![change(1, 1)], ORDER),
            (0, vec![change(1, 1), change(1, 2), change(3, 3), change(4, 4)], ORDER),
            (0, vec![change(1, 1)], WHOLE),
        ] {
            assert_eq!(told(from, &changes).unwrap_err().check, check, "{changes:?}");
        }
        assert!(history().applied(2, 3, &[changed(4)]).is_err() && history().applied(2, 3, &[changed(3)]).is_ok());
    }

    #[test]
    fn a_cut_must_have_a_cause_and_a_way_on() {
        let at = Told::before(5);
        assert_eq!(check_cut("a watcher", at, Compacted { oldest: 9 }, 8), Ok(()));
        assert!(check_cut("a watcher", at, Compacted { oldest: 5 }, 8).is_err());
        assert!(check_cut("a watcher", at, Compacted { oldest: 9 }, 7).is_err());
        assert!(check_shown("a watcher", 9, 8).is_err() && check_shown("a watcher", 8, 8).is_ok());
    }
}
