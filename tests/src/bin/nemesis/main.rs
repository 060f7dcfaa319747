//! Real processes under real faults: partitions, kills, stops, full, slow and failing disks, odd clocks, shortages, damaged
//! logs and snapshots, and backups, while clients write and check every answer.
//!
//!     nemesis [--quick] [--seed N] [--minutes M] [--only NAME]... [-o FILE] [--bin OWNERSERVE] [--clients N] [--rate N]
//!
//! It needs root for network namespaces; without them it runs on loopback, and says so. It needs a C compiler to come
//! between nodes and their disks and clocks; without one it leaves those nemeses out, and says so. Fails when a promise is broken or
//! the load was too small to show that it is not.

mod api_client;
mod check;
mod cluster;
mod fault_rng;
mod faults;
mod formation;
mod history;
mod http;
mod load;
mod node;
mod options;
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

use options::Options;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NemesisError {
    /// The command line is wrong.
    #[error("{0}; usage: nemesis [--quick] [--seed N] [--minutes M] [--only NAME]... [-o FILE] [--bin OWNERSERVE]")]
    Usage(String),
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The answer.
        source: std::io::Error,
    },
    /// Somebody said or did something else than expected.
    #[error("{who}: {got}")]
    Answer {
        /// Who.
        who: String,
        /// What.
        got: String,
    },
    /// Something was waited for in vain.
    #[error("waited too long for {what}")]
    Late {
        /// For what.
        what: String,
    },
}

impl NemesisError {
    pub(crate) fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> NemesisError {
        let what = what.into();
        move |source| NemesisError::System { what, source }
    }

    pub(crate) fn usage(what: impl Into<String>) -> NemesisError {
        NemesisError::Usage(what.into())
    }
}

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| {
        // From here on this program is inside its own namespaces, or knows why it is not.
        let without_namespaces = test_network::enter_namespaces()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(NemesisError::system("start a runtime"))?;
        runtime.block_on(run::run(&options, without_namespaces))
    });
    // Nothing is left to do when the terminal is gone too.
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
