//! A session in the model of a single ledger: who owns it, and since which epoch.
//!
//! A lease may end between two operations if the lease sightings allow it.

use vocabulary::{Epoch, Owner, SessionId};

use super::linearizability::{self, LinearizabilityVerdict, MAX_POSITIONS, OperationEffect, SequentialModel};
use super::order::describe;
use crate::history::{ClientOperation, LeaseSighting, OwnershipReply, OwnershipRequest, RunInstant, SessionOwner};

/// What is known of a session's epoch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum EpochBound {
    /// The epoch is exactly this one.
    Exactly(Epoch),
    /// The epoch is higher than this one.
    Above(Epoch),
}

impl EpochBound {
    fn lower_bound(self) -> Epoch {
        match self {
            EpochBound::Exactly(epoch) | EpochBound::Above(epoch) => epoch,
        }
    }

    fn may_equal(self, epoch: Epoch) -> bool {
        match self {
            EpochBound::Exactly(at) => at == epoch,
            EpochBound::Above(floor) => epoch > floor,
        }
    }

    /// Returns whether the epoch is, or may be, higher.
    fn may_exceed(self, epoch: Epoch) -> bool {
        match self {
            EpochBound::Exactly(at) => at > epoch,
            EpochBound::Above(_) => true,
        }
    }
}

/// State of a session in the model.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct SessionState {
    owner: Option<Owner>,
    epoch_bound: EpochBound,
}

/// Sequential model of the ledger, as far as these operations need it.
struct LedgerModel<'a> {
    sightings: &'a [LeaseSighting],
}

impl SequentialModel for LedgerModel<'_> {
    type Operation = ClientOperation;
    type State = SessionState;

    fn interval(operation: &ClientOperation) -> (RunInstant, RunInstant) {
        (operation.invoked, operation.completed)
    }

    fn effect(operation: &ClientOperation) -> OperationEffect {
        match operation.answer {
            OwnershipReply::Unavailable => OperationEffect::Nothing,
            // A release is fenced and cannot take effect twice.
            OwnershipReply::Unknown => match operation.asked {
                OwnershipRequest::Read => OperationEffect::Nothing,
                OwnershipRequest::Release { .. } => OperationEffect::UnknownFenced,
                OwnershipRequest::Claim(_) | OwnershipRequest::Migrate { .. } => OperationEffect::Unknown,
            },
            _ => OperationEffect::Answered,
        }
    }

    fn describe(operation: &ClientOperation) -> String {
        describe(operation)
    }

    fn state_after_answer(
        &self,
        state: Option<SessionState>,
        operation: &ClientOperation,
    ) -> Option<Option<SessionState>> {
        let granted = |owner, epoch| SessionState { owner: Some(owner), epoch_bound: EpochBound::Exactly(epoch) };
        let Some(SessionState { owner, epoch_bound: mark }) = state else {
            return Some(match (operation.asked, operation.answer) {
                (
                    OwnershipRequest::Claim(to) | OwnershipRequest::Migrate { to, .. },
                    OwnershipReply::Granted(epoch),
                ) => Some(granted(to, epoch)),
                (OwnershipRequest::Release { seen, .. }, OwnershipReply::Released) => {
                    Some(SessionState { owner: None, epoch_bound: EpochBound::Above(seen) })
                }
                (_, OwnershipReply::Found(SessionOwner { owner, epoch })) => {
                    Some(SessionState { owner, epoch_bound: EpochBound::Exactly(epoch) })
                }
                _ => None,
            });
        };
        let after = match (operation.asked, operation.answer) {
            (OwnershipRequest::Read, OwnershipReply::Found(found)) => {
                let same = found.owner == owner && mark.may_equal(found.epoch);
                // When a lease ends, the ledger removes the owner.
                let ended = found.owner.is_none()
                    && self.may_be_free(state?, Some(found.epoch))
                    && found.epoch > mark.lower_bound();
                (same || ended)
                    .then_some(SessionState { owner: found.owner, epoch_bound: EpochBound::Exactly(found.epoch) })?
            }
            (OwnershipRequest::Claim(to) | OwnershipRequest::Migrate { to, .. }, OwnershipReply::Granted(epoch))
                if owner == Some(to) =>
            {
                mark.may_equal(epoch).then(|| granted(to, epoch))?
            }
            (OwnershipRequest::Claim(to), OwnershipReply::Granted(epoch)) => {
                (self.may_be_free(state?, Some(epoch)) && epoch > mark.lower_bound()).then(|| granted(to, epoch))?
            }
            (OwnershipRequest::Migrate { to, seen }, OwnershipReply::Granted(epoch)) => {
                let is_allowed = mark.may_equal(seen) || self.may_be_free(state?, Some(epoch));
                (is_allowed && epoch > mark.lower_bound()).then(|| granted(to, epoch))?
            }
            (OwnershipRequest::Release { owner: from, seen }, OwnershipReply::Released) => match owner == Some(from) {
                true => mark
                    .may_equal(seen)
                    .then_some(SessionState { owner: None, epoch_bound: EpochBound::Above(seen) })?,
                // Somebody released it before. Epochs prove that: the session's epoch is, or may be, above the one
                // this release had seen.
                false => mark.may_exceed(seen).then_some(state?)?,
            },
            (_, OwnershipReply::Refused) => self.may_refuse(state?, operation).then_some(state?)?,
            _ => state?,
        };
        Some(Some(after))
    }

    fn state_after_unknown(&self, state: Option<SessionState>, operation: &ClientOperation) -> Option<SessionState> {
        let SessionState { owner, epoch_bound: mark } = state?;
        match operation.asked {
            OwnershipRequest::Claim(to) if owner != Some(to) && self.may_be_free(state?, None) => {
                Some(SessionState { owner: Some(to), epoch_bound: EpochBound::Above(mark.lower_bound()) })
            }
            OwnershipRequest::Migrate { to, seen }
                if owner != Some(to) && (mark.may_equal(seen) || self.may_be_free(state?, None)) =>
            {
                Some(SessionState { owner: Some(to), epoch_bound: EpochBound::Above(mark.lower_bound().max(seen)) })
            }
            OwnershipRequest::Release { owner: from, seen } if owner == Some(from) && mark.may_equal(seen) => {
                Some(SessionState { owner: None, epoch_bound: EpochBound::Above(seen) })
            }
            _ => None,
        }
    }
}

