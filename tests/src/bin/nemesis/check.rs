//! Guarantees that a history must fulfil: pure functions that return the violations.

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

/// A violated guarantee.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct GuaranteeViolation {
    /// Name of the guarantee.
    pub(crate) guarantee: &'static str,
    /// What happened, with enough to find it in the history.
    pub(crate) detail: String,
}

impl GuaranteeViolation {
    /// Reports a fault that no node observed: it proves nothing.
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

/// Holder of every session at the end, from linearizable reads after all faults have healed.
pub(crate) type FinalOwners = HashMap<SessionId, SessionHolder>;

/// Runs a check on a blocking thread: this thread carries the traffic between nodes and must not stall.
pub(crate) async fn run_blocking<T: Send + 'static>(
    judge: impl FnOnce() -> T + Send + 'static,
) -> Result<T, NemesisError> {
    let judged = tokio::task::spawn_blocking(judge).await;
    judged.map_err(|error| NemesisError::Answer { who: "a check".into(), got: error.to_string() })
}

/// Result of checking a history.
#[derive(Default, Debug)]
pub(crate) struct HistoryVerdict {
    /// Violated guarantees.
    pub(crate) broken: Vec<GuaranteeViolation>,
    /// Sessions whose check was given up because their operations have too many possible orders.
    pub(crate) undecided: usize,
}

/// Checks all replies that clients got.
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
