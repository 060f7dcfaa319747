//! The proxy: from the client's bytes to the engine's and back.
//!
//! `front_door` serves the clients' listener, and `pipeline` names the eight stages of a generation request. Below both lie
//! the records, stores and handles that the operator API needs as well: it may use all of them, but never a stage.
//! The crate knows the ledger, the planner and the workers. It knows no configuration file, only each part's settings.

pub mod adapters;
pub mod admission_queue;
pub mod auth;
mod body_buffers;
pub mod caches;
pub mod calibration;
pub mod catalog;
pub mod checkpoints;
pub mod client_request;
pub mod decisions;
pub mod discovery;
pub mod drains;
pub mod erasure;
pub mod error;
pub mod forward;
pub mod front_door;
pub mod guardrail;
pub mod host_check;
pub mod identified_request;
pub mod kv_reservation;
pub mod ledger_access;
pub mod leg_outcome;
pub mod legs;
pub mod liveness_watch;
pub mod memory_budget;
pub mod model_list;
pub mod offload_pool;
pub mod outliers;
pub mod passthrough;
pub mod peer_exchange;
pub mod pipeline;
pub mod prefix_cache;
pub mod prefix_mover;
pub mod prefix_replication;
pub mod prompts;
pub mod quotas;
pub mod receipt;
pub mod renamed_keys;
pub mod request_body_cache;
pub mod request_id;
pub mod request_parser;
pub mod request_states;
pub mod retries;
pub mod routing;
pub mod salt_proof;
pub mod salts;
pub mod server;
pub mod session_key;
pub mod shared_cache;
pub mod shutdown_signal;
pub mod single_flight;
pub mod stored_responses;
pub mod telemetry;
pub mod tenant_isolation;
pub mod token_ids;
pub mod toml_errors;
pub mod toml_file;
pub mod transfer_check;
pub mod transfer_checker;
pub mod upstream;
pub mod usage_bounds;
pub mod watched_files;
pub mod worker_client;
pub mod worker_pool;

// Unit tests start whole routers. A development dependency on crate `router` would link a second `proxy`, whose types are
// others. So the crates that a router is composed of compile into this test build, and have no test builds of their own.
#[cfg(test)]
extern crate self as proxy;
#[cfg(test)]
use composition_sources::{
    app_state, certificate_files, cli, composition, config, exposure, file_modes, reference, serve, testing,
};
#[cfg(test)]
use lab::{demo, sim_command, simulate_command, trace_command, validate_sim, what_if_command};
#[cfg(test)]
#[path = "../../ctl/src/lib.rs"]
#[allow(dead_code, unreachable_pub, reason = "another crate's root makes it public, and tests use a part of it")]
mod ctl;
#[cfg(test)]
#[path = "../../lab/src/lib.rs"]
#[allow(dead_code, unreachable_pub, reason = "another crate's root makes it public, and tests use a part of it")]
mod lab;
#[cfg(test)]
#[path = "../../operator/src/lib.rs"]
#[allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "another crate's root makes it public, and tests use a part of it"
)]
mod operator;
#[cfg(test)]
#[path = "../../src"]
#[allow(dead_code, unreachable_pub, reason = "another crate's root makes it public, and tests use a part of it")]
mod composition_sources {
    pub(crate) mod app_state;
    pub(crate) mod certificate_files;
    pub(crate) mod cli;
    pub(crate) mod composition;
    pub(crate) mod config;
    pub(crate) mod exposure;
    pub(crate) mod file_modes;
    pub(crate) mod reference;
    pub(crate) mod serve;
    pub(crate) mod testing;
    pub(crate) mod tests;
}
