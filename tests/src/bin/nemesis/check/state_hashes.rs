//! Compares nodes: equal states at equal applied indexes.

use std::collections::BTreeMap;

use super::violation::GuaranteeViolation;
use crate::history::MemberSlot;

/// State hash of a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NodeStateHash {
    /// Slot of the node.
    pub(crate) seat: MemberSlot,
    /// Index of the last applied entry.
    pub(crate) applied: u64,
    /// Hash of the node's whole state.
    pub(crate) hash: String,
}

/// Checks that nodes with the same applied index have the same state.
pub(crate) fn check_equal_states(states: &[NodeStateHash]) -> Vec<GuaranteeViolation> {
    let mut known: BTreeMap<u64, &NodeStateHash> = BTreeMap::new();
    let mut broken = Vec::new();
    for state in states {
        let first = known.entry(state.applied).or_insert(state);
        if first.hash != state.hash {
            let detail = format!(
                "at entry {}, node {} says {} and node {} says {}",
                state.applied, first.seat.0, first.hash, state.seat.0, state.hash
            );
            broken.push(GuaranteeViolation { guarantee: "state hashes are equal at equal applied index", detail });
        }
    }
    broken
}
