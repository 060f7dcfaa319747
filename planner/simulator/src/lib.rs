//! Trace-driven simulator in virtual time: replays recorded traffic against a fleet of modelled engines, under every
//! policy.
//!
//! Pure: text and values in, figures out. Equal inputs and seeds give equal figures. Opens no file and reads no clock.

mod cache_strategy;
mod hardware_profile;
mod kv_model;
pub mod policies;
pub mod report;
mod seeded_rng;
mod simulation;
pub mod stats;
pub mod trace;

pub use cache_strategy::{CacheStrategy, UnknownCacheStrategy};
pub use hardware_profile::{HardwareProfile, LinkSpeed};
pub use kv_model::{KvModel, KvModelError};
pub use seeded_rng::SeededRng;
pub use simulation::{NEXT_SESSION_DELAY, SESSION_START_INTERVAL, SetupError, Simulation, SimulationSetup};

#[cfg(test)]
mod tests;
