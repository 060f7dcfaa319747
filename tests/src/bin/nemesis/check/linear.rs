//! Linearizability of a session's whole history: some order of all operations, each between its question and its answer,
//! in which the ledger alone would have given every answer. The search is Wing and Gong's with Lowe's memory, and bounded.
//!
//! A write of which nothing is known may happen at any later time, or never. A lease may end between two operations, where
//! sightings allow it.

use std::collections::HashSet;

use vocabulary::{Epoch, Owner, SessionId};

use super::Broken;
use super::order::told;
use crate::history::{Answer, Asked, At, Holding, Operation, Sighting};

/// Most positions that one session's search looks at.
const MAX_POSITIONS: usize = 400_000;

/// What a search found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// There is such an order.
    Linearizable,
    /// There is none.
    Broken(Broken),
    /// None was found in so many positions; nothing is shown.
    Undecided,
}

/// What is known of a session's epoch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Mark {
    /// It is this one.
    At(Epoch),
    /// It is above this one.
    Above(Epoch),
}

impl Mark {
    fn floor(self) -> Epoch {
        match self {
            Mark::At(epoch) | Mark::Above(epoch) => epoch,
        }
    }

    fn may_be(self, epoch: Epoch) -> bool {
        match self {
            Mark::At(at) => at == epoch,
            Mark::Above(floor) => epoch > floor,
        }
    }

    /// Whether it is above, or may be.
    fn may_be_above(self, epoch: Epoch) -> bool {
        match self {
            Mark::At(at) => at > epoch,
            Mark::Above(_) => true,
        }
    }
}

/// A session as the ledger has it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct State {
    owner: Option<Owner>,
    mark: Mark,
}

/// The ledger alone, as far as these operations reach.
struct Model<'a> {
    sightings: &'a [Sighting],
}

impl Model<'_> {
    /// The state after an operation that was answered like that; none where the ledger would not have given that answer.
    /// Nothing is known of the state before the first.
    fn answered(&self, state: Option<State>, operation: &Operation) -> Option<Option<State>> {
        let granted = |owner, epoch| State { owner: Some(owner), mark: Mark::At(epoch) };
        let Some(State { owner, mark }) = state else {
            return Some(match (operation.asked, operation.answer) {
                (Asked::Claim(to) | Asked::Migrate { to, .. }, Answer::Granted(epoch)) => Some(granted(to, epoch)),
                (Asked::Release { seen, .. }, Answer::Released) => Some(State { owner: None, mark: Mark::Above(seen) }),
                (_, Answer::Found(Holding { owner, epoch })) => Some(State { owner, mark: Mark::At(epoch) }),
                _ => None,
            });
        };
        let after = match (operation.asked, operation.answer) {
            (Asked::Read, Answer::Found(found)) => {
                let same = found.owner == owner && mark.may_be(found.epoch);
                // The owner of an ended lease is taken out.
                let ended =
                    found.owner.is_none() && self.may_be_free(state?, Some(found.epoch)) && found.epoch > mark.floor();
                (same || ended).then_some(State { owner: found.owner, mark: Mark::At(found.epoch) })?
            }
            (Asked::Claim(to) | Asked::Migrate { to, .. }, Answer::Granted(epoch)) if owner == Some(to) => {
                mark.may_be(epoch).then(|| granted(to, epoch))?
            }
            (Asked::Claim(to), Answer::Granted(epoch)) => {
                (self.may_be_free(state?, Some(epoch)) && epoch > mark.floor()).then(|| granted(to, epoch))?
            }
            (Asked::Migrate { to, seen }, Answer::Granted(epoch)) => {
                let is_allowed = mark.may_be(seen) || self.may_be_free(state?, Some(epoch));
                (is_allowed && epoch > mark.floor()).then(|| granted(to, epoch))?
            }
            (Asked::Release { owner: from, seen }, Answer::Released) => match owner == Some(from) {
                true => mark.may_be(seen).then_some(State { owner: None, mark: Mark::Above(seen) })?,
                // Somebody took it away before; the fence says that this was seen to be so, or is.
                false => mark.may_be_above(seen).then_some(state?)?,
            },
            (_, Answer::Refused) => self.may_refuse(state?, operation).then_some(state?)?,
            _ => state?,
        };
        Some(Some(after))
    }

    /// The state after a write of which nothing is known, had it an effect now.
    fn happened(&self, state: Option<State>, operation: &Operation) -> Option<State> {
        let State { owner, mark } = state?;
        match operation.asked {
            Asked::Claim(to) if owner != Some(to) && self.may_be_free(state?, None) => {
                Some(State { owner: Some(to), mark: Mark::Above(mark.floor()) })
            }
            Asked::Migrate { to, seen }
                if owner != Some(to) && (mark.may_be(seen) || self.may_be_free(state?, None)) =>
            {
                Some(State { owner: Some(to), mark: Mark::Above(mark.floor().max(seen)) })
            }
            Asked::Release { owner: from, seen } if owner == Some(from) && mark.may_be(seen) => {
                Some(State { owner: None, mark: Mark::Above(seen) })
            }
            _ => None,
        }
    }

    /// Whether the ledger may have answered no, and so changed nothing. Where a target takes nothing, or an owner's lease is over, is
    /// not known of each moment; what needs neither is.
    fn may_refuse(&self, state: State, operation: &Operation) -> bool {
        match operation.asked {
            // It was there before, and is not forgotten within a run.
            Asked::Read => false,
            Asked::Claim(to) if state.owner == Some(to) => self.may_be_free(state, None),
            Asked::Release { owner, seen } if state == (State { owner: Some(owner), mark: Mark::At(seen) }) => {
                self.may_be_free(state, None)
            }
            Asked::Claim(_) | Asked::Migrate { .. } | Asked::Release { .. } => true,
        }
    }

    /// Nobody has it, or its owner's lease may have ended since, before the epoch `until` where that is known.
    fn may_be_free(&self, state: State, until: Option<Epoch>) -> bool {
        let granted = state.mark.floor();
        let ended = |owner: Owner| {
            let own = || self.sightings.iter().filter(|seen| seen.worker == owner.worker);
            let held = |until: Epoch| own().any(|seen| seen.shows_held(granted, until));
            own().any(|seen| seen.shows_ended(granted)) && !until.is_some_and(held)
        };
        state.owner.is_none_or(ended)
    }
}

