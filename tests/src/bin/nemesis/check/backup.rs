//! A backup beside the history: all that was decided before its last entry is in it, and nothing that was decided after.

use super::{Broken, Finals, by_subject, grants};
use crate::history::{Answer, Kept, Operation};

/// The last entry that a client was told of.
pub(crate) fn newest(operations: &[Operation]) -> u64 {
    let granted = operations.iter().filter_map(|operation| match operation.answer {
        Answer::Granted(epoch) => Some(epoch.index),
        _ => None,
    });
    granted.max().unwrap_or(0)
}

/// What a backup up to this entry holds. All sessions are older than that.
pub(crate) fn backed_up(kept: &Kept, saved: &Finals, applied: u64) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (subject, operations) in by_subject(&kept.operations) {
        let Some(last) = saved.get(&subject).copied() else {
            broken.push(Broken { promise: "a backup holds every session", detail: format!("{subject} is missing") });
            continue;
        };
        if last.epoch.index > applied {
            let detail = format!("{subject} is at {}, after entry {applied}", last.epoch);
            broken.push(Broken { promise: "a backup ends where it says", detail });
        }
        let then: Vec<Operation> = operations.into_iter().map(|operation| by_then(operation, applied)).collect();
        broken.extend(grants::nothing_lost(subject, &then.iter().collect::<Vec<_>>(), last));
    }
    broken
}

/// What the answer says of the moment at which this entry was the last.
fn by_then(operation: &Operation, applied: u64) -> Operation {
    let answer = match operation.answer {
        // It happened later.
        Answer::Granted(epoch) if epoch.index > applied => Answer::Refused,
        // It happened before this node said so, and maybe later than the backup.
        Answer::Released if operation.revision.is_none_or(|revision| revision > applied) => Answer::Unknown,
        other => other,
    };
    Operation { answer, ..*operation }
}
