//! Real-time order: what had been answered before a question was asked is older than its answer.

use vocabulary::{Epoch, SessionId};

use super::GuaranteeViolation;
use crate::history::{ClientOperation, OwnershipReply, OwnershipRequest};

/// What an answer says of the moment at which it was true.
enum EpochConstraint {
    /// The session's epoch was this one.
    Exactly(Epoch),
    /// The session's epoch was above this one.
    Above(Epoch),
}

impl EpochConstraint {
    /// The lowest that an answer to a later question may be at.
    fn from_answer(operation: &ClientOperation) -> Option<EpochConstraint> {
        match (operation.answer, operation.asked) {
            (OwnershipReply::Granted(epoch), _) => Some(EpochConstraint::Exactly(epoch)),
            (OwnershipReply::Found(holding), _) => Some(EpochConstraint::Exactly(holding.epoch)),
            (OwnershipReply::Released, OwnershipRequest::Release { seen, .. }) => Some(EpochConstraint::Above(seen)),
            _ => None,
        }
    }

    /// As a number pair that compares: an epoch, and whether something lies beyond it.
    fn lower_bound(&self) -> (Epoch, bool) {
        match self {
            EpochConstraint::Exactly(epoch) => (*epoch, false),
            EpochConstraint::Above(epoch) => (*epoch, true),
        }
    }
}

/// No answer is older than one that was complete before its question was asked.
pub(super) fn check_order(subject: SessionId, operations: &[&ClientOperation]) -> Vec<GuaranteeViolation> {
    let mut asked = operations.to_vec();
    asked.sort_unstable_by_key(|operation| operation.invoked);
    let mut answered = operations.to_vec();
    answered.sort_unstable_by_key(|operation| operation.completed);
    let mut answered = answered.into_iter().peekable();
    let mut floor: Option<((Epoch, bool), &ClientOperation)> = None;
    let mut broken = Vec::new();
    for operation in asked {
        while let Some(before) = answered.next_if(|before| before.completed < operation.invoked) {
            let reach = EpochConstraint::from_answer(before).map(|reach| reach.lower_bound());
            if let Some(reach) = reach.filter(|reach| floor.is_none_or(|(floor, _)| *reach > floor)) {
                floor = Some((reach, before));
            }
        }
        let Some(((at_least, beyond), before)) = floor else { continue };
        let Some(EpochConstraint::Exactly(at)) = EpochConstraint::from_answer(operation) else { continue };
        if at < at_least || (beyond && at == at_least) {
            let promise = match operation.asked {
                OwnershipRequest::Read => {
                    "a linearizable read is never older than what was answered before it was asked"
                }
                _ => "epochs rise with real time",
            };
            let detail = format!("{subject}: {} answered {at}, after {}", describe(operation), describe(before));
            broken.push(GuaranteeViolation { guarantee: promise, detail });
        }
    }
    broken
}

/// An attempt, as the history has it.
pub(super) fn describe(operation: &ClientOperation) -> String {
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
