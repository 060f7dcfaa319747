//! Measures a snapshot of a fleet with 64 workers: `cargo run --release -p workers-shim --example snapshot_speed`.

use std::hint::black_box;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use residency::RoutedBlockLimits;
use vocabulary::{DpRank, Tokens, WorkerRole};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::{Fleet, FleetOptions, ProbeSettings, WorkerDefinition};

const WORKERS: u16 = 64;
const ROUNDS: u32 = 20_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let worker = |port: u16| WorkerDefinition::at(&format!("http://127.0.0.1:{}", 1 + port), WorkerRole::Hybrid);
    let fleet = Fleet::start(FleetOptions {
        workers: (0..WORKERS).map(worker).collect(),
        pace: ProbeSettings { every: Duration::from_secs(60), ..ProbeSettings::default() },
        index: SharedIndex::new(),
        rules: Arc::new(|_| None),
        liveness: None,
        routed_limits: RoutedBlockLimits::default(),
        snapshots: None,
        extra_ranks: 16,
    })?;
    let first = fleet.snapshot()[0].id;
    let unchanged = time_each(|| drop(black_box(fleet.snapshot())));
    let changed = time_each(|| {
        drop(fleet.dispatch(first, DpRank(0), Tokens(1)));
        drop(black_box(fleet.snapshot()));
    });
    writeln!(std::io::stdout(), "{WORKERS} workers: unchanged {unchanged:?}, after a change {changed:?}")?;
    Ok(())
}

fn time_each(mut step: impl FnMut()) -> Duration {
    let started = Instant::now();
    (0..ROUNDS).for_each(|_| step());
    started.elapsed() / ROUNDS
}
