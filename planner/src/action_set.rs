//! Some of the six ways to serve a step, without memory of its own.

use serde::{Deserialize, Serialize};

use crate::Action;

/// A set of actions; a list of their words in JSON.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(from = "Vec<Action>", into = "Vec<Action>")]
pub struct ActionSet(u8);

impl ActionSet {
    /// No action.
    pub const NONE: Self = Self(0);

    /// Whether `action` is one of them.
    pub fn contains(self, action: Action) -> bool {
        self.0 & bit(action) != 0
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// These and `action`.
    #[must_use]
    pub fn with(self, action: Action) -> Self {
        Self(self.0 | bit(action))
    }

    /// Those of these that are not among `others`.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Each, in declaration order.
    pub fn iter(self) -> impl Iterator<Item = Action> {
        Action::ALL.into_iter().filter(move |action| self.contains(*action))
    }

    /// One bit an action: a form that fits an atomic.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Those whose bits are set; others mean nothing.
    pub fn from_bits(bits: u8) -> Self {
        Action::ALL.into_iter().filter(|action| bits & bit(*action) != 0).collect()
    }
}

fn bit(action: Action) -> u8 {
    1 << action as u8
}

impl FromIterator<Action> for ActionSet {
    fn from_iter<I: IntoIterator<Item = Action>>(actions: I) -> Self {
        actions.into_iter().fold(Self::NONE, Self::with)
    }
}

impl From<Vec<Action>> for ActionSet {
    fn from(actions: Vec<Action>) -> Self {
        actions.into_iter().collect()
    }
}

impl From<ActionSet> for Vec<Action> {
    fn from(actions: ActionSet) -> Self {
        actions.iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn action_sets_round_trip_through_bits_and_json() {
        for bits in 0..1u8 << Action::ALL.len() {
            let actions = ActionSet::from_bits(bits);
            assert_eq!(actions.bits(), bits);
            let text = serde_json::to_string(&actions).unwrap();
            assert_eq!(serde_json::from_str::<ActionSet>(&text).unwrap(), actions, "{text}");
            assert_eq!(actions.is_empty(), actions.iter().next().is_none());
        }
        assert_eq!(ActionSet::from_bits(0xff), Action::ALL.into_iter().collect());
    }

    #[test]
    fn action_set_contains_added_and_not_removed_actions() {
        let fetch = ActionSet::NONE.with(Action::ArtifactFetch);
        let both = fetch.with(Action::StateMigration);
        assert!(both.contains(Action::ArtifactFetch) && !both.contains(Action::RemotePrefill));
        assert_eq!(both.without(fetch), ActionSet::NONE.with(Action::StateMigration));
        assert_eq!(serde_json::to_string(&both).unwrap(), r#"["artifact_fetch","state_migration"]"#);
    }

    #[test]
    fn unknown_action_name_is_rejected_with_the_accepted_ones() {
        let error = serde_json::from_str::<ActionSet>(r#"["fetch"]"#).unwrap_err().to_string();
        assert!(Action::ALL.iter().all(|action| error.contains(action.as_str())), "{error}");
    }
}