/// Where a search stands: what is in order already, and the state after it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Position {
    /// All answered operations before this one are in order.
    first: usize,
    /// And these behind it.
    ahead: Vec<usize>,
    /// Claims and moves of which nothing is known that had an effect.
    happened: Vec<usize>,
    state: Option<State>,
}

impl Position {
    fn is_in_order(&self, at: usize) -> bool {
        at < self.first || self.ahead.binary_search(&at).is_ok()
    }

    fn with(&self, at: usize, state: Option<State>) -> Position {
        let mut next = Position { state, ..self.clone() };
        if let Err(place) = next.ahead.binary_search(&at) {
            next.ahead.insert(place, at);
        }
        while next.ahead.first() == Some(&next.first) {
            next.ahead.remove(0);
            next.first += 1;
        }
        next
    }

    fn after(&self, (at, write): (usize, &Operation), state: State) -> Position {
        let mut next = Position { state: Some(state), ..self.clone() };
        // Its fence keeps a release from happening twice: whether it did makes no other position.
        if !matches!(write.asked, Asked::Release { .. })
            && let Err(place) = next.happened.binary_search(&at)
        {
            next.happened.insert(place, at);
        }
        next
    }
}

/// Searches for an order of one session's operations.
pub(super) fn of_subject(subject: SessionId, operations: &[&Operation], sightings: &[Sighting]) -> Verdict {
    search(subject, operations, &Model { sightings }, MAX_POSITIONS)
}

