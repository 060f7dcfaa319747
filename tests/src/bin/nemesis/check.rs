//! What must hold of a history: pure functions, each of which names what it found broken.

mod backup;
mod grants;
mod linearizability;
mod order;
mod state_hashes;
mod streams;
mod watches;

use std::collections::HashMap;

use vocabulary::SessionId;

use crate::NemesisError;
use crate::history::{ClientOperation, HistoryRecords, SessionHolder};

pub(crate) use backup::{check_backup, newest_acknowledged};
pub(crate) use state_hashes::{NodeStateHash, check_equal_states};
pub(crate) use streams::{StreamEnd, StreamRecord, check_streams};
pub(crate) use watches::{WatchRecord, WatchedChange};

/// A broken promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GuaranteeViolation {
    /// Which one.
    pub(crate) guarantee: &'static str,
    /// Where, with what is needed to find it in the history.
    pub(crate) detail: String,
}

impl GuaranteeViolation {
    /// A fault that no node felt was none, and shows nothing.
    pub(crate) fn unless_observed(fault: &str, times: i64) -> Option<GuaranteeViolation> {
        let detail = format!("no node called into {fault}");
        (times == 0).then_some(GuaranteeViolation { guarantee: "a fault is felt", detail })
    }
}

impl std::fmt::Display for GuaranteeViolation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.guarantee, self.detail)
    }
}

/// What every subject was at the end, by a linearizable read after everything had healed.
pub(crate) type FinalOwners = HashMap<SessionId, SessionHolder>;

/// Judges on another thread: this one carries what nodes say to each other, and must not stand still.
pub(crate) async fn run_blocking<T: Send + 'static>(
    judge: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NemesisError> {
    let judged = tokio::task::spawn_blocking(judge).await;
    judged.map_err(|error| NemesisError::Answer { who: "a check".into(), got: error.to_string() })
}

/// What came of a check of everything that clients were told.
#[derive(Default, Debug)]
pub(crate) struct HistoryVerdict {
    /// What did not hold.
    pub(crate) broken: Vec<GuaranteeViolation>,
    /// Sessions whose operations have so many orders that the search for one was given up.
    pub(crate) undecided: usize,
}

/// Checks everything that clients were told.
pub(crate) fn check_history(kept: &HistoryRecords, finals: &FinalOwners) -> HistoryVerdict {
    let (mut broken, mut undecided) = (Vec::new(), 0);
    for (subject, operations) in by_subject(&kept.operations) {
        match linearizability::check_linearizable(subject, &operations, &kept.sightings) {
            linearizability::LinearizabilityVerdict::Linearizable => {}
            linearizability::LinearizabilityVerdict::Broken(found) => broken.push(found),
            linearizability::LinearizabilityVerdict::Undecided => undecided += 1,
        }
        broken.extend(order::check_order(subject, &operations));
        broken.extend(grants::check_grants(subject, &operations, &kept.sightings));
        if let Some(last) = finals.get(&subject) {
            broken.extend(grants::check_nothing_lost(subject, &operations, *last));
        }
    }
    HistoryVerdict { broken, undecided }
}

fn by_subject(operations: &[ClientOperation]) -> HashMap<SessionId, Vec<&ClientOperation>> {
    let mut subjects: HashMap<SessionId, Vec<&ClientOperation>> = HashMap::new();
    for operation in operations {
        subjects.entry(operation.subject).or_default().push(operation);
    }
    subjects
}

#[cfg(test)]
mod tests;
