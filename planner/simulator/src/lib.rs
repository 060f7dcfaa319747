//! Trace-driven simulation in virtual time: recorded traffic against a fleet of modelled engines, under every policy.
//!
//! Pure: text and values in, figures out. Equal inputs and seeds give equal figures. It opens no file and reads no clock.

mod cache;
mod chance;
mod kv;
pub mod policies;
pub mod report;
mod spec;
pub mod stats;
pub mod trace;
mod world;

pub use cache::{CacheStrategy, UnknownCacheStrategy};
pub use chance::SeededRng;
pub use kv::{KvModel, KvModelError};
pub use spec::{HardwareProfile, LinkSpeed};
pub use world::{NEXT_SESSION_DELAY, SESSION_START_INTERVAL, SetupError, Simulation, SimulationSetup};

#[cfg(test)]
mod tests;
