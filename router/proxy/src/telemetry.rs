//! Telemetry: logs and metrics. Neither ever contains a prompt, an answer or a key.

pub mod decision_metrics;
pub mod discovery_metrics;
mod families;
pub mod metrics;
pub mod peer_exchange_metrics;
pub mod prefix_cache_metrics;
pub mod shared_cache_metrics;

pub use families::FamilyDescription;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::SystemTime;

/// Default log filter without `RUST_LOG`: all of our own events, and from the consensus libraries only errors and
/// warnings. That a node does not answer is news once; the library repeats it with every heartbeat.
const DEFAULT_FILTER: &str = "info,openraft=error,raft_log=warn,chunked_wal=warn";

/// Initialises the log: plain lines on standard error, filtered by `RUST_LOG`. A second call changes nothing.
pub fn init_log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_timer(SystemTime)
        .try_init();
}
