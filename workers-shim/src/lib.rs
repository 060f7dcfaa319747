//! Engines as they are: their dialects, their events and metrics, the fleet made of them, and simulated ones.

pub mod sim;
