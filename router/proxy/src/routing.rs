//! Routing settings: the mode, the rollout share and the disabled actions. All can be changed at run time.

use std::sync::atomic::{AtomicU8, Ordering};

use planner::{Action, ActionSet};
use serde::{Deserialize, Serialize};
use vocabulary::{RoutingMode, SessionId};

use crate::guardrail::ComparisonArm;

/// Share of the sessions, in percent.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(try_from = "i64", into = "u8")]
pub struct Percent(u8);

impl Percent {
    /// No session.
    pub const NONE: Self = Self(0);
    /// All sessions.
    pub const ALL: Self = Self(100);
}

impl Default for Percent {
    fn default() -> Self {
        Self::ALL
    }
}

/// A percentage outside 0 to 100.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not a percentage: 0 to 100 is accepted")]
pub struct NotAPercentage(i64);

impl TryFrom<i64> for Percent {
    type Error = NotAPercentage;

    fn try_from(share: i64) -> Result<Self, NotAPercentage> {
        u8::try_from(share).ok().filter(|share| *share <= 100).map(Self).ok_or(NotAPercentage(share))
    }
}

impl From<Percent> for u8 {
    fn from(percent: Percent) -> u8 {
        percent.0
    }
}

/// The routing settings in the format of the configuration and the operator API.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields, default)]
pub struct RoutingSettings {
    /// Who decides where steps go.
    pub mode: RoutingMode,
    /// In mode `active`, the share of sessions whose steps the planner routes. Stable per session.
    pub rollout_percent: Percent,
    /// Percentage of these sessions that the fallback policy serves for comparison. Stable per session.
    pub control_percent: Percent,
    /// Actions that are disabled in addition to those disabled by the planner's policy.
    pub disabled: ActionSet,
}

impl Default for RoutingSettings {
    fn default() -> Self {
        let control_percent = Percent::NONE;
        Self { mode: RoutingMode::Active, rollout_percent: Percent::ALL, control_percent, disabled: ActionSet::NONE }
    }
}

/// Returns two independent buckets of a session, each 0 to 99. The id is a hash already; its high half is not used for
/// placement.
fn rollout_buckets(session: SessionId) -> [u8; 2] {
    let high = session.0 >> 64;
    [(high % 100) as u8, (high / 100 % 100) as u8]
}

impl RoutingSettings {
    /// Returns the mode for this session.
    pub fn mode_of(self, session: SessionId) -> RoutingMode {
        match self.mode {
            RoutingMode::Active if rollout_buckets(session)[0] >= self.rollout_percent.0 => RoutingMode::Bypass,
            RoutingMode::Active if self.arm_of(session) == Some(ComparisonArm::Control) => RoutingMode::Shadow,
            mode => mode,
        }
    }

    /// Returns the session's arm in the guardrail's comparison. Both arms have the same size, so that the newest
    /// sessions of both are from the same hours.
    pub fn arm_of(self, session: SessionId) -> Option<ComparisonArm> {
        let ([rollout_bucket, arm_bucket], share) = (rollout_buckets(session), self.control_percent.0);
        let is_owned = self.mode == RoutingMode::Active && rollout_bucket < self.rollout_percent.0;
        match arm_bucket {
            _ if !is_owned => None,
            bucket if bucket < share => Some(ComparisonArm::Control),
            bucket if bucket < 2 * share => Some(ComparisonArm::Treatment),
            _ => None,
        }
    }
}

/// The routing settings in force, readable without a lock.
#[derive(Debug)]
pub struct LiveRouting {
    mode: AtomicU8,
    percent: AtomicU8,
    disabled: AtomicU8,
    control_percent: Percent,
}

impl LiveRouting {
    /// Puts these settings in force.
    pub fn new(routing: RoutingSettings) -> Self {
        let control = routing.control_percent;
        let live = Self {
            mode: AtomicU8::new(0),
            percent: AtomicU8::new(0),
            disabled: AtomicU8::new(0),
            control_percent: control,
        };
        live.set(routing.mode, routing.rollout_percent);
        live.set_disabled(routing.disabled);
        live
    }

    /// Returns the settings in force.
    pub fn get(&self) -> RoutingSettings {
        let mode = match self.mode.load(Ordering::Relaxed) {
            0 => RoutingMode::Shadow,
            1 => RoutingMode::Bypass,
            _ => RoutingMode::Active,
        };
        RoutingSettings {
            mode,
            rollout_percent: Percent(self.percent.load(Ordering::Relaxed)),
            control_percent: self.control_percent,
            disabled: ActionSet::from_bits(self.disabled.load(Ordering::Relaxed)),
        }
    }

    /// Changes mode and share, from the next request on.
    pub fn set(&self, mode: RoutingMode, rollout_percent: Percent) {
        let mode = match mode {
            RoutingMode::Shadow => 0,
            RoutingMode::Bypass => 1,
            RoutingMode::Active => 2,
        };
        self.mode.store(mode, Ordering::Relaxed);
        self.percent.store(rollout_percent.0, Ordering::Relaxed);
    }

