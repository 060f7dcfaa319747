//! What must hold of a history: pure functions, each of which names what it found broken.

mod backup;
mod fleet;
mod grants;
mod linear;
mod order;
mod streams;
mod watched;

use std::collections::HashMap;

use vocabulary::SessionId;

use crate::NemesisError;
use crate::history::{Holding, Kept, Operation};

pub(crate) use backup::{backed_up, newest};
pub(crate) use fleet::{NodeState, equal_states};
pub(crate) use streams::{StreamEnd, Streamed, streams};
pub(crate) use watched::{Change, Watched};

/// A broken promise.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Broken {
    /// Which one.
    pub(crate) promise: &'static str,
    /// Where, with what is needed to find it in the history.
    pub(crate) detail: String,
}

impl Broken {
    /// A fault that no node felt was none, and shows nothing.
    pub(crate) fn unless_felt(fault: &str, times: i64) -> Option<Broken> {
        let detail = format!("no node called into {fault}");
        (times == 0).then_some(Broken { promise: "a fault is felt", detail })
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.promise, self.detail)
    }
}

/// What every subject was at the end, by a linearizable read after everything had healed.
pub(crate) type Finals = HashMap<SessionId, Holding>;

/// Judges on another thread: this one carries what nodes say to each other, and must not stand still.
pub(crate) async fn aside<T: Send + 'static>(judge: impl FnOnce() -> T + Send + 'static) -> Result<T, NemesisError> {
    let judged = tokio::task::spawn_blocking(judge).await;
    judged.map_err(|error| NemesisError::Answer { who: "a check".into(), got: error.to_string() })
}

/// What came of a check of everything that clients were told.
#[derive(Default, Debug)]
pub(crate) struct Judged {
    /// What did not hold.
    pub(crate) broken: Vec<Broken>,
    /// Sessions whose operations have so many orders that the search for one was given up.
    pub(crate) undecided: usize,
}

/// Checks everything that clients were told.
pub(crate) fn history(kept: &Kept, finals: &Finals) -> Judged {
    let (mut broken, mut undecided) = (Vec::new(), 0);
    for (subject, operations) in by_subject(&kept.operations) {
        match linear::of_subject(subject, &operations, &kept.sightings) {
            linear::Verdict::Linearizable => {}
            linear::Verdict::Broken(found) => broken.push(found),
            linear::Verdict::Undecided => undecided += 1,
        }
        broken.extend(order::of_subject(subject, &operations));
        broken.extend(grants::of_subject(subject, &operations, &kept.sightings));
        if let Some(last) = finals.get(&subject) {
            broken.extend(grants::nothing_lost(subject, &operations, *last));
        }
    }
    Judged { broken, undecided }
}

fn by_subject(operations: &[Operation]) -> HashMap<SessionId, Vec<&Operation>> {
    let mut subjects: HashMap<SessionId, Vec<&Operation>> = HashMap::new();
    for operation in operations {
        subjects.entry(operation.subject).or_default().push(operation);
    }
    subjects
}

#[cfg(test)]
mod tests;
