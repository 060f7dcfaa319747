//! Closed-loop clients: each sends its next write once the last is acknowledged.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::LedgerBenchError;

/// Rate and latency percentiles.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct LoadStats {
    /// Acknowledged writes per second.
    pub(crate) rate: f64,
    /// Median in microseconds.
    pub(crate) p50: f64,
    /// 99th percentile in microseconds.
    pub(crate) p99: f64,
}

const WARM: u8 = 0;
const COUNT: u8 = 1;
const STOPPED: u8 = 2;

/// Runs `clients` for `window`, after a short warm-up that does not count. `write` gets the client and its counter.
pub(crate) async fn run<F>(
    clients: u64,
    window: Duration,
    write: impl Fn(u64, u64) -> F + Clone + Send + 'static,
) -> Result<LoadStats, LedgerBenchError>
where
    F: Future<Output = Result<(), LedgerBenchError>> + Send,
{
    let phase = Arc::new(AtomicU8::new(WARM));
    let client = |client: u64| {
        let (write, phase) = (write.clone(), phase.clone());
        tokio::spawn(async move {
            let mut latencies = Vec::new();
            for count in 0.. {
                let started = phase.load(Relaxed);
                if started == STOPPED {
                    break;
                }
                let start = Instant::now();
                write(client, count).await?;
                if started == COUNT && phase.load(Relaxed) == COUNT {
                    latencies.push(start.elapsed());
                }
            }
            Ok::<_, LedgerBenchError>(latencies)
        })
    };
    let tasks: Vec<_> = (0..clients).map(client).collect();
    tokio::time::sleep(window / 4).await;
    phase.store(COUNT, Relaxed);
    let started = Instant::now();
    tokio::time::sleep(window).await;
    phase.store(STOPPED, Relaxed);
    let took = started.elapsed();
    let mut latencies = Vec::new();
    for task in tasks {
        latencies.extend(task.await.map_err(|error| LedgerBenchError::Usage(error.to_string()))??);
    }
    Ok(summarize(latencies, took))
}

/// Summarizes latencies.
pub(crate) fn summarize(mut latencies: Vec<Duration>, took: Duration) -> LoadStats {
    latencies.sort_unstable();
    let at = |share: f64| {
        let place = ((latencies.len() as f64 - 1.0) * share).max(0.0) as usize;
        latencies.get(place).map_or(0.0, |latency| latency.as_secs_f64() * 1e6)
    };
    LoadStats { rate: latencies.len() as f64 / took.as_secs_f64(), p50: at(0.5), p99: at(0.99) }
}

/// Combines several short runs, because other load on the machine varies: mean rate, median of their latencies.
pub(crate) fn combine_runs(runs: &[LoadStats]) -> LoadStats {
    let median = |of: fn(&LoadStats) -> f64| {
        let mut all: Vec<f64> = runs.iter().map(of).collect();
        all.sort_unstable_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or_default()
    };
    let rate = runs.iter().map(|run| run.rate).sum::<f64>() / runs.len().max(1) as f64;
    LoadStats { rate, p50: median(|run| run.p50), p99: median(|run| run.p99) }
}
