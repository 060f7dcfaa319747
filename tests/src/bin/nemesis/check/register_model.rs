//! A register in the model of a single ledger: a value that a write replaces and a read returns.

use std::collections::HashMap;

use super::linearizability::{self, LinearizabilityVerdict, MAX_POSITIONS, OperationEffect, SequentialModel};
use crate::history::{Register, RegisterOperation, RegisterReply, RegisterRequest, RegisterValue, RunInstant};

/// Value of a register.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct RegisterState {
    value: RegisterValue,
    /// Whether a write with an unknown outcome set it and nobody has read it. Another write then shows nothing that the
    /// order without the unknown one does not show, so the search leaves that position out.
    is_unread: bool,
}

/// Sequential model of one register.
struct RegisterModel;

impl SequentialModel for RegisterModel {
    type Operation = RegisterOperation;
    type State = RegisterState;

    fn interval(operation: &RegisterOperation) -> (RunInstant, RunInstant) {
        (operation.invoked, operation.completed)
    }

    fn effect(operation: &RegisterOperation) -> OperationEffect {
        match (operation.answer, operation.asked) {
            (RegisterReply::Unavailable, _) | (RegisterReply::Unknown, RegisterRequest::Read) => {
                OperationEffect::Nothing
            }
            (RegisterReply::Unknown, RegisterRequest::Write(_)) => OperationEffect::Unknown,
            _ => OperationEffect::Answered,
        }
    }

    fn describe(operation: &RegisterOperation) -> String {
        let RegisterOperation { client, seat, asked, answer, invoked, completed, .. } = operation;
        format!(
            "client {client} at node {} asked {asked:?} at {} us, was told {answer:?} at {} us",
            seat.0, invoked.0, completed.0
        )
    }

    fn is_same_write(first: &RegisterOperation, second: &RegisterOperation) -> bool {
        first.asked == second.asked
    }

    fn state_after_answer(
        &self,
        state: Option<RegisterState>,
        operation: &RegisterOperation,
    ) -> Option<Option<RegisterState>> {
        let known = |value| Some(Some(RegisterState { value, is_unread: false }));
        match (operation.asked, operation.answer) {
            (RegisterRequest::Write(value), RegisterReply::Written) if !state.is_some_and(|state| state.is_unread) => {
                known(value)
            }
            (RegisterRequest::Read, RegisterReply::Found(value)) if state.is_none_or(|state| state.value == value) => {
                known(value)
            }
            // The registers exist throughout and their writes are unfenced: the ledger has no reason to refuse.
            _ => None,
        }
    }

    fn state_after_unknown(
        &self,
        state: Option<RegisterState>,
        operation: &RegisterOperation,
    ) -> Option<RegisterState> {
        let RegisterState { value: present, is_unread } = state?;
        match operation.asked {
            RegisterRequest::Write(value) if value != present && !is_unread => {
                Some(RegisterState { value, is_unread: true })
            }
            RegisterRequest::Write(_) | RegisterRequest::Read => None,
        }
    }
}

