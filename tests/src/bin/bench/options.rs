//! How long and how much is measured.

use std::path::PathBuf;
use std::time::Duration;

use crate::ProxyBenchError;

/// What the command line says.
pub(crate) struct Options {
    /// Where the results go as JSON.
    pub(crate) json: Option<PathBuf>,
    /// The binary that is measured.
    pub(crate) binary: PathBuf,
    /// Requests a target and size for latency.
    pub(crate) requests: usize,
    /// Windows a target and size for CPU.
    pub(crate) windows: usize,
    /// How long a window is.
    pub(crate) window: Duration,
}

impl Options {
    /// Reads it.
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
