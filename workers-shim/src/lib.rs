//! Everything about engines: their APIs and KV connectors, events and metrics, the fleet of workers, and a simulated
//! worker.

pub mod engine_api;
pub mod events;
pub mod fleet;
pub mod scrape;
pub mod sim;
mod zmtp;

pub use zmtp::{ZmtpError, frames_of};
