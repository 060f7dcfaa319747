//! What is told about the process: logs and metrics. Neither ever carries a prompt, an answer or a key.

mod families;
pub mod metrics;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::time::SystemTime;

/// Plain lines on standard error, filtered by `RUST_LOG` (default `info`). A second call changes nothing.
pub fn init_log() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .with_timer(SystemTime)
        .try_init();
}
