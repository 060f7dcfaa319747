//! A deterministic simulation of the quorum: the real Raft, state machine, leader's duties and ledger, over a simulated
//! network, disks and clocks, with everything that goes wrong drawn from one seed.
//!
//! The same seed is the same run, to the bit. Nothing here reads a real clock or depends on the order of a hash map.

pub mod book;
pub mod checks;
pub mod client;
pub mod disk;
pub mod fabric;
pub mod faults;
pub mod log_store;
pub mod network;
pub mod node;
pub mod onlookers;
pub mod operator;
pub mod people;
pub mod plan;
pub mod process;
pub mod releases;
pub mod report;
pub mod rng;
pub mod run;
pub mod runtime;
pub mod script;
pub mod snapshots;
pub mod world;

pub use run::{Report, run, tell};
