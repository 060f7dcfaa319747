//! Measures the overhead of OwnerServe per request beside a direct connection, HAProxy, and those other routers that
//! are installed, in one run.
//!
//!     bench [--quick] [--check] [--json FILE] [--bin OWNERSERVE] [--before OWNERSERVE] [--sizes KIB,...]
//!           [--streams COUNT,...] [--targets NAME,...] [--windows COUNT]
//!
//! Differences are taken between measurements close in time: per request for latency, per window for CPU. Absolute
//! times say little on a shared machine. Fails if a streamed response takes 40 ms longer than on a direct connection;
//! with `--check` also if OwnerServe's CPU time by HAProxy's is above its bound.

mod bodies;
mod bounds;
mod client;
mod error;
mod measure;
mod options;
mod process;
mod report;
mod streams;
mod worker;

use std::io::Write;
use std::process::ExitCode;

pub(crate) use error::ProxyBenchError;
use options::Options;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let done = runtime.map_err(ProxyBenchError::system("start a runtime")).and_then(|runtime| {
        let options = Options::parse(std::env::args().skip(1))?;
        runtime.block_on(run(&options))
    });
    // Write errors are ignored: there is nobody left to tell if stderr is gone.
    match done {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            let _ = writeln!(std::io::stderr(), "{}", faults.join("\n"));
            ExitCode::FAILURE
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures, prints, and returns the faults.
async fn run(options: &Options) -> Result<Vec<String>, ProxyBenchError> {
    let workers = [worker::start()?, worker::start()?];
    let targets = process::BenchTargets::start(workers, options).await?;
    let results = measure::all(&targets, options).await?;
    let mut out = std::io::stdout();
    out.write_all(report::table(&results).as_bytes()).map_err(ProxyBenchError::system("print the table"))?;
    if let Some(path) = &options.json {
        let json = serde_json::to_string_pretty(&results).expect("numbers and names make JSON");
        std::fs::write(path, json).map_err(ProxyBenchError::system(path.display().to_string()))?;
    }
    let mut faults = results.stalls();
    if options.check {
        faults.extend(bounds::exceeded(&results));
    }
    Ok(faults)
}
