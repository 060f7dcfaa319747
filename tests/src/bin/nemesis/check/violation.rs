//! A violated guarantee, and the histories of single sessions in which it is looked for.

use std::collections::HashMap;

use vocabulary::SessionId;

use crate::history::{ClientOperation, SessionOwner};

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
pub(crate) type FinalOwners = HashMap<SessionId, SessionOwner>;

pub(super) fn by_subject(operations: &[ClientOperation]) -> HashMap<SessionId, Vec<&ClientOperation>> {
    let mut subjects: HashMap<SessionId, Vec<&ClientOperation>> = HashMap::new();
    for operation in operations {
        subjects.entry(operation.subject).or_default().push(operation);
    }
    subjects
}
