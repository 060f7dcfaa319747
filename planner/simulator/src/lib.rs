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

pub use cache::{Cache, UnknownCache};
pub use chance::Chance;
pub use kv::{KvError, KvModel};
pub use spec::{LinkSpeed, Spec};
pub use world::{NEXT_SESSION, START_GAP, Setup, SetupError, World};

#[cfg(test)]
mod tests;
