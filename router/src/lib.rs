//! The composing crate: from a configuration to parts, from parts to a running router, and the command line.
//!
//! It alone knows the configuration. `config::parts` cuts it into the settings of each part, `app_state` and
//! `composition` connect the parts, and `serve` runs them behind two listeners. The parts are in `proxy`, `operator`,
//! `ctl` and `lab`; their tests are in the test build of `proxy`.

pub mod app_state;
mod certificate_files;
pub mod cli;
pub mod composition;
pub mod config;
mod exposure;
mod file_modes;
mod reference;
pub mod serve;

// The test build of `proxy` has all these as modules of its root.
pub(crate) use ::{ctl, operator};
pub(crate) use lab::{demo, sim_command, simulate_command, trace_command, validate_sim, what_if_command};
