//! Command line of the benchmark.

use std::path::PathBuf;
use std::time::Duration;

use crate::ProxyBenchError;

/// Parsed command line.
pub(crate) struct Options {
    /// File for the results as JSON.
    pub(crate) json: Option<PathBuf>,
    /// Binary to measure.
    pub(crate) binary: PathBuf,
    /// Latency requests per target and size.
    pub(crate) requests: usize,
    /// CPU windows per target and size.
    pub(crate) windows: usize,
    /// Length of a window.
    pub(crate) window: Duration,
}

impl Options {
    /// Parses the command line.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, ProxyBenchError> {
        let own = std::env::current_exe().map_err(ProxyBenchError::system("find this program"))?;
        let mut options = Options {
            json: None,
            binary: own.with_file_name("ownerserve"),
            requests: 200,
            windows: 3,
            window: Duration::from_millis(2000),
        };
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| ProxyBenchError::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--quick" => {
                    options.requests = 60;
                    options.windows = 1;
                    options.window = Duration::from_millis(1000);
                }
                "--json" => options.json = Some(value()?.into()),
                "--bin" => options.binary = value()?.into(),
                _ => return Err(ProxyBenchError::Usage(format!("unknown option {argument}"))),
            }
        }
        Ok(options)
    }
}