/// Searches for a valid order of every register's operations.
pub(super) fn check_registers(operations: &[RegisterOperation]) -> Vec<LinearizabilityVerdict> {
    let mut by_register: HashMap<Register, Vec<&RegisterOperation>> = HashMap::new();
    for operation in operations {
        by_register.entry(operation.register).or_default().push(operation);
    }
    let search = |(register, operations): (&Register, &Vec<&RegisterOperation>)| {
        let subject = (&*format!("{register:?}"), "all operations on a register have one order");
        linearizability::search(&RegisterModel, operations, subject, MAX_POSITIONS)
    };
    by_register.iter().map(search).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::MemberSlot;

    const QUOTA: Register = Register::Quota(1);

    fn op((invoked, completed): (u64, u64), asked: RegisterRequest, answer: RegisterReply) -> RegisterOperation {
        let (invoked, completed) = (RunInstant(invoked), RunInstant(completed));
        RegisterOperation { client: 1, seat: MemberSlot(1), register: QUOTA, asked, invoked, completed, answer }
    }

    fn write(when: (u64, u64), value: u128) -> RegisterOperation {
        op(when, RegisterRequest::Write(RegisterValue(Some(value))), RegisterReply::Written)
    }

    fn lost(when: (u64, u64), value: u128) -> RegisterOperation {
        op(when, RegisterRequest::Write(RegisterValue(Some(value))), RegisterReply::Unknown)
    }

    fn read(when: (u64, u64), value: u128) -> RegisterOperation {
        op(when, RegisterRequest::Read, RegisterReply::Found(RegisterValue(Some(value))))
    }

    fn is_linearizable(operations: &[RegisterOperation]) -> bool {
        match check_registers(operations).as_slice() {
            [] | [LinearizabilityVerdict::Linearizable] => true,
            [LinearizabilityVerdict::Broken(_)] => false,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_read_returns_the_last_write_or_a_concurrent_one() {
        assert!(is_linearizable(&[]));
        assert!(is_linearizable(&[write((0, 1), 5), read((2, 3), 5), write((4, 5), 6), read((6, 7), 6)]));
        assert!(is_linearizable(&[write((0, 1), 5), write((2, 9), 6), read((3, 4), 5), read((5, 6), 6)]));
        assert!(!is_linearizable(&[write((0, 1), 5), write((2, 9), 6), read((3, 4), 6), read((5, 6), 5)]));
        assert!(!is_linearizable(&[write((0, 1), 5), write((2, 3), 6), read((4, 5), 5)]));
    }

    #[test]
    fn an_unknown_write_takes_effect_once_at_any_later_time_or_never() {
        let begin = [write((0, 1), 5), lost((2, 3), 6)];
        let with = |more: &[RegisterOperation]| is_linearizable(&[&begin, more].concat());
        assert!(with(&[read((10, 11), 5), read((20, 21), 6)]));
        assert!(with(&[read((10, 11), 5), write((20, 21), 7), read((30, 31), 7)]));
        assert!(with(&[write((10, 11), 7), read((20, 21), 6)]));
        assert!(!with(&[read((10, 11), 6), write((20, 21), 7), read((30, 31), 6)]));
        assert!(!is_linearizable(&[write((0, 1), 5), read((2, 3), 6), lost((4, 5), 6)]));
    }

    #[test]
    fn a_lost_write_and_a_refusal_are_not_linearizable() {
        assert!(!is_linearizable(&[read((0, 1), 4), write((2, 3), 5), read((4, 5), 4)]));
        let refused = op((2, 3), RegisterRequest::Write(RegisterValue(None)), RegisterReply::Refused);
        assert!(!is_linearizable(&[write((0, 1), 5), refused]));
        let unavailable = op((2, 3), RegisterRequest::Write(RegisterValue(None)), RegisterReply::Unavailable);
        assert!(is_linearizable(&[write((0, 1), 5), unavailable, read((4, 5), 5)]));
        assert!(!is_linearizable(&[
            write((0, 1), 5),
            unavailable,
            op((4, 5), RegisterRequest::Read, RegisterReply::Found(RegisterValue(None)))
        ]));
    }

    #[test]
    fn an_unknown_write_is_read_only_once() {
        // The first value is known, as in a run.
        let begin = [read((0, 1), 4), lost((2, 3), 6), read((10, 11), 6), write((20, 21), 5)];
        assert!(is_linearizable(&[&begin[..], &[read((30, 31), 5)]].concat()));
        assert!(!is_linearizable(&[&begin[..], &[read((30, 31), 6)]].concat()));
        assert!(is_linearizable(&[&begin[..], &[lost((22, 23), 6), read((30, 31), 6)]].concat()));
    }

    #[test]
    fn equal_unknown_writes_do_not_exhaust_the_search() {
        let mut operations = vec![read((0, 1), 0)];
        for round in 0..60_u64 {
            let when = 100 * round + 10;
            operations.extend([lost((when, when + 1), u128::from(round % 2)), write((when + 10, when + 20), 0)]);
        }
        operations.push(read((10_000, 10_001), 1));
        assert!(is_linearizable(&operations));
        operations.push(read((10_010, 10_011), 7));
        assert!(!is_linearizable(&operations));
    }

    #[test]
    fn many_unknown_writes_do_not_exhaust_the_search() {
        let mut operations = Vec::new();
        for round in 0..400_u64 {
            let when = 100 * round;
            operations.extend([
                write((when, when + 10), u128::from(round)),
                lost((when + 11, when + 12), 1_000_000 + u128::from(round)),
            ]);
            let found = if round % 3 == 0 { 1_000_000 + u128::from(round) } else { u128::from(round) };
            operations.push(read((when + 50, when + 60), found));
        }
        assert!(is_linearizable(&operations));
        operations.push(read((50_000, 50_001), 1));
        assert!(!is_linearizable(&operations));
    }
}
