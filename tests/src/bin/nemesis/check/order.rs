//! Real-time order: what had been answered before a question was asked is older than its answer.

use vocabulary::{Epoch, SessionId};

use super::Broken;
use crate::history::{Answer, Asked, Operation};

/// What an answer says of the moment at which it was true.
enum Reach {
    /// The session's epoch was this one.
    At(Epoch),
    /// The session's epoch was above this one.
    Beyond(Epoch),
}

impl Reach {
    /// The lowest that an answer to a later question may be at.
    fn of(operation: &Operation) -> Option<Reach> {
        match (operation.answer, operation.asked) {
            (Answer::Granted(epoch), _) => Some(Reach::At(epoch)),
            (Answer::Found(holding), _) => Some(Reach::At(holding.epoch)),
            (Answer::Released, Asked::Release { seen, .. }) => Some(Reach::Beyond(seen)),
            _ => None,
        }
    }

    /// As a number pair that compares: an epoch, and whether something lies beyond it.
    fn floor(&self) -> (Epoch, bool) {
        match self {
            Reach::At(epoch) => (*epoch, false),
            Reach::Beyond(epoch) => (*epoch, true),
        }
    }
}

/// No answer is older than one that was complete before its question was asked.
pub(super) fn of_subject(subject: SessionId, operations: &[&Operation]) -> Vec<Broken> {
    let mut asked = operations.to_vec();
    asked.sort_unstable_by_key(|operation| operation.invoked);
    let mut answered = operations.to_vec();
    answered.sort_unstable_by_key(|operation| operation.completed);
    let mut answered = answered.into_iter().peekable();
    let mut floor: Option<((Epoch, bool), &Operation)> = None;
    let mut broken = Vec::new();
    for operation in asked {
        while let Some(before) = answered.next_if(|before| before.completed < operation.invoked) {
            let reach = Reach::of(before).map(|reach| reach.floor());
            if let Some(reach) = reach.filter(|reach| floor.is_none_or(|(floor, _)| *reach > floor)) {
                floor = Some((reach, before));
            }
        }
        let Some(((at_least, beyond), before)) = floor else { continue };
        let Some(Reach::At(at)) = Reach::of(operation) else { continue };
        if at < at_least || (beyond && at == at_least) {
            let promise = match operation.asked {
                Asked::Read => "a linearizable read is never older than what was answered before it was asked",
                _ => "epochs rise with real time",
            };
            let detail = format!("{subject}: {} answered {at}, after {}", told(operation), told(before));
            broken.push(Broken { promise, detail });
        }
    }
    broken
}

/// An attempt, as the history has it.
pub(super) fn told(operation: &Operation) -> String {
    format!(
        "client {} at node {} asked {:?} at {} us, was told {:?} at {} us",
        operation.client,
        operation.seat.0,
        operation.asked,
        operation.invoked.0,
        operation.answer,
        operation.completed.0
    )
}
