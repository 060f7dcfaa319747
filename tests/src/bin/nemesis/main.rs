//! Tests real processes under real faults: partitions, kills, pauses, full, slow and failing disks, wrong clocks,
//! resource shortages, damaged logs and snapshots, and backups, while clients write and check every reply.
//!
//!     nemesis [--quick] [--seed N] [--minutes M] [--only NAME]... [-o FILE] [--bin OWNERSERVE] [--clients N] [--rate
//!     N]
//!
//! Needs root for network namespaces; without them it runs on loopback and reports so. Needs a C compiler for disk
//! and clock faults; without one it skips those nemeses and reports so. Fails if a guarantee is violated or the load
//! was too small to show that it holds.

mod api_client;
mod check;
mod cluster;
mod error;
mod fault_rng;
mod faults;
mod formation;
mod history;
mod http;
mod load;
mod node;
mod options;
mod registers;
mod report;
mod run;
mod snapshot;
mod streams;
mod test_network;
mod testbed;
mod throughput;
mod trial;
mod watch;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use error::NemesisError;
use options::Options;

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| {
        // From here on the program runs inside its own namespaces, or knows why it does not.
        let without_namespaces = test_network::enter_namespaces()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(NemesisError::system("start a runtime"))?;
        runtime.block_on(run::run(&options, without_namespaces))
    });
    // Write errors are ignored: there is nobody left to tell if stderr is gone.
    match done {
        Ok(verdict) if verdict.is_empty() => ExitCode::SUCCESS,
        Ok(verdict) => {
            let _ = writeln!(std::io::stderr(), "nemesis: {verdict}");
            ExitCode::FAILURE
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "nemesis: {error}");
            ExitCode::FAILURE
        }
    }
}
