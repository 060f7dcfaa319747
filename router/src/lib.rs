//! The front door: from the client's bytes to the engine's and back. `pipeline` names the eight steps.

pub mod auth;
pub mod catalog;
mod certificates;
pub mod checkpoints;
pub mod cli;
pub mod config;
mod ctl;
pub mod demo;
mod drains;
pub mod error;
pub mod exchange;
mod following;
pub mod forward;
pub mod gateway;
pub mod identity;
pub mod incoming;
mod models;
pub mod operator;
pub mod pipeline;
pub mod proxy;
pub mod quotas;
pub mod relay;
pub mod remembered;
pub mod resources;
pub mod rooms;
pub mod roster;
pub mod salts;
pub mod serve;
pub mod server;
pub mod sim_command;
mod simulate_command;
pub mod soft_state;
pub mod telemetry;
#[cfg(test)]
mod testing;
mod trace_command;
pub mod upstream;
