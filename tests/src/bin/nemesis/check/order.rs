//! Real-time order: a reply must not be older than any reply completed before its request began.

use vocabulary::{Epoch, SessionId};

use super::violation::GuaranteeViolation;
use crate::history::{ClientOperation, OwnershipReply, OwnershipRequest};

/// What a reply says about the session's epoch at that moment.
enum ReportedEpoch {
    /// The session's epoch was exactly this one.
    Exactly(Epoch),
    /// The session's epoch was higher than this one.
    Above(Epoch),
}

impl ReportedEpoch {
    /// Returns the lower bound for replies to later requests.
    fn from_answer(operation: &ClientOperation) -> Option<ReportedEpoch> {
        match (operation.answer, operation.asked) {
            (OwnershipReply::Granted(epoch), _) => Some(ReportedEpoch::Exactly(epoch)),
            (OwnershipReply::Found(holding), _) => Some(ReportedEpoch::Exactly(holding.epoch)),
            (OwnershipReply::Released, OwnershipRequest::Release { seen, .. }) => Some(ReportedEpoch::Above(seen)),
            _ => None,
        }
    }

    /// Comparable form: an epoch, and whether the bound is above it.
    fn lower_bound(&self) -> (Epoch, bool) {
        match self {
            ReportedEpoch::Exactly(epoch) => (*epoch, false),
            ReportedEpoch::Above(epoch) => (*epoch, true),
        }
    }
}

/// Checks that no reply is older than one completed before its request began.
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
            let reach = ReportedEpoch::from_answer(before).map(|reach| reach.lower_bound());
            if let Some(reach) = reach.filter(|reach| floor.is_none_or(|(floor, _)| *reach > floor)) {
                floor = Some((reach, before));
            }
        }
        let Some(((at_least, beyond), before)) = floor else { continue };
        let Some(ReportedEpoch::Exactly(at)) = ReportedEpoch::from_answer(operation) else { continue };
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

/// Formats an operation for violation messages.
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
