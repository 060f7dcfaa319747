//! Nodes beside each other: equal states at equal applied index.

use std::collections::BTreeMap;

use super::GuaranteeViolation;
use crate::history::MemberSlot;

/// What a node said of its state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NodeStateHash {
    /// Which node.
    pub(crate) seat: MemberSlot,
    /// The last entry that it applied.
    pub(crate) applied: u64,
    /// Digest of everything that it remembers.
    pub(crate) hash: String,
}

/// Nodes that applied the same entries remember the same.
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
