//! The front door: from the client's bytes to the engine's and back. `pipeline` names the eight steps.

pub mod demo;
pub mod pipeline;
