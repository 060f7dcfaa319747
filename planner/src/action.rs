//! The six ways to serve a step.

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// How a step is served. The label is derived from the plan's legs and handoff, so it always matches what the plan
/// does.
///
/// *target* is the worker of the leg that answers; *start* is the number of prompt tokens cached there when the step's own
/// computation begins:
///
/// - One leg, no handoff:
///   - `DecodeContinuation` when the step is a decode continuation and the target is the session's owner;
///   - `TailRecompute` when a replicate to the target was possible (another worker of its fabric holds sealed blocks
///     after `start`), and it would have moved at most `start` tokens: the tail is computed instead of moved;
///   - `ColocatedPrefill` otherwise.
/// - A prefill leg elsewhere: `RemotePrefill`.
/// - A replicate before one leg at the target:
///   - `StateMigration` when the target becomes the owner;
///   - `TailRecompute` when the source holds more than the sealed prefix: only the sealed prefix is moved, the rest is
///     computed at the target;
///   - `ArtifactFetch` otherwise: everything that the source holds is moved, and the owner stays.
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Debug,
    strum::IntoStaticStr,
    strum::Display,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Action {
    /// One leg at a worker that computes the tokens it lacks.
    ColocatedPrefill,
    /// One leg at the owner; the prompt has nothing beyond the session's head.
    DecodeContinuation,
    /// The prompt is computed at one worker, and the target pulls its KV.
    RemotePrefill,
    /// A sealed prefix is replicated to the target, which serves the step; the owner stays.
    ArtifactFetch,
    /// The target starts from a sealed prefix and recomputes what other workers hold after it.
    TailRecompute,
    /// A sealed prefix is replicated to the target, which serves the step and becomes the owner.
    StateMigration,
}

impl Action {
    /// Every action, in declaration order.
    pub const ALL: [Self; 6] = *Self::VARIANTS.first_chunk().expect("six actions");

    /// Returns the action's name for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod tests {
    use super::Action;

    #[test]
    fn action_names_agree_in_code_and_json() {
        for action in Action::ALL {
            assert_eq!(serde_json::to_string(&action).unwrap(), format!("\"{action}\""));
        }
    }
}
