//! Time of one durable write on this disk, measured in the folder that all other benchmarks write to.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::LedgerBenchError;
use crate::load::{LoadStats, summarize};

/// Appends 512 bytes and calls fdatasync, repeatedly during `window`.
pub(crate) fn fdatasync(folder: &Path, window: Duration) -> Result<LoadStats, LedgerBenchError> {
    let path = folder.join("fdatasync");
    let probe = || {
        let mut file = File::create(&path)?;
        let (mut latencies, started) = (Vec::new(), Instant::now());
        while started.elapsed() < window {
            let before = Instant::now();
            file.write_all(&[7; 512])?;
            file.sync_data()?;
            latencies.push(before.elapsed());
        }
        let took = started.elapsed();
        std::fs::remove_file(&path)?;
        Ok(summarize(latencies, took))
    };
    probe().map_err(LedgerBenchError::system("measure fdatasync"))
}
