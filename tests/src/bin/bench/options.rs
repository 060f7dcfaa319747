//! Command line of the benchmark.

use std::path::PathBuf;
use std::time::Duration;

use crate::ProxyBenchError;

/// Body sizes in KiB that are measured unless `--sizes` names others.
const SIZES_KIB: [usize; 4] = [1, 32, 128, 512];

/// Parsed command line.
pub(crate) struct Options {
    /// File for the results as JSON.
    pub(crate) json: Option<PathBuf>,
    /// Binary to measure.
    pub(crate) binary: PathBuf,
    /// Another binary to measure beside it, such as that of the commit before.
    pub(crate) before: Option<PathBuf>,
    /// Folder with a virtual environment of each peer that is installed.
    pub(crate) peers: PathBuf,
    /// Folder of the model by whose tokens prompts are identified.
    pub(crate) model: PathBuf,
    /// Body sizes in bytes; none without the measurements of bodies.
    pub(crate) sizes: Vec<usize>,
    /// Numbers of simultaneous paced streams.
    pub(crate) streams: Vec<usize>,
    /// Names of the measured targets beside the references; empty for all.
    pub(crate) targets: Vec<String>,
    /// Whether a ratio above its bound fails the run.
    pub(crate) check: bool,
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
            before: None,
            peers: "target/peers".into(),
            model: "configs/models/tiny".into(),
            sizes: SIZES_KIB.map(|size| size << 10).to_vec(),
            streams: vec![1_000, 4_000],
            targets: Vec::new(),
            check: false,
            requests: 200,
            windows: 5,
            window: Duration::from_millis(2000),
        };
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().ok_or_else(|| ProxyBenchError::Usage(format!("{argument} needs a value")));
            match argument.as_str() {
                "--quick" => {
                    options.requests = 60;
                    options.window = Duration::from_millis(1000);
                }
                "--check" => options.check = true,
                "--json" => options.json = Some(value()?.into()),
                "--bin" => options.binary = value()?.into(),
                "--before" => options.before = Some(value()?.into()),
                "--sizes" => options.sizes = numbers(&value()?)?.iter().map(|size| size << 10).collect(),
                "--streams" => options.streams = numbers(&value()?)?,
                "--targets" => options.targets = targets(&value()?)?,
                "--windows" => options.windows = numbers(&value()?)?.first().map_or(1, |windows| (*windows).max(1)),
                _ => return Err(ProxyBenchError::Usage(format!("unknown option {argument}"))),
            }
        }
        Ok(options)
    }

    /// Returns whether a target is measured.
    pub(crate) fn includes(&self, target: &str) -> bool {
        self.targets.is_empty() || self.targets.iter().any(|name| name == target)
    }
}

/// Names that `--targets` accepts.
const TARGETS: [&str; 6] =
    ["vllm-router", "sglang-router", "ownerserve", "ownerserve tokens", "ownerserve bypass", "ownerserve before"];

/// Reads names of targets with commas between them.
fn targets(list: &str) -> Result<Vec<String>, ProxyBenchError> {
    let name = |part: &str| match TARGETS.contains(&part) {
        true => Ok(part.to_owned()),
        false => Err(ProxyBenchError::Usage(format!("{part:?} is no target; accepted: {}", TARGETS.join(", ")))),
    };
    list.split(',').filter(|part| !part.is_empty()).map(name).collect()
}

/// Reads numbers with commas between them; an empty list is accepted.
fn numbers(list: &str) -> Result<Vec<usize>, ProxyBenchError> {
    let number = |part: &str| part.trim().parse().map_err(|_| ProxyBenchError::Usage(format!("{part:?} is no number")));
    list.split(',').filter(|part| !part.is_empty()).map(number).collect()
}