    /// Disables exactly these actions, from the next request on. Returns those that were disabled before.
    pub fn set_disabled(&self, disabled_actions: ActionSet) -> ActionSet {
        ActionSet::from_bits(self.disabled.swap(disabled_actions.bits(), Ordering::Relaxed))
    }

    /// Disables one more action, atomically with respect to other changes.
    pub fn disable(&self, action: Action) {
        self.disabled.fetch_or(ActionSet::NONE.with(action).bits(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use strum::VariantArray as _;

    use super::*;
    use vocabulary::{ModelId, TenantId};

    fn sessions() -> impl Iterator<Item = SessionId> {
        (0..1000).map(|i| SessionId::of_key(&TenantId::default(), &ModelId::from("m"), &i.to_string()))
    }

    #[test]
    fn a_rolled_out_session_stays_rolled_out_as_the_percentage_grows() {
        let at = |percent| RoutingSettings {
            mode: RoutingMode::Active,
            rollout_percent: Percent(percent),
            ..RoutingSettings::default()
        };
        let owned = |percent| sessions().filter(|s| at(percent).mode_of(*s) == RoutingMode::Active).collect::<Vec<_>>();
        let (few, more) = (owned(20), owned(60));
        assert!((150..250).contains(&few.len()), "{}", few.len());
        assert!((550..650).contains(&more.len()), "{}", more.len());
        assert!(few.iter().all(|session| more.contains(session)));
        assert_eq!((owned(0).len(), owned(100).len()), (0, 1000));
    }

    #[test]
    fn both_arms_are_equal_stable_subsets_of_the_rolled_out_sessions() {
        let at = |rollout, control| RoutingSettings {
            rollout_percent: Percent(rollout),
            control_percent: Percent(control),
            ..RoutingSettings::default()
        };
        let in_arm = |routing: RoutingSettings, arm| {
            sessions().filter(|session| routing.arm_of(*session) == arm).collect::<Vec<_>>()
        };
        let (all, half) = (at(100, 20), at(50, 20));
        for arm in ComparisonArm::VARIANTS.iter().copied() {
            let (all, half) = (in_arm(all, Some(arm)), in_arm(half, Some(arm)));
            assert!((150..250).contains(&all.len()) && (70..130).contains(&half.len()), "{} {}", all.len(), half.len());
            assert!(half.iter().all(|session| all.contains(session)), "stable as the share grows");
        }
        for session in sessions() {
            let expected = match all.arm_of(session) {
                Some(ComparisonArm::Control) => RoutingMode::Shadow,
                Some(ComparisonArm::Treatment) | None => RoutingMode::Active,
            };
            assert_eq!(all.mode_of(session), expected);
            assert!(half.mode_of(session) != RoutingMode::Bypass || half.arm_of(session).is_none());
            assert_eq!(RoutingSettings { mode: RoutingMode::Shadow, ..all }.arm_of(session), None);
        }
        assert_eq!(in_arm(at(100, 0), None).len(), 1_000);
        assert_eq!(in_arm(at(100, 50), None).len(), 0);
    }

    #[test]
    fn shadow_and_bypass_apply_to_every_session() {
        for mode in [RoutingMode::Shadow, RoutingMode::Bypass] {
            let routing = RoutingSettings { mode, rollout_percent: Percent(10), ..RoutingSettings::default() };
            assert!(sessions().all(|session| routing.mode_of(session) == mode));
        }
    }

    #[test]
    fn routing_settings_take_effect_when_set() {
        let live = LiveRouting::new(RoutingSettings::default());
        for mode in [RoutingMode::Shadow, RoutingMode::Bypass, RoutingMode::Active] {
            live.set(mode, Percent(7));
            assert_eq!(live.get(), RoutingSettings { mode, rollout_percent: Percent(7), ..RoutingSettings::default() });
        }
    }

    #[test]
    fn actions_are_disabled_together_or_one_by_one() {
        let live = LiveRouting::new(RoutingSettings::default());
        let fetch = ActionSet::NONE.with(Action::ArtifactFetch);
        assert_eq!(live.set_disabled(fetch), ActionSet::NONE);
        live.disable(Action::StateMigration);
        assert_eq!(live.get().disabled, fetch.with(Action::StateMigration));
        live.set(RoutingMode::Shadow, Percent(7));
        assert_eq!(live.set_disabled(ActionSet::NONE), fetch.with(Action::StateMigration), "the dial leaves switches");
        assert_eq!(live.get().disabled, ActionSet::NONE);
    }

    #[test]
    fn a_percentage_above_a_hundred_is_rejected_with_what_is_accepted() {
        let error = serde_json::from_str::<RoutingSettings>(r#"{"mode":"active","rollout_percent":101}"#).unwrap_err();
        assert!(error.to_string().contains("0 to 100"), "{error}");
    }
}
