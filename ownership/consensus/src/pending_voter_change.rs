//! Detects a voter change that stopped between its two steps, so that the leader can finish it.
//!
//! Voters change through a joint configuration, in which both the old and the new voters decide. If the leader is lost
//! or gives up between the two steps, the joint configuration would stay and every write would need two majorities.

use std::collections::BTreeSet;

use crate::types::{LogId, StoredMembership};

/// Detector of a stalled voter change: the joint configuration that a leader saw one tick ago, if any.
#[derive(Clone, Copy, Debug, Default)]
pub struct StalledChangeDetector(Option<LogId>);

impl StalledChangeDetector {
    /// Returns the voters to finish a change with: those of a joint configuration that is committed and was already
    /// there one tick ago. Called once per tick by the leader; whoever began the change has one tick to finish it.
    pub fn voters_to_finish(
        &mut self,
        effective: &StoredMembership,
        committed: &StoredMembership,
    ) -> Option<BTreeSet<u64>> {
        let configs = effective.membership().get_joint_config();
        let is_committed = effective.log_id() == committed.log_id();
        let joint = effective.log_id().filter(|_| configs.len() > 1 && is_committed);
        let before = std::mem::replace(&mut self.0, joint);
        joint.filter(|joint| before == Some(*joint))?;
        configs.last().cloned()
    }
}

#[cfg(test)]
mod tests {
    use openraft::impls::leader_id_adv::LeaderId;
    use openraft::vote::RaftLeaderIdExt;
    use openraft::{BasicNode, Membership};

    use super::*;

    fn stored(index: u64, configs: &[&[u64]]) -> StoredMembership {
        let configs = configs.iter().map(|voters| voters.iter().copied().collect()).collect();
        let nodes = (1..=5).map(|id| (id, BasicNode::default())).collect::<std::collections::BTreeMap<u64, _>>();
        let log_id = LogId::new(<LeaderId<u64, u64> as RaftLeaderIdExt>::new_committed(1, 1), index);
        StoredMembership::new(Some(log_id), Membership::new(configs, nodes).unwrap())
    }

    #[test]
    fn an_abandoned_joint_configuration_is_finished_after_one_tick() {
        let (joint, uniform) = (stored(7, &[&[1, 2, 3], &[1, 4, 5]]), stored(8, &[&[1, 4, 5]]));
        let mut unfinished = StalledChangeDetector::default();
        assert_eq!(unfinished.voters_to_finish(&joint, &joint), None, "whoever began it may be about to finish it");
        assert_eq!(unfinished.voters_to_finish(&joint, &joint), Some(BTreeSet::from([1, 4, 5])));
        assert_eq!(unfinished.voters_to_finish(&uniform, &uniform), None);
        assert_eq!(unfinished.voters_to_finish(&uniform, &uniform), None);
    }

    #[test]
    fn an_uncommitted_or_changed_joint_configuration_waits() {
        let (before, joint) = (stored(3, &[&[1, 2, 3]]), stored(7, &[&[1, 2, 3], &[1, 4, 5]]));
        let other = stored(9, &[&[1, 4, 5], &[1, 2, 3]]);
        let mut unfinished = StalledChangeDetector::default();
        for _ in 0..3 {
            assert_eq!(unfinished.voters_to_finish(&joint, &before), None);
        }
        assert_eq!(unfinished.voters_to_finish(&joint, &joint), None);
        assert_eq!(unfinished.voters_to_finish(&other, &other), None);
        assert_eq!(unfinished.voters_to_finish(&other, &other), Some(BTreeSet::from([1, 2, 3])));
    }
}
