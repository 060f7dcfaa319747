//! Set of [`Action`]s, stored in one byte without heap allocation.

use serde::{Deserialize, Serialize};

use crate::Action;

/// Set of actions; serialized as a list of their names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
#[serde(from = "Vec<Action>", into = "Vec<Action>")]
pub struct ActionSet(u8);

impl ActionSet {
    /// No action.
    pub const NONE: Self = Self(0);

    /// Returns whether `action` is in the set.
    pub fn contains(self, action: Action) -> bool {
        self.0 & bit(action) != 0
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }

    /// Returns the set with `action` added.
    #[must_use]
    pub fn with(self, action: Action) -> Self {
        Self(self.0 | bit(action))
    }

    /// Returns the set without the actions of `others`.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        Self(self.0 & !others.0)
    }

    /// Returns the actions in declaration order.
    pub fn iter(self) -> impl Iterator<Item = Action> {
        Action::ALL.into_iter().filter(move |action| self.contains(*action))
    }

    /// Returns the set as a bit mask, one bit per action, which fits an atomic.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Returns the set for a bit mask; unknown bits are ignored.
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