impl LedgerModel<'_> {
    /// Returns whether the ledger may have refused the operation and changed nothing. Whether a target accepts
    /// sessions or an owner's lease has ended is not known at every moment; a refusal that needs neither is checked.
    fn may_refuse(&self, state: SessionState, operation: &ClientOperation) -> bool {
        match operation.asked {
            // The session existed before the run and is not deleted within it.
            OwnershipRequest::Read => false,
            OwnershipRequest::Claim(to) if state.owner == Some(to) => self.may_be_free(state, None),
            OwnershipRequest::Release { owner, seen }
                if state == (SessionState { owner: Some(owner), epoch_bound: EpochBound::Exactly(seen) }) =>
            {
                self.may_be_free(state, None)
            }
            OwnershipRequest::Claim(_) | OwnershipRequest::Migrate { .. } | OwnershipRequest::Release { .. } => true,
        }
    }

    /// Returns whether nobody owns the session, or its owner's lease may have ended since the grant, before epoch
    /// `until` if that is known.
    fn may_be_free(&self, state: SessionState, until: Option<Epoch>) -> bool {
        let granted = state.epoch_bound.lower_bound();
        let ended = |owner: Owner| {
            let own = || self.sightings.iter().filter(|seen| seen.worker == owner.worker);
            let held = |until: Epoch| own().any(|seen| seen.shows_held(granted, until));
            own().any(|seen| seen.shows_ended(granted)) && !until.is_some_and(held)
        };
        state.owner.is_none_or(ended)
    }
}

/// Searches for a valid order of one session's operations.
pub(super) fn check_linearizable(
    subject: SessionId,
    operations: &[&ClientOperation],
    sightings: &[LeaseSighting],
) -> LinearizabilityVerdict {
    search(subject, operations, sightings, MAX_POSITIONS)
}

