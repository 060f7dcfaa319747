//! Guarantees that a history must fulfil: pure functions that return the violations.

mod backup;
mod grants;
mod linearizability;
mod order;
mod register_model;
mod session_model;
mod state_hashes;
mod streams;
mod violation;
mod watches;

use crate::NemesisError;
use crate::history::HistoryRecords;

pub(crate) use backup::{check_backup, newest_acknowledged};
use linearizability::LinearizabilityVerdict;
pub(crate) use state_hashes::{NodeStateHash, check_equal_states};
pub(crate) use streams::{ResponseStreamEnd, StreamEnding, check_streams};
use violation::by_subject;
pub(crate) use violation::{FinalOwners, GuaranteeViolation};
pub(crate) use watches::{WatchedChange, WatcherHistory};

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
    /// Sessions and registers whose check was given up because their operations have too many possible orders.
    pub(crate) undecided: usize,
}

/// Checks all replies that clients got.
pub(crate) fn check_history(history: &HistoryRecords, finals: &FinalOwners) -> HistoryVerdict {
    let (mut broken, mut undecided) = (Vec::new(), 0);
    let mut verdicts = register_model::check_registers(&history.register_operations);
    for (subject, operations) in by_subject(&history.operations) {
        verdicts.push(session_model::check_linearizable(subject, &operations, &history.sightings));
        broken.extend(order::check_order(subject, &operations));
        broken.extend(grants::check_grants(subject, &operations, &history.sightings));
        if let Some(last) = finals.get(&subject) {
            broken.extend(grants::check_nothing_lost(subject, &operations, *last));
        }
    }
    for verdict in verdicts {
        match verdict {
            LinearizabilityVerdict::Linearizable => {}
            LinearizabilityVerdict::Broken(found) => broken.push(found),
            LinearizabilityVerdict::Undecided => undecided += 1,
        }
    }
    HistoryVerdict { broken, undecided }
}

#[cfg(test)]
mod tests;
