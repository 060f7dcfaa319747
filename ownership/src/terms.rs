//! Plausibility of terms and log positions in other nodes' messages.
//!
//! Raft increments terms by one and persists the highest term that it hears. One absurdly high term, kept by a
//! majority, would make elections impossible for good.

use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, StreamAppendError, StreamAppendResult,
    TransferLeaderRequest, VoteRequest, VoteResponse,
};

use vocabulary::NodeId;

use crate::raft::{LogId, TokioTypeConfig, Vote};

/// Maximum term and log index that are accepted. No real cluster comes near it.
pub(crate) const MAX_TERM: u64 = 1 << 62;

/// Maximum distance of a term from this node's own: one election per second for twelve days.
pub(crate) const MAX_TERM_JUMP: u64 = 1 << 20;

/// Why a message is implausible: no correct node would send it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(crate) enum ImplausibleMessage {
    #[error(
        "term {term} is more than {MAX_TERM_JUMP} beyond {own}, the term here, or above {MAX_TERM}; it is not believed"
    )]
    Term { term: u64, own: u64 },
    #[error("entry {0} of the log is above {MAX_TERM}; it is not believed")]
    Index(u64),
    #[error("it speaks for node {0}, and not for who sent it")]
    Other(u64),
    #[error("entry {index} of the log does not follow entry by entry; {expected} is next; it is not believed")]
    Gap { index: u64, expected: u64 },
    #[error("entry {index} of the log is of term {term}, and its neighbours or its leader are not; it is not believed")]
    EntryTerm { index: u64, term: u64 },
}

/// Terms and log positions in a Raft message.
pub(crate) trait MessagePositions {
    /// Returns every term and log position, as `(term, index)`; a vote has no index.
    fn log_positions(&self) -> Vec<(u64, Option<u64>)>;
}

fn vote_position(vote: &Vote) -> (u64, Option<u64>) {
    (vote.leader_id.term, None)
}

fn log_position(id: &LogId) -> (u64, Option<u64>) {
    (id.committed_leader_id().term, Some(id.index))
}

impl MessagePositions for Vote {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        vec![vote_position(self)]
    }
}

impl MessagePositions for VoteRequest<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        [vote_position(&self.vote)].into_iter().chain(self.last_log_id.iter().map(log_position)).collect()
    }
}

impl MessagePositions for AppendEntriesRequest<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        let entries = self.entries.iter().map(|entry| log_position(&entry.log_id));
        let others = self.prev_log_id.iter().chain(&self.leader_commit).map(log_position);
        [vote_position(&self.vote)].into_iter().chain(others).chain(entries).collect()
    }
}

impl MessagePositions for TransferLeaderRequest<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        [vote_position(self.from_leader())].into_iter().chain(self.last_log_id().map(log_position)).collect()
    }
}

impl MessagePositions for VoteResponse<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        [vote_position(&self.vote)].into_iter().chain(self.last_log_id.iter().map(log_position)).collect()
    }
}

impl MessagePositions for AppendEntriesResponse<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        match self {
            AppendEntriesResponse::HigherVote(vote) => vec![vote_position(vote)],
            AppendEntriesResponse::PartialSuccess(matched) => matched.iter().map(log_position).collect(),
            AppendEntriesResponse::Success | AppendEntriesResponse::Conflict => Vec::new(),
        }
    }
}

impl MessagePositions for StreamAppendResult<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        match self {
            Ok(matched) => matched.iter().map(log_position).collect(),
            Err(StreamAppendError::Conflict(at)) => vec![log_position(at)],
            Err(StreamAppendError::HigherVote(vote)) => vec![vote_position(vote)],
        }
    }
}

impl MessagePositions for SnapshotResponse<TokioTypeConfig> {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        vec![vote_position(&self.vote)]
    }
}

/// Header of a snapshot: the sender's vote, and the snapshot's log position.
impl MessagePositions for (Vote, Option<LogId>) {
    fn log_positions(&self) -> Vec<(u64, Option<u64>)> {
        [vote_position(&self.0)].into_iter().chain(self.1.iter().map(log_position)).collect()
    }
}

/// Refuses a vote of a leader or a candidate other than the sender. Pure.
pub(crate) fn check_sender(from: NodeId, vote: &Vote) -> Result<(), ImplausibleMessage> {
    let node = vote.leader_id.node_id;
    if node == from.0 { Ok(()) } else { Err(ImplausibleMessage::Other(node)) }
}

/// Returns the term to which a message is compared. A new node has seen no term yet, so it accepts the current term of
/// the cluster that admitted it. Pure.
pub(crate) fn beside(own: u64, is_new: bool) -> u64 {
    if is_new { MAX_TERM } else { own }
}

/// Refuses a message with implausible terms or positions, at a node of term `own`. Pure.
pub(crate) fn check(own: u64, message: &impl MessagePositions) -> Result<(), ImplausibleMessage> {
    for (term, index) in message.log_positions() {
        if term > MAX_TERM || term > own.saturating_add(MAX_TERM_JUMP) {
            return Err(ImplausibleMessage::Term { term, own });
        }
        if let Some(index) = index.filter(|index| *index > MAX_TERM) {
            return Err(ImplausibleMessage::Index(index));
        }
    }
    Ok(())
}

