//! How long a fleet of 64 workers takes to be looked at: `cargo run --release -p workers-shim --example snapshot_speed`.

use std::hint::black_box;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use residency::RoutedLimits;
use vocabulary::{DpRank, Role, Tokens};
use workers_shim::events::SharedIndex;
use workers_shim::fleet::{Fleet, FleetOptions, Pace, WorkerSpec};

const WORKERS: u16 = 64;
const ROUNDS: u32 = 20_000;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let worker = |port: u16| WorkerSpec::at(&format!("http://127.0.0.1:{}", 1 + port), Role::Hybrid);
    let fleet = Fleet::start(FleetOptions {
        workers: (0..WORKERS).map(worker).collect(),
        pace: Pace { every: Duration::from_secs(60), ..Pace::default() },
        index: SharedIndex::new(),
        rules: Arc::new(|_| None),
        alive: None,
        routed: RoutedLimits::default(),
        imprints: None,
    })?;
    let first = fleet.snapshot()[0].id;
    let unchanged = each(|| drop(black_box(fleet.snapshot())));
    let changed = each(|| {
        drop(fleet.dispatch(first, DpRank(0), Tokens(1)));
        drop(black_box(fleet.snapshot()));
    });
    writeln!(std::io::stdout(), "{WORKERS} workers: unchanged {unchanged:?}, after a change {changed:?}")?;
    Ok(())
}

fn each(mut step: impl FnMut()) -> Duration {
    let started = Instant::now();
    (0..ROUNDS).for_each(|_| step());
    started.elapsed() / ROUNDS
}