fn search(subject: SessionId, operations: &[&Operation], model: &Model<'_>, most: usize) -> Verdict {
    let mut known: Vec<&Operation> =
        operations.iter().copied().filter(|one| !matches!(one.answer, Answer::Unavailable | Answer::Unknown)).collect();
    known.sort_by_key(|operation| operation.invoked);
    let unknown: Vec<&Operation> =
        operations.iter().copied().filter(|one| one.answer == Answer::Unknown && one.is_write()).collect();
    let begin = Position { first: 0, ahead: Vec::new(), happened: Vec::new(), state: None };
    let (mut open, mut seen) = (vec![begin.clone()], HashSet::new());
    let mut furthest = begin;
    while let Some(position) = open.pop() {
        if position.first == known.len() {
            return Verdict::Linearizable;
        }
        if !seen.insert(position.clone()) {
            continue;
        }
        if seen.len() > most {
            return Verdict::Undecided;
        }
        if position.first + position.ahead.len() > furthest.first + furthest.ahead.len() {
            furthest = position.clone();
        }
        let (candidates, until) = candidates(&known, &position);
        // The last is looked at first: what was answered goes before what may have happened.
        let writes = unknown
            .iter()
            .enumerate()
            .filter(|(at, write)| write.invoked <= until && position.happened.binary_search(at).is_err());
        let happened =
            writes.filter_map(|(at, write)| Some(position.after((at, write), model.happened(position.state, write)?)));
        open.extend(happened);
        let answered = candidates.into_iter().rev();
        open.extend(answered.filter_map(|at| Some(position.with(at, model.answered(position.state, known[at])?))));
    }
    let stuck = known.get(furthest.first).map_or_else(String::new, |operation| told(operation));
    let detail = format!("{subject}: no order explains that {stuck}, after {:?}", furthest.state);
    Verdict::Broken(Broken { promise: "all operations on a session have one order", detail })
}

/// What may come next, by the time at which the first of the others was answered.
fn candidates(known: &[&Operation], position: &Position) -> (Vec<usize>, At) {
    let mut until = At(u64::MAX);
    let mut found = Vec::new();
    for (at, operation) in known.iter().enumerate().skip(position.first) {
        if operation.invoked > until {
            break;
        }
        if !position.is_in_order(at) {
            until = until.min(operation.completed);
            found.push(at);
        }
    }
    found.retain(|at| known[*at].invoked <= until);
    (found, until)
}

#[cfg(test)]
mod tests {
    use vocabulary::{DpRank, Incarnation, WorkerId};

    use super::*;
    use crate::history::Seat;

    const SUBJECT: SessionId = SessionId(7);
    const A: Owner = Owner { worker: WorkerId(1), incarnation: Incarnation(1), rank: DpRank(0) };
    const B: Owner = Owner { worker: WorkerId(2), incarnation: Incarnation(1), rank: DpRank(0) };

    fn at(index: u64) -> Epoch {
        Epoch { generation: 0, index, position: 0 }
    }

    fn op((invoked, completed): (u64, u64), asked: Asked, answer: Answer) -> Operation {
        let (invoked, completed) = (At(invoked), At(completed));
        Operation { client: 1, seat: Seat(1), subject: SUBJECT, asked, invoked, completed, answer, revision: None }
    }

    fn claim(when: (u64, u64), owner: Owner, answer: Answer) -> Operation {
        op(when, Asked::Claim(owner), answer)
    }

    fn release(when: (u64, u64), owner: Owner, seen: u64, answer: Answer) -> Operation {
        op(when, Asked::Release { owner, seen: at(seen) }, answer)
    }

    fn migrate(when: (u64, u64), to: Owner, seen: u64, answer: Answer) -> Operation {
        op(when, Asked::Migrate { to, seen: at(seen) }, answer)
    }

    fn read(when: (u64, u64), owner: Option<Owner>, index: u64) -> Operation {
        op(when, Asked::Read, Answer::Found(Holding { owner, epoch: at(index) }))
    }

    fn granted(index: u64) -> Answer {
        Answer::Granted(at(index))
    }

    fn check_with(operations: &[Operation], sightings: &[Sighting]) -> Verdict {
        of_subject(SUBJECT, &operations.iter().collect::<Vec<_>>(), sightings)
    }

    fn holds(operations: &[Operation]) {
        assert_eq!(check_with(operations, &[]), Verdict::Linearizable);
    }

    fn fails(operations: &[Operation]) {
        let verdict = check_with(operations, &[]);
        assert!(matches!(verdict, Verdict::Broken(_)), "{verdict:?}");
    }

