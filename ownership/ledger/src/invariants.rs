//! Named invariants of every state and of every transition, for unit, simulation and cluster tests.

/// Fails a check unless a condition holds.
macro_rules! ensure {
    ($holds:expr, $($detail:tt)+) => {
        if $holds { Ok(()) } else { Err(ViolationDetail(format!($($detail)+))) }
    };
}

mod state;
mod step;

use crate::ledger::Ledger;

/// A violated invariant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{invariant}: {detail}")]
pub struct InvariantViolation {
    /// Name of the invariant.
    pub invariant: &'static str,
    /// Where it was violated.
    pub detail: String,
}

/// Where a check found its property violated.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct ViolationDetail(pub String);

/// Result of a check.
pub type InvariantCheckResult = Result<(), ViolationDetail>;

/// Check of one state.
pub type StateCheck = fn(&Ledger) -> InvariantCheckResult;

/// Check of a transition from the first state to the second.
pub type TransitionCheck = fn(&Ledger, &Ledger) -> InvariantCheckResult;

/// Invariants of every state.
pub const STATE: &[(&str, StateCheck)] = &[
    ("indexes follow from the records", state::indexes_follow),
    ("the digest follows from the records", state::digest_follows),
    ("expiry index and lease table are inverses", state::leases_are_inverses),
    ("references equal what is referenced", state::references_are_exact),
    ("the fork graph is acyclic", state::forks_are_acyclic),
    ("a boundary is kept by one extent", state::boundaries_are_unique),
    ("waypoints are kept without a gap", state::waypoints_are_kept),
    ("a copy's digest equals the sealed digest", state::copies_match),
    ("no head is an ancestor of another", state::heads_are_apart),
    ("nothing is shared across tenants", state::tenants_are_apart),
    ("every grant lies in the past", state::grants_are_past),
    ("every table is bounded", state::tables_are_bounded),
];

/// Invariants of every transition.
pub const STEP: &[(&str, TransitionCheck)] = &[
    ("one owner per epoch", step::one_owner_per_epoch),
    ("fencing tokens rise", step::tokens_rise),
    ("no lease revives without a new grant", step::no_lease_revives),
    ("no lease ends early", step::no_lease_ends_early),
    ("a sealed artifact never changes", step::sealed_never_changes),
    ("the clock never runs backwards", step::clock_never_runs_back),
    ("the feature level never falls", step::level_never_falls),
    ("node ids are never reused", step::nodes_are_never_reused),
    ("a replayed serial returns the first outcome", step::outcomes_stay),
];

/// Checks one state.
pub fn check(ledger: &Ledger) -> Result<(), InvariantViolation> {
    STATE.iter().try_for_each(|(invariant, check)| {
        check(ledger).map_err(|broken| InvariantViolation { invariant, detail: broken.0 })
    })
}

/// Checks the transition from one state to a later one.
pub fn check_step(before: &Ledger, after: &Ledger) -> Result<(), InvariantViolation> {
    let violation = |invariant, broken: ViolationDetail| InvariantViolation { invariant, detail: broken.0 };
    STEP.iter().try_for_each(|(invariant, check)| check(before, after).map_err(|broken| violation(invariant, broken)))
}
