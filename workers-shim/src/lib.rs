//! Engines as they are: their dialects, their events and metrics, the fleet made of them, and simulated ones.

pub mod engine_api;
pub mod events;
pub mod fleet;
pub mod scrape;
pub mod sim;
mod zmtp;

pub use zmtp::{ZmtpError, frames_of};