fn search(
    subject: SessionId,
    operations: &[&ClientOperation],
    sightings: &[LeaseSighting],
    most: usize,
) -> LinearizabilityVerdict {
    linearizability::search(
        &LedgerModel { sightings },
        operations,
        (&subject.to_string(), "all operations on a session have one order"),
        most,
    )
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Incarnation, WorkerId};

    use super::*;
    use crate::history::MemberSlot;

    const SUBJECT: SessionId = SessionId(7);
    const A: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    const B: Owner = Owner { worker: WorkerId(2), incarnation: Incarnation(1), rank: DpRank(0) };

    fn at(index: u64) -> Epoch {
        Epoch { generation: 0, index, position: 0 }
    }

    fn op((invoked, completed): (u64, u64), request: OwnershipRequest, reply: OwnershipReply) -> ClientOperation {
        let (invoked, completed) = (RunInstant(invoked), RunInstant(completed));
        ClientOperation {
            client: 1,
            seat: MemberSlot(1),
            subject: SUBJECT,
            asked: request,
            invoked,
            completed,
            answer: reply,
            revision: None,
        }
    }

    fn claim(when: (u64, u64), owner: Owner, reply: OwnershipReply) -> ClientOperation {
        op(when, OwnershipRequest::Claim(owner), reply)
    }

    fn release(when: (u64, u64), owner: Owner, seen: u64, reply: OwnershipReply) -> ClientOperation {
        op(when, OwnershipRequest::Release { owner, seen: at(seen) }, reply)
    }

    fn migrate(when: (u64, u64), to: Owner, seen: u64, reply: OwnershipReply) -> ClientOperation {
        op(when, OwnershipRequest::Migrate { to, seen: at(seen) }, reply)
    }

    fn read(when: (u64, u64), owner: Option<Owner>, index: u64) -> ClientOperation {
        op(when, OwnershipRequest::Read, OwnershipReply::Found(SessionOwner { owner, epoch: at(index) }))
    }

    fn granted(index: u64) -> OwnershipReply {
        OwnershipReply::Granted(at(index))
    }

    fn check_with(operations: &[ClientOperation], sightings: &[LeaseSighting]) -> LinearizabilityVerdict {
        check_linearizable(SUBJECT, &operations.iter().collect::<Vec<_>>(), sightings)
    }

    fn assert_linearizable(operations: &[ClientOperation]) {
        assert_eq!(check_with(operations, &[]), LinearizabilityVerdict::Linearizable);
    }

    fn assert_not_linearizable(operations: &[ClientOperation]) {
        let verdict = check_with(operations, &[]);
        assert!(matches!(verdict, LinearizabilityVerdict::Broken(_)), "{verdict:?}");
    }

    #[test]
    fn a_sequential_history_of_the_ledger_is_linearizable() {
        assert_linearizable(&[
            read((0, 1), None, 1),
            claim((2, 3), A, granted(5)),
            claim((4, 5), B, OwnershipReply::Refused),
            claim((6, 7), A, granted(5)),
            migrate((8, 9), B, 5, granted(9)),
            release((10, 11), A, 5, OwnershipReply::Released),
            release((12, 13), B, 9, OwnershipReply::Released),
            read((14, 15), None, 11),
            claim((16, 17), B, granted(14)),
        ]);
        assert_linearizable(&[]);
    }

    #[test]
    fn concurrent_operations_may_be_in_either_order_but_only_in_one() {
        let (claimed, found) = (claim((0, 10), A, granted(5)), read((0, 10), None, 1));
        assert_linearizable(&[claimed, found]);
        assert_linearizable(&[claimed, read((0, 10), Some(A), 5)]);
        // Two readers that see the change in opposite order.
        let before = |when| read(when, None, 1);
        let after = |when| read(when, Some(A), 5);
        assert_not_linearizable(&[claim((0, 30), A, granted(5)), after((1, 5)), before((6, 10))]);
        assert_linearizable(&[claim((0, 30), A, granted(5)), before((1, 5)), after((6, 10))]);
    }

    #[test]
    fn a_stale_read_is_not_linearizable() {
        assert_not_linearizable(&[claim((0, 1), A, granted(5)), read((2, 3), None, 1)]);
        assert_not_linearizable(&[
            read((0, 1), Some(A), 5),
            release((2, 3), A, 5, OwnershipReply::Released),
            read((4, 5), Some(A), 5),
        ]);
    }

    #[test]
    fn a_lost_write_is_not_linearizable() {
        assert_not_linearizable(&[read((0, 1), None, 1), claim((2, 3), A, granted(5)), claim((4, 5), B, granted(9))]);
        assert_not_linearizable(&[
            claim((0, 1), A, granted(5)),
            migrate((2, 3), B, 5, granted(9)),
            read((4, 5), Some(A), 5),
        ]);
    }

    #[test]
    fn two_grants_of_an_exclusive_owner_are_not_linearizable() {
        let first = migrate((2, 10), B, 5, granted(9));
        let second = release((2, 10), A, 5, OwnershipReply::Released);
        // The release found the session already free, or the migration found no owner.
        assert_linearizable(&[claim((0, 1), A, granted(5)), first, second]);
        assert_not_linearizable(&[
            claim((0, 1), A, granted(5)),
            claim((2, 10), B, granted(9)),
            read((11, 12), Some(B), 9),
        ]);
    }

    #[test]
    fn a_falling_epoch_is_not_linearizable() {
        assert_not_linearizable(&[release((0, 1), A, 9, OwnershipReply::Released), claim((2, 3), A, granted(7))]);
        assert_not_linearizable(&[migrate((0, 1), A, 2, granted(9)), migrate((2, 3), B, 9, granted(8))]);
    }

    #[test]
    fn an_unknown_write_may_take_effect_late_or_never() {
        let claimed = claim((0, 1), A, granted(5));
        let lost = release((2, 3), A, 5, OwnershipReply::Unknown);
        assert_linearizable(&[claimed, lost, read((20, 21), Some(A), 5), read((30, 31), None, 8)]);
        assert_linearizable(&[claimed, lost, read((20, 21), Some(A), 5), migrate((30, 31), B, 5, granted(9))]);
        // It takes effect not before its request, not twice, and with no other result.
        assert_not_linearizable(&[claimed, read((2, 3), None, 8), release((10, 11), A, 5, OwnershipReply::Unknown)]);
        let again = claim((40, 41), A, granted(9));
        assert_not_linearizable(&[claimed, lost, read((30, 31), None, 8), again, read((50, 51), None, 12)]);
        assert_not_linearizable(&[claimed, lost, read((30, 31), Some(B), 8)]);
        let moved = migrate((2, 3), B, 5, OwnershipReply::Unknown);
        assert_linearizable(&[
            claimed,
            moved,
            read((30, 31), Some(B), 8),
            release((40, 41), B, 8, OwnershipReply::Released),
        ]);
        assert_linearizable(&[
            release((0, 1), A, 5, OwnershipReply::Released),
            claim((2, 3), B, OwnershipReply::Unknown),
            read((4, 5), Some(B), 9),
        ]);
    }

    #[test]
    fn an_unavailable_or_refused_write_has_no_effect() {
        assert_not_linearizable(&[
            claim((0, 1), A, granted(5)),
            release((2, 3), A, 5, OwnershipReply::Unavailable),
            read((4, 5), None, 8),
        ]);
        assert_not_linearizable(&[
            claim((0, 1), A, granted(5)),
            release((2, 3), A, 5, OwnershipReply::Refused),
            read((4, 5), None, 8),
        ]);
    }

    #[test]
    fn an_owner_is_replaced_only_after_its_lease_may_have_ended() {
        let operations = [claim((0, 1), A, granted(5)), claim((2, 3), B, granted(9)), read((4, 5), Some(B), 9)];
        let lease = |granted, is_live| LeaseSighting { worker: A.worker, granted: at(granted), is_live, revision: 20 };
        assert_not_linearizable(&operations);
        assert!(matches!(check_with(&operations, &[lease(2, true)]), LinearizabilityVerdict::Broken(_)));
        assert_eq!(check_with(&operations, &[lease(2, false)]), LinearizabilityVerdict::Linearizable);
        assert_eq!(check_with(&operations, &[lease(8, true)]), LinearizabilityVerdict::Linearizable);
        let swept = [claim((0, 1), A, granted(5)), read((2, 3), None, 7)];
        assert_not_linearizable(&swept);
        assert_eq!(check_with(&swept, &[lease(2, false)]), LinearizabilityVerdict::Linearizable);
    }

    #[test]
    fn what_was_seen_of_a_lease_counts_for_its_own_time_only() {
        let operations = [claim((0, 1), A, granted(50)), claim((2, 3), B, granted(90))];
        let lease =
            |granted, is_live, revision| LeaseSighting { worker: A.worker, granted: at(granted), is_live, revision };
        // An earlier lease had ended before the session was granted.
        assert!(matches!(
            check_with(&operations, &[lease(10, false, 30), lease(40, true, 60)]),
            LinearizabilityVerdict::Broken(_)
        ));
        // The lease was held long after, and ended then.
        let late = [lease(40, true, 95), lease(40, false, 120)];
        assert!(matches!(check_with(&operations, &late), LinearizabilityVerdict::Broken(_)));
        assert_eq!(
            check_with(&operations, &[lease(40, true, 60), lease(40, false, 120)]),
            LinearizabilityVerdict::Linearizable
        );
        let swept = [claim((0, 1), A, granted(50)), read((2, 3), None, 90)];
        assert!(matches!(check_with(&swept, &late), LinearizabilityVerdict::Broken(_)));
    }

    #[test]
    fn a_refusal_needs_a_reason_that_may_have_been() {
        let owned = claim((0, 1), A, granted(5));
        assert_linearizable(&[owned, claim((2, 3), B, OwnershipReply::Refused)]);
        assert_linearizable(&[owned, release((2, 3), A, 3, OwnershipReply::Refused)]);
        assert_linearizable(&[owned, migrate((2, 3), B, 5, OwnershipReply::Refused)]);
        // The owner claims again what it owns, or releases it.
        assert_not_linearizable(&[owned, claim((2, 3), A, OwnershipReply::Refused)]);
        assert_not_linearizable(&[owned, release((2, 3), A, 5, OwnershipReply::Refused)]);
        assert_not_linearizable(&[owned, op((2, 3), OwnershipRequest::Read, OwnershipReply::Refused)]);
        // Of two concurrent operations, the refused one came later.
        assert_linearizable(&[
            owned,
            release((2, 9), A, 5, OwnershipReply::Refused),
            migrate((2, 9), B, 5, granted(8)),
        ]);
        let ended = LeaseSighting { worker: A.worker, granted: at(2), is_live: false, revision: 20 };
        let refused =
            [owned, claim((2, 3), A, OwnershipReply::Refused), release((4, 5), A, 5, OwnershipReply::Refused)];
        assert_eq!(check_with(&refused, &[ended]), LinearizabilityVerdict::Linearizable);
        assert_linearizable(&[claim((0, 1), A, OwnershipReply::Refused), read((2, 3), None, 1)]);
    }

    #[test]
    fn a_search_beyond_its_limit_reports_the_limit() {
        let lost = (0..14).map(|number| {
            migrate((number, number + 1), if number % 2 == 0 { A } else { B }, 1, OwnershipReply::Unknown)
        });
        let mut operations: Vec<ClientOperation> = std::iter::once(read((0, 1), None, 1)).chain(lost).collect();
        operations.push(read((100, 101), None, 1));
        operations.push(read((102, 103), Some(A), 1));
        let all: Vec<&ClientOperation> = operations.iter().collect();
        assert_eq!(search(SUBJECT, &all, &[], 8), LinearizabilityVerdict::Undecided);
        assert_not_linearizable(&operations);
    }

    #[test]
    fn a_long_history_is_searched_quickly() {
        let mut operations = Vec::new();
        for round in 0..5_000 {
            let (when, index) = (100 * round, 10 * round + 5);
            operations.push(claim((when, when + 30), A, granted(index)));
            operations.push(read((when + 10, when + 40), Some(A), index));
            operations.push(migrate((when + 45, when + 70), B, index, granted(index + 2)));
            operations.push(release((when + 72, when + 90), B, index + 2, OwnershipReply::Released));
            if round % 100 == 0 {
                operations.push(release((when + 50, when + 60), A, index, OwnershipReply::Unknown));
            }
        }
        assert_linearizable(&operations);
        operations.push(read((600_000, 600_001), Some(B), 3));
        assert_not_linearizable(&operations);
    }
}
