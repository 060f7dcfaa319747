//! A leader that can commit entries finishes a joint configuration within a few ticks.

use std::collections::BTreeMap;

use crate::checks::log_order::TermLeader;
use crate::ensure;
use crate::property::PropertyResult;

const FINISHED: &str = "whoever leads finishes a change of the voters";

/// Maximum number of checks, four per second, at which a leader has committed more but still has two sets of voters.
const MAX_COMMITS_IN_JOINT: u32 = 60;

/// A leader's own report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LeaderReport {
    pub(crate) leadership: TermLeader,
    /// Entry that made its membership a joint one, if it is.
    pub(crate) joint: Option<u64>,
    /// Last entry that it knows to be committed.
    pub(crate) committed: u64,
}

/// Joint configurations of leaders, and how often each was seen with new commits.
#[derive(Debug, Default)]
pub(crate) struct JointCompletionCheck(BTreeMap<u64, (LeaderReport, u32)>);

impl JointCompletionCheck {
    pub(crate) fn check(&mut self, node: u64, now: Option<LeaderReport>) -> PropertyResult {
        let Some(now) = now.filter(|now| now.joint.is_some()) else {
            self.0.remove(&node);
            return Ok(());
        };
        let before = self.0.get(&node).filter(|(then, _)| (then.leadership, then.joint) == (now.leadership, now.joint));
        let seen = before.map_or(0, |(then, seen)| seen + u32::from(then.committed < now.committed));
        self.0.insert(node, (now, seen));
        ensure!(seen <= MAX_COMMITS_IN_JOINT, FINISHED, "node {node} leads {now:?} with two sets of voters")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_that_commits_but_leaves_a_joint_membership_is_a_violation() {
        let at = |joint, committed| Some(LeaderReport { leadership: (1, 1), joint, committed });
        let mut joints = JointCompletionCheck::default();
        for n in 0..1_000 {
            assert_eq!(joints.check(1, at(Some(7), 9)), Ok(()), "nothing can be committed");
            assert_eq!(joints.check(2, at(None, n)), Ok(()));
            assert_eq!(joints.check(3, at(Some(n), n)), Ok(()), "every one is finished");
        }
        let found = (0..100).position(|n| joints.check(4, at(Some(7), 9 + n)).is_err());
        assert_eq!(found, Some(MAX_COMMITS_IN_JOINT as usize + 1));
    }
}
