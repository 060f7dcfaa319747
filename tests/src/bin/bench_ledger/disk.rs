//! What this disk needs for one durable write, measured in the folder that everything else writes to.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use crate::BenchError;
use crate::load::{Measured, measured};

/// Appends 512 bytes and makes them durable, again and again.
pub(crate) fn fdatasync(folder: &Path, times: usize) -> Result<Measured, BenchError> {
    let path = folder.join("fdatasync");
    let probe = || {
        let mut file = File::create(&path)?;
        let (mut latencies, started) = (Vec::with_capacity(times), Instant::now());
        for _ in 0..times {
            let before = Instant::now();
            file.write_all(&[7; 512])?;
            file.sync_data()?;
            latencies.push(before.elapsed());
        }
        let took = started.elapsed();
        std::fs::remove_file(&path)?;
        Ok(measured(latencies, took))
    };
    probe().map_err(BenchError::system("measure fdatasync"))
}
