//! Trace-driven simulator in virtual time: replays recorded traffic against a fleet of modelled engines, under every
//! policy.
//!
//! Pure: text and values in, figures out. Equal inputs and seeds give equal figures. Opens no file and reads no clock.

mod hardware_profile;
mod kv_model;
pub mod policies;
pub mod report;
mod restore_plan;
mod seeded_rng;
mod simulation;
pub mod stats;
mod tier_policy;
pub mod trace;

pub use hardware_profile::{HardwareProfile, LinkSpeed};
pub use kv_model::{KvModel, KvModelError};
pub use restore_plan::{PrefetchMode, RestorePlan, RestorePrices};
pub use seeded_rng::SeededRng;
pub use simulation::{NEXT_SESSION_DELAY, SESSION_START_INTERVAL, SetupError, Simulation, SimulationSetup};
pub use tier_policy::{TierPolicy, UnknownTierPolicy};

#[cfg(test)]
mod tests;