    #[test]
    fn one_after_the_other_as_the_ledger_does_it() {
        holds(&[
            read((0, 1), None, 1),
            claim((2, 3), A, granted(5)),
            claim((4, 5), B, Answer::Refused),
            claim((6, 7), A, granted(5)),
            migrate((8, 9), B, 5, granted(9)),
            release((10, 11), A, 5, Answer::Released),
            release((12, 13), B, 9, Answer::Released),
            read((14, 15), None, 11),
            claim((16, 17), B, granted(14)),
        ]);
        holds(&[]);
    }

    #[test]
    fn operations_at_once_may_be_in_either_order_but_in_one() {
        let (claimed, found) = (claim((0, 10), A, granted(5)), read((0, 10), None, 1));
        holds(&[claimed, found]);
        holds(&[claimed, read((0, 10), Some(A), 5)]);
        // Two readers that see the change in opposite orders.
        let before = |when| read(when, None, 1);
        let after = |when| read(when, Some(A), 5);
        fails(&[claim((0, 30), A, granted(5)), after((1, 5)), before((6, 10))]);
        holds(&[claim((0, 30), A, granted(5)), before((1, 5)), after((6, 10))]);
    }

    #[test]
    fn a_stale_read_has_no_place() {
        fails(&[claim((0, 1), A, granted(5)), read((2, 3), None, 1)]);
        fails(&[read((0, 1), Some(A), 5), release((2, 3), A, 5, Answer::Released), read((4, 5), Some(A), 5)]);
    }

    #[test]
    fn a_lost_write_has_no_place() {
        fails(&[read((0, 1), None, 1), claim((2, 3), A, granted(5)), claim((4, 5), B, granted(9))]);
        fails(&[claim((0, 1), A, granted(5)), migrate((2, 3), B, 5, granted(9)), read((4, 5), Some(A), 5)]);
    }

    #[test]
    fn two_who_are_both_granted_what_only_one_may_have() {
        let first = migrate((2, 10), B, 5, granted(9));
        let second = release((2, 10), A, 5, Answer::Released);
        // The release found that it was gone, or the migration found nobody.
        holds(&[claim((0, 1), A, granted(5)), first, second]);
        fails(&[claim((0, 1), A, granted(5)), claim((2, 10), B, granted(9)), read((11, 12), Some(B), 9)]);
    }

    #[test]
    fn epochs_never_fall() {
        fails(&[release((0, 1), A, 9, Answer::Released), claim((2, 3), A, granted(7))]);
        fails(&[migrate((0, 1), A, 2, granted(9)), migrate((2, 3), B, 9, granted(8))]);
    }

    #[test]
    fn what_is_not_known_may_have_happened_late_or_never() {
        let claimed = claim((0, 1), A, granted(5));
        let lost = release((2, 3), A, 5, Answer::Unknown);
        holds(&[claimed, lost, read((20, 21), Some(A), 5), read((30, 31), None, 8)]);
        holds(&[claimed, lost, read((20, 21), Some(A), 5), migrate((30, 31), B, 5, granted(9))]);
        // Not before it was asked, not twice, and not with another effect.
        fails(&[claimed, read((2, 3), None, 8), release((10, 11), A, 5, Answer::Unknown)]);
        let again = claim((40, 41), A, granted(9));
        fails(&[claimed, lost, read((30, 31), None, 8), again, read((50, 51), None, 12)]);
        fails(&[claimed, lost, read((30, 31), Some(B), 8)]);
        let moved = migrate((2, 3), B, 5, Answer::Unknown);
        holds(&[claimed, moved, read((30, 31), Some(B), 8), release((40, 41), B, 8, Answer::Released)]);
        holds(&[release((0, 1), A, 5, Answer::Released), claim((2, 3), B, Answer::Unknown), read((4, 5), Some(B), 9)]);
    }

    #[test]
    fn what_was_not_taken_changed_nothing() {
        fails(&[claim((0, 1), A, granted(5)), release((2, 3), A, 5, Answer::Unavailable), read((4, 5), None, 8)]);
        fails(&[claim((0, 1), A, granted(5)), release((2, 3), A, 5, Answer::Refused), read((4, 5), None, 8)]);
    }

