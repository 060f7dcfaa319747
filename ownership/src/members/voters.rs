//! Rules for valid sets of voters. Pure.

use std::collections::BTreeSet;

use vocabulary::NodeId;

use crate::members::{MemberChange, MemberError};

/// Returns the voters after a change, or why it is refused. `members` are all nodes, including voters.
pub(crate) fn next_voters(
    voters: &BTreeSet<NodeId>,
    members: &BTreeSet<NodeId>,
    change: &MemberChange,
) -> Result<BTreeSet<NodeId>, MemberError> {
    let mut next = voters.clone();
    match change {
        MemberChange::Promote(nodes) => {
            for node in nodes {
                promote(&mut next, members, *node)?;
            }
        }
        MemberChange::Demote(nodes) => {
            for node in nodes {
                demote(&mut next, members, *node)?;
            }
        }
        MemberChange::Replace { old, new } if old == new => return Err(MemberError::AlreadyVoter(*new)),
        MemberChange::Replace { old, new } => {
            demote(&mut next, members, *old)?;
            promote(&mut next, members, *new)?;
        }
        MemberChange::Remove(node) => {
            check_member(members, *node)?;
            if voters.contains(node) {
                return Err(MemberError::StillVoter(*node));
            }
        }
        MemberChange::TransferLeader(node) => {
            check_member(members, *node)?;
            if !voters.contains(node) {
                return Err(MemberError::NotVoter(*node));
            }
        }
        MemberChange::RaiseLevel(_) => {}
    }
    match next.len() {
        1 | 3 | 5 => Ok(next),
        // A set that does not change is not judged, so that a cluster with an unusual one can still transfer and
        // shrink.
        _ if next == *voters => Ok(next),
        voters => Err(MemberError::VoterCount { voters }),
    }
}

fn check_member(members: &BTreeSet<NodeId>, node: NodeId) -> Result<(), MemberError> {
    if members.contains(&node) { Ok(()) } else { Err(MemberError::Unknown(node)) }
}

fn promote(voters: &mut BTreeSet<NodeId>, members: &BTreeSet<NodeId>, node: NodeId) -> Result<(), MemberError> {
    check_member(members, node)?;
    if voters.insert(node) { Ok(()) } else { Err(MemberError::AlreadyVoter(node)) }
}

fn demote(voters: &mut BTreeSet<NodeId>, members: &BTreeSet<NodeId>, node: NodeId) -> Result<(), MemberError> {
    check_member(members, node)?;
    if voters.remove(&node) { Ok(()) } else { Err(MemberError::NotVoter(node)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(ids: &[u64]) -> BTreeSet<NodeId> {
        ids.iter().copied().map(NodeId).collect()
    }

    fn check(voters: &[u64], change: MemberChange) -> Result<Vec<u64>, MemberError> {
        let next = next_voters(&nodes(voters), &nodes(&[1, 2, 3, 4, 5, 6]), &change)?;
        Ok(next.into_iter().map(|node| node.0).collect())
    }

    #[test]
    fn one_voter_becomes_three_and_three_become_five_in_one_step() {
        assert_eq!(check(&[1], MemberChange::Promote(nodes(&[2, 3]))), Ok(vec![1, 2, 3]));
        assert_eq!(check(&[1, 2, 3], MemberChange::Promote(nodes(&[4, 5]))), Ok(vec![1, 2, 3, 4, 5]));
        assert_eq!(check(&[1, 2, 3], MemberChange::Demote(nodes(&[2, 1]))), Ok(vec![3]));
    }

    #[test]
    fn even_zero_and_more_than_five_voters_are_refused_with_the_reason() {
        let refused = |voters: &[u64], change| check(voters, change).unwrap_err();
        let two = refused(&[1], MemberChange::Promote(nodes(&[2])));
        assert_eq!(two, MemberError::VoterCount { voters: 2 });
        assert!(two.to_string().contains("stop when either is lost"), "{two}");
        let four = refused(&[1, 2, 3], MemberChange::Promote(nodes(&[4])));
        assert_eq!(four, MemberError::VoterCount { voters: 4 });
        assert_eq!(refused(&[1], MemberChange::Demote(nodes(&[1]))), MemberError::VoterCount { voters: 0 });
        let six = refused(&[1, 2, 3, 4, 5], MemberChange::Promote(nodes(&[6])));
        assert_eq!(six, MemberError::VoterCount { voters: 6 });
    }

    #[test]
    fn a_lost_voter_is_replaced_and_a_learner_removed() {
        let replace = MemberChange::Replace { old: NodeId(3), new: NodeId(4) };
        assert_eq!(check(&[1, 2, 3], replace), Ok(vec![1, 2, 4]));
        let itself = MemberChange::Replace { old: NodeId(3), new: NodeId(3) };
        assert_eq!(check(&[1, 2, 3], itself), Err(MemberError::AlreadyVoter(NodeId(3))));
        assert_eq!(check(&[1, 2, 3], MemberChange::Remove(NodeId(4))), Ok(vec![1, 2, 3]));
        assert_eq!(check(&[1, 2, 3], MemberChange::Remove(NodeId(3))), Err(MemberError::StillVoter(NodeId(3))));
        assert_eq!(check(&[1, 2, 3], MemberChange::Remove(NodeId(9))), Err(MemberError::Unknown(NodeId(9))));
    }

    #[test]
    fn only_a_voter_can_lead_and_only_a_learner_can_be_promoted() {
        assert_eq!(check(&[1, 2, 3], MemberChange::TransferLeader(NodeId(2))), Ok(vec![1, 2, 3]));
        let learner = check(&[1, 2, 3], MemberChange::TransferLeader(NodeId(4)));
        assert_eq!(learner, Err(MemberError::NotVoter(NodeId(4))));
        let twice = check(&[1, 2, 3], MemberChange::Promote(nodes(&[2, 4])));
        assert_eq!(twice, Err(MemberError::AlreadyVoter(NodeId(2))));
    }
}