/// Refuses entries that leave a gap behind the entry before them, or whose terms fall or exceed the leader's. The log would
/// refuse them as it refuses a broken disk, and the node would stop. Pure.
pub(crate) fn check_sequence(request: &AppendEntriesRequest<TokioTypeConfig>) -> Result<(), ImplausibleMessage> {
    let (mut lowest_term, mut expected) =
        request.prev_log_id.as_ref().map_or((0, 0), |id| (id.committed_leader_id().term, id.index.saturating_add(1)));
    for (term, index) in
        request.entries.iter().map(|entry| (entry.log_id.committed_leader_id().term, entry.log_id.index))
    {
        if index != expected {
            return Err(ImplausibleMessage::Gap { index, expected });
        }
        if term < lowest_term || term > request.vote.leader_id.term {
            return Err(ImplausibleMessage::EntryTerm { index, term });
        }
        (lowest_term, expected) = (term, index.saturating_add(1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use openraft::entry::RaftEntry as _;
    use openraft::type_config::alias::LeaderIdOf;
    use openraft::vote::RaftLeaderIdExt;

    use super::*;
    use crate::raft::LogEntry;

    fn vote(term: u64) -> VoteRequest<TokioTypeConfig> {
        VoteRequest::new(Vote::new(term, 2), None)
    }

    #[test]
    fn a_jump_beyond_reachable_terms_is_implausible() {
        for (own, term) in [(0, 0), (0, MAX_TERM_JUMP), (7, 3), (9, 9 + MAX_TERM_JUMP), (MAX_TERM - 1, MAX_TERM)] {
            assert_eq!(check(own, &vote(term)), Ok(()), "{own} {term}");
        }
        for (own, term) in [(0, MAX_TERM_JUMP + 1), (9, u64::MAX), (MAX_TERM, MAX_TERM + 1), (u64::MAX, u64::MAX)] {
            assert_eq!(check(own, &vote(term)), Err(ImplausibleMessage::Term { term, own }));
        }
    }

    #[test]
    fn a_new_node_believes_every_term_that_elections_may_reach() {
        assert!(check(beside(0, false), &vote(MAX_TERM_JUMP + 1)).is_err());
        assert_eq!(check(beside(0, true), &vote(MAX_TERM)), Ok(()));
        assert!(check(beside(0, true), &vote(MAX_TERM + 1)).is_err());
    }

    #[test]
    fn entries_follow_each_other_in_index_and_term_up_to_the_leaders() {
        let at = |term, index| LogId::new(LeaderIdOf::<TokioTypeConfig>::new_committed(term, 2), index);
        let append = |prev: Option<(u64, u64)>, entries: &[(u64, u64)]| AppendEntriesRequest::<TokioTypeConfig> {
            vote: Vote::new(5, 2),
            prev_log_id: prev.map(|(term, index)| at(term, index)),
            entries: entries.iter().map(|(term, index)| LogEntry::new_blank(at(*term, *index))).collect(),
            leader_commit: None,
        };
        for sound in [
            append(None, &[]),
            append(None, &[(0, 0), (1, 1)]),
            append(Some((3, 7)), &[(3, 8), (5, 9), (5, 10)]),
            append(Some((5, 7)), &[]),
        ] {
            assert_eq!(check_sequence(&sound), Ok(()), "{sound:?}");
        }
        let gap = |index, expected| Err(ImplausibleMessage::Gap { index, expected });
        assert_eq!(check_sequence(&append(None, &[(1, 3)])), gap(3, 0));
        assert_eq!(check_sequence(&append(Some((1, 7)), &[(1, 8), (1, 10)])), gap(10, 9));
        assert_eq!(check_sequence(&append(Some((1, 7)), &[(1, 7)])), gap(7, 8));
        let term = |index, term| Err(ImplausibleMessage::EntryTerm { index, term });
        assert_eq!(check_sequence(&append(Some((3, 7)), &[(6, 8)])), term(8, 6));
        assert_eq!(check_sequence(&append(Some((3, 7)), &[(2, 8)])), term(8, 2));
    }

    #[test]
    fn log_positions_have_the_same_bounds_as_terms() {
        let at = |term, index| LogId::new(LeaderIdOf::<TokioTypeConfig>::new_committed(term, 2), index);
        let asks = |last| VoteRequest { last_log_id: Some(last), ..vote(3) };
        assert_eq!(check(3, &asks(at(3, MAX_TERM))), Ok(()));
        assert_eq!(check(3, &asks(at(3, MAX_TERM + 1))), Err(ImplausibleMessage::Index(MAX_TERM + 1)));
        assert!(matches!(check(3, &asks(at(u64::MAX, 1))), Err(ImplausibleMessage::Term { .. })));
        assert!(check(3, &(Vote::new(3, 1), Some(at(u64::MAX, 1)))).is_err());
        let (prev, commit) = (Some(at(3, 1)), Some(at(3, u64::MAX)));
        let append =
            AppendEntriesRequest { vote: Vote::new(3, 1), prev_log_id: prev, entries: vec![], leader_commit: commit };
        assert_eq!(check(3, &append), Err(ImplausibleMessage::Index(u64::MAX)));
    }
}
