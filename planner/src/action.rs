//! The six ways to serve a step.

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// How a step is served. The label follows the legs, so it never says something that the plan does not do.
///
/// With *target* the worker of the decode leg, *start* the tokens it finds when the step's own computing begins:
///
/// - One leg, no handoff:
///   - `DecodeContinuation` when the step is one and the target is the session's owner;
///   - `TailRecompute` when a replicate to the target was possible (another worker of its fabric holds sealed blocks
///     after `start`), and what it would have moved is no longer than `start`: a tail, computed instead of moved;
///   - `ColocatedPrefill` otherwise.
/// - A prefill leg elsewhere: `RemotePrefill`.
/// - A replicate before one leg at the target:
///   - `StateMigration` when the target becomes the owner;
///   - `TailRecompute` when the source holds more than what is sealed: only the sealed prefix is moved, what lies after
///     it is computed at the target;
///   - `ArtifactFetch` otherwise: all that the source holds is moved and the owner stays.
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
    /// One leg at a worker that computes what it lacks.
    ColocatedPrefill,
    /// One leg at the owner, nothing beyond the head is new.
    DecodeContinuation,
    /// The prompt is computed at one worker and pulled by the target.
    RemotePrefill,
    /// A sealed prefix is replicated to the target, which then serves; the owner stays.
    ArtifactFetch,
    /// The target starts from a sealed prefix and computes again what others hold after it.
    TailRecompute,
    /// A sealed prefix is replicated to the target, which then serves and becomes the owner.
    StateMigration,
}

impl Action {
    /// Every action, in declaration order.
    pub const ALL: [Self; 6] = *Self::VARIANTS.first_chunk().expect("six actions");

    /// The word for logs, metrics and the API.
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