    #[test]
    fn an_owner_is_replaced_only_where_its_lease_may_have_ended() {
        let operations = [claim((0, 1), A, granted(5)), claim((2, 3), B, granted(9)), read((4, 5), Some(B), 9)];
        let lease = |granted, is_live| Sighting { worker: A.worker, granted: at(granted), is_live, revision: 20 };
        fails(&operations);
        assert!(matches!(check_with(&operations, &[lease(2, true)]), Verdict::Broken(_)));
        assert_eq!(check_with(&operations, &[lease(2, false)]), Verdict::Linearizable);
        assert_eq!(check_with(&operations, &[lease(8, true)]), Verdict::Linearizable);
        let swept = [claim((0, 1), A, granted(5)), read((2, 3), None, 7)];
        fails(&swept);
        assert_eq!(check_with(&swept, &[lease(2, false)]), Verdict::Linearizable);
    }

    #[test]
    fn what_was_seen_of_a_lease_counts_for_its_own_time_only() {
        let operations = [claim((0, 1), A, granted(50)), claim((2, 3), B, granted(90))];
        let lease = |granted, is_live, revision| Sighting { worker: A.worker, granted: at(granted), is_live, revision };
        // An earlier lease had ended before it was granted the session.
        assert!(matches!(check_with(&operations, &[lease(10, false, 30), lease(40, true, 60)]), Verdict::Broken(_)));
        // It was held long after, and ended then.
        let late = [lease(40, true, 95), lease(40, false, 120)];
        assert!(matches!(check_with(&operations, &late), Verdict::Broken(_)));
        assert_eq!(check_with(&operations, &[lease(40, true, 60), lease(40, false, 120)]), Verdict::Linearizable);
        let swept = [claim((0, 1), A, granted(50)), read((2, 3), None, 90)];
        assert!(matches!(check_with(&swept, &late), Verdict::Broken(_)));
    }

    #[test]
    fn a_refusal_needs_a_reason_that_may_have_been() {
        let owned = claim((0, 1), A, granted(5));
        holds(&[owned, claim((2, 3), B, Answer::Refused)]);
        holds(&[owned, release((2, 3), A, 3, Answer::Refused)]);
        holds(&[owned, migrate((2, 3), B, 5, Answer::Refused)]);
        // Its owner asks for what it has, or gives it back.
        fails(&[owned, claim((2, 3), A, Answer::Refused)]);
        fails(&[owned, release((2, 3), A, 5, Answer::Refused)]);
        fails(&[owned, op((2, 3), Asked::Read, Answer::Refused)]);
        // Of two at once, the refused one was the later.
        holds(&[owned, release((2, 9), A, 5, Answer::Refused), migrate((2, 9), B, 5, granted(8))]);
        let ended = Sighting { worker: A.worker, granted: at(2), is_live: false, revision: 20 };
        let refused = [owned, claim((2, 3), A, Answer::Refused), release((4, 5), A, 5, Answer::Refused)];
        assert_eq!(check_with(&refused, &[ended]), Verdict::Linearizable);
        holds(&[claim((0, 1), A, Answer::Refused), read((2, 3), None, 1)]);
    }

    #[test]
    fn a_search_that_becomes_too_long_says_so() {
        let lost = (0..14)
            .map(|number| migrate((number, number + 1), if number % 2 == 0 { A } else { B }, 1, Answer::Unknown));
        let mut operations: Vec<Operation> = std::iter::once(read((0, 1), None, 1)).chain(lost).collect();
        operations.push(read((100, 101), None, 1));
        operations.push(read((102, 103), Some(A), 1));
        let all: Vec<&Operation> = operations.iter().collect();
        assert_eq!(search(SUBJECT, &all, &Model { sightings: &[] }, 8), Verdict::Undecided);
        fails(&operations);
    }

    #[test]
    fn a_long_history_is_searched_quickly() {
        let mut operations = Vec::new();
        for round in 0..5_000 {
            let (when, index) = (100 * round, 10 * round + 5);
            operations.push(claim((when, when + 30), A, granted(index)));
            operations.push(read((when + 10, when + 40), Some(A), index));
            operations.push(migrate((when + 45, when + 70), B, index, granted(index + 2)));
            operations.push(release((when + 72, when + 90), B, index + 2, Answer::Released));
            if round % 100 == 0 {
                operations.push(release((when + 50, when + 60), A, index, Answer::Unknown));
            }
        }
        holds(&operations);
        operations.push(read((600_000, 600_001), Some(B), 3));
        fails(&operations);
    }
}
