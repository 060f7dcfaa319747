//! How much of the traffic OwnerServe decides, and by which actions: mode, rollout share and switches, all changeable at
//! run time.

use std::sync::atomic::{AtomicU8, Ordering};

use planner::{Action, Actions};
use serde::{Deserialize, Serialize};
use vocabulary::SessionId;

/// Who decides where a step goes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Plans are made and recorded; the bypass policy routes.
    Shadow,
    /// The bypass policy routes; nothing is planned and the ledger is not asked.
    Sticky,
    /// The planner routes.
    #[default]
    Own,
}

impl Mode {
    /// The word for logs, metrics and the API.
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Shadow => "shadow",
            Mode::Sticky => "sticky",
            Mode::Own => "own",
        }
    }
}

/// Part of the sessions, in per cent.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(try_from = "u8", into = "u8")]
pub struct Percent(u8);

impl Percent {
    /// Everybody.
    pub const ALL: Self = Self(100);
}

impl Default for Percent {
    fn default() -> Self {
        Self::ALL
    }
}

/// A share beyond 100 %.
#[derive(Debug, thiserror::Error)]
#[error("{0} is not a percentage: 0 to 100 is accepted")]
pub struct NotAPercentage(u8);

impl TryFrom<u8> for Percent {
    type Error = NotAPercentage;

    fn try_from(share: u8) -> Result<Self, NotAPercentage> {
        if share <= 100 { Ok(Self(share)) } else { Err(NotAPercentage(share)) }
    }
}

impl From<Percent> for u8 {
    fn from(percent: Percent) -> u8 {
        percent.0
    }
}

/// The setting as the configuration and the operator API write it.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Steering {
    /// Who decides.
    pub mode: Mode,
    /// In mode `own`, the share of sessions whose steps the planner routes. Stable per session.
    pub rollout_percent: Percent,
    /// Actions that are switched off, beside those that the planner's policy switches off.
    pub disabled: Actions,
}

impl Steering {
    /// Who decides for this session.
    pub fn mode_of(self, session: SessionId) -> Mode {
        // The id is a hash already; its high half is not used for placement.
        let place = ((session.0 >> 64) % 100) as u8;
        match self.mode {
            Mode::Own if place >= self.rollout_percent.0 => Mode::Sticky,
            mode => mode,
        }
    }
}

/// The steering that is in force, readable without a lock.
#[derive(Debug)]
pub struct LiveSteering {
    mode: AtomicU8,
    percent: AtomicU8,
    disabled: AtomicU8,
}

impl LiveSteering {
    /// In force from the start.
    pub fn new(steering: Steering) -> Self {
        let live = Self { mode: AtomicU8::new(0), percent: AtomicU8::new(0), disabled: AtomicU8::new(0) };
        live.turn(steering.mode, steering.rollout_percent);
        live.set_disabled(steering.disabled);
        live
    }

    /// What is in force.
    pub fn get(&self) -> Steering {
        let mode = match self.mode.load(Ordering::Relaxed) {
            0 => Mode::Shadow,
            1 => Mode::Sticky,
            _ => Mode::Own,
        };
        Steering {
            mode,
            rollout_percent: Percent(self.percent.load(Ordering::Relaxed)),
            disabled: Actions::from_bits(self.disabled.load(Ordering::Relaxed)),
        }
    }

    /// Puts another mode and share in force, from the next request on.
    pub fn turn(&self, mode: Mode, rollout_percent: Percent) {
        let mode = match mode {
            Mode::Shadow => 0,
            Mode::Sticky => 1,
            Mode::Own => 2,
        };
        self.mode.store(mode, Ordering::Relaxed);
        self.percent.store(rollout_percent.0, Ordering::Relaxed);
    }

    /// Switches exactly these actions off, from the next request on. Those that were off before.
    pub fn set_disabled(&self, disabled: Actions) -> Actions {
        Actions::from_bits(self.disabled.swap(disabled.bits(), Ordering::Relaxed))
    }

    /// Switches one more action off, whatever else is changed meanwhile.
    pub fn switch_off(&self, action: Action) {
        self.disabled.fetch_or(Actions::NONE.with(action).bits(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vocabulary::{ModelId, TenantId};

    fn sessions() -> impl Iterator<Item = SessionId> {
        (0..1000).map(|i| SessionId::of_key(&TenantId::default(), &ModelId::from("m"), &i.to_string()))
    }

    #[test]
    fn a_session_that_was_rolled_out_stays_so_when_the_share_grows() {
        let at = |percent| Steering { mode: Mode::Own, rollout_percent: Percent(percent), ..Steering::default() };
        let owned = |percent| sessions().filter(|s| at(percent).mode_of(*s) == Mode::Own).collect::<Vec<_>>();
        let (few, more) = (owned(20), owned(60));
        assert!((150..250).contains(&few.len()), "{}", few.len());
        assert!((550..650).contains(&more.len()), "{}", more.len());
        assert!(few.iter().all(|session| more.contains(session)));
        assert_eq!((owned(0).len(), owned(100).len()), (0, 1000));
    }

    #[test]
    fn shadow_and_sticky_are_for_everybody() {
        for mode in [Mode::Shadow, Mode::Sticky] {
            let steering = Steering { mode, rollout_percent: Percent(10), ..Steering::default() };
            assert!(sessions().all(|session| steering.mode_of(session) == mode));
        }
    }

    #[test]
    fn what_is_set_is_what_is_in_force() {
        let live = LiveSteering::new(Steering::default());
        for mode in [Mode::Shadow, Mode::Sticky, Mode::Own] {
            live.turn(mode, Percent(7));
            assert_eq!(live.get(), Steering { mode, rollout_percent: Percent(7), disabled: Actions::NONE });
        }
    }

    #[test]
    fn actions_are_switched_off_together_or_one_more() {
        let live = LiveSteering::new(Steering::default());
        let fetch = Actions::NONE.with(Action::ArtifactFetch);
        assert_eq!(live.set_disabled(fetch), Actions::NONE);
        live.switch_off(Action::StateMigration);
        assert_eq!(live.get().disabled, fetch.with(Action::StateMigration));
        live.turn(Mode::Shadow, Percent(7));
        assert_eq!(live.set_disabled(Actions::NONE), fetch.with(Action::StateMigration), "the dial leaves switches");
        assert_eq!(live.get().disabled, Actions::NONE);
    }

    #[test]
    fn a_share_beyond_a_hundred_is_refused_with_what_is_accepted() {
        let error = serde_json::from_str::<Steering>(r#"{"mode":"own","rollout_percent":101}"#).unwrap_err();
        assert!(error.to_string().contains("0 to 100"), "{error}");
    }
}
