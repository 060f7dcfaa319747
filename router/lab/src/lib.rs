//! The lab: what shows and explains the router without serving anybody.
//!
//! It has the demo, the simulator's commands, traces, what-if runs over decision logs, the validation of the simulator against real
//! routers, and the simulated worker's command. It may start processes of this binary, read files and write to the
//! terminal. It knows the planner, the simulator and the simulated worker, and of the proxy only records and catalog.

pub mod demo;
pub mod sim_command;
pub mod simulate_command;
pub mod trace_command;
pub mod validate_sim;
pub mod what_if_command;

// The test build of `proxy` has the crate as a module.
#[cfg(not(test))]
pub(crate) use ::ctl;
