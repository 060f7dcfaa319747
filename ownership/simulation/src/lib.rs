//! Deterministic simulation of the quorum: the real Raft, state machine, leader tasks and ledger, on a simulated
//! network, disks and clocks, with all faults drawn from one seed.
//!
//! The same seed gives the same run, bit for bit. Nothing here reads a real clock or depends on the order of a hash
//! map.

mod checks;
mod client;
mod disk;
mod faults;
mod log_store;
mod network_model;
mod operator;
mod process;
mod property;
mod releases;
pub mod report;
mod rng;
mod run;
mod run_plan;
mod run_recorder;
mod runtime;
mod script;
mod sim_network;
mod sim_node;
mod snapshot_store;
mod watchers;
mod workload;
mod world;

pub use run::{SeedReport, run, run_with_log};
