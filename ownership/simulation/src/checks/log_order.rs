//! purged <= snapshot <= applied <= committed <= last, on every node at every time, and views never go back.

use std::collections::BTreeMap;

use crate::ensure;
use crate::process::Pid;
use crate::property::PropertyResult;

const ORDER: &str = "purged <= snapshot <= applied <= committed <= last";
const FORWARD: &str = "a view never goes back";
const LEADERS: &str = "a leadership ends with the process that held it";
const RECOVERED: &str = "a restarted node shows what it had committed";
const RESTART: &str = "what a node wrote brings it up again";

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LogProgress {
    pub(crate) purged: u64,
    pub(crate) snapshot: u64,
    pub(crate) applied: u64,
    /// Last entry known to be committed.
    pub(crate) committed: u64,
    pub(crate) last: u64,
}

pub(crate) fn check(node: u64, progress: LogProgress) -> PropertyResult {
    let LogProgress { purged, snapshot, applied, committed, last } = progress;
    let ordered = purged <= snapshot && snapshot <= applied && applied <= committed && committed <= last;
    ensure!(ordered, ORDER, "node {node}: {progress:?}")
}

/// Checks that a restarted node's log reaches from its snapshot to what it had committed.
pub(crate) fn check_restart(node: u64, progress: LogProgress) -> PropertyResult {
    let LogProgress { purged, snapshot, committed, last, .. } = progress;
    ensure!(
        purged <= snapshot,
        RESTART,
        "node {node}: the log was purged up to {purged}, the snapshot ends at {snapshot}"
    )?;
    let end = last.max(snapshot);
    ensure!(committed <= end, RESTART, "node {node}: {committed} was marked committed, the log ends at {end}")
}

/// A leadership: the term and its leader. Two nodes may lead in one term, the second replacing the first.
pub(crate) type TermLeader = (u64, u64);

#[derive(Debug, Default)]
pub(crate) struct LeaderProcessCheck(BTreeMap<TermLeader, Pid>);

impl LeaderProcessCheck {
    pub(crate) fn check(&mut self, leadership: TermLeader, process: Pid) -> PropertyResult {
        let first = *self.0.entry(leadership).or_insert(process);
        ensure!(first == process, LEADERS, "two lives of node {} lead in term {}", leadership.1, leadership.0)
    }
}

/// Checks that a restarted node shows everything that it knew to be committed.
pub(crate) fn check_recovered(node: u64, applied: u64, committed: u64) -> PropertyResult {
    ensure!(committed <= applied, RECOVERED, "node {node} shows {applied}, it had committed {committed}")
}

#[derive(Debug, Default)]
pub(crate) struct MonotonicViewCheck(BTreeMap<(u64, u64), u64>);

impl MonotonicViewCheck {
    pub(crate) fn check(&mut self, life: (u64, u64), applied: u64) -> PropertyResult {
        let before = self.0.insert(life, applied).unwrap_or(0);
        ensure!(before <= applied, FORWARD, "node {} went from {before} to {applied}", life.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_misordered_pair_of_log_marks_is_a_violation() {
        let good = LogProgress { purged: 1, snapshot: 2, applied: 3, committed: 4, last: 5 };
        assert_eq!(check(1, good), Ok(()));
        for bad in [
            LogProgress { purged: 3, ..good },
            LogProgress { snapshot: 4, ..good },
            LogProgress { applied: 5, ..good },
            LogProgress { committed: 6, ..good },
        ] {
            assert_eq!(check(1, bad).unwrap_err().check, ORDER);
        }
    }

    #[test]
    fn a_restarted_log_must_meet_its_snapshot() {
        let good = LogProgress { purged: 3, snapshot: 3, applied: 0, committed: 7, last: 9 };
        assert_eq!(check_restart(1, good), Ok(()));
        assert!(check_restart(1, LogProgress { snapshot: 2, ..good }).is_err());
        assert!(check_restart(1, LogProgress { last: 6, ..good }).is_err());
    }

    #[test]
    fn a_leadership_that_outlives_its_process_is_a_violation() {
        crate::process::reset();
        let (first, second) = (crate::process::begin(0), crate::process::begin(0));
        let mut leaders = LeaderProcessCheck::default();
        assert_eq!(leaders.check((1, 1), first), Ok(()));
        assert_eq!(leaders.check((1, 1), first), Ok(()));
        assert_eq!(leaders.check((1, 2), second), Ok(()));
        assert!(leaders.check((1, 1), second).is_err());
        assert!(check_recovered(1, 4, 5).is_err() && check_recovered(1, 5, 5).is_ok());
    }

    #[test]
    fn a_view_that_goes_back_is_a_violation() {
        let mut views = MonotonicViewCheck::default();
        assert_eq!(views.check((1, 1), 5), Ok(()));
        assert_eq!(views.check((1, 2), 3), Ok(()));
        assert!(views.check((1, 1), 4).is_err());
    }
}
