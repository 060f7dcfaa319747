//! Compares a backup with the history: it holds everything decided up to its last entry and nothing decided later.

use super::grants;
use super::violation::{FinalOwners, GuaranteeViolation, by_subject};
use crate::history::{ClientOperation, HistoryRecords, OwnershipReply};

/// Returns the highest index acknowledged to any client.
pub(crate) fn newest_acknowledged(operations: &[ClientOperation]) -> u64 {
    let granted = operations.iter().filter_map(|operation| match operation.answer {
        OwnershipReply::Granted(epoch) => Some(epoch.index),
        _ => None,
    });
    granted.max().unwrap_or(0)
}

/// Checks the contents of a backup up to entry `applied`. All sessions are older than that.
pub(crate) fn check_backup(history: &HistoryRecords, saved: &FinalOwners, applied: u64) -> Vec<GuaranteeViolation> {
    let mut broken = Vec::new();
    for (subject, operations) in by_subject(&history.operations) {
        let Some(last) = saved.get(&subject).copied() else {
            broken.push(GuaranteeViolation {
                guarantee: "a backup holds every session",
                detail: format!("{subject} is missing"),
            });
            continue;
        };
        if last.epoch.index > applied {
            let detail = format!("{subject} is at {}, after entry {applied}", last.epoch);
            broken.push(GuaranteeViolation { guarantee: "a backup ends where it says", detail });
        }
        let then: Vec<ClientOperation> = operations.into_iter().map(|operation| as_of(operation, applied)).collect();
        broken.extend(grants::check_nothing_lost(subject, &then.iter().collect::<Vec<_>>(), last));
    }
    broken
}

/// Restricts an operation's reply to what it implies for the state at entry `applied`.
fn as_of(operation: &ClientOperation, applied: u64) -> ClientOperation {
    let answer = match operation.answer {
        // It happened later.
        OwnershipReply::Granted(epoch) if epoch.index > applied => OwnershipReply::Refused,
        // It happened before the node replied, but possibly after the backup.
        OwnershipReply::Released if operation.revision.is_none_or(|revision| revision > applied) => {
            OwnershipReply::Unknown
        }
        other => other,
    };
    ClientOperation { answer, ..*operation }
}
