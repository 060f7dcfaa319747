//! Retries steps that are not committed to the ledger: submits them when there is a quorum again, and forgets them when
//! the view shows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::pending_commits::QuorumReachability;
use crate::app_state::AppState;
use crate::pipeline::{commit, session_resolution};

/// Time between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of steps submitted per sweep, so that a returning quorum is not overloaded.
const MAX_STEPS_PER_SWEEP: usize = 512;
/// How long a stopping router waits for the ledger's answers.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Retries until aborted.
pub async fn run(gateway: Arc<AppState>) {
    let mut look = interval(SWEEP_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        sweep(&gateway);
    }
}

fn sweep(gateway: &Arc<AppState>) {
    let due = {
        let mut unapplied = gateway.pending_commits();
        if unapplied.is_empty() {
            return;
        }
        let view = gateway.directory().view();
        unapplied.sweep(Instant::now(), |step| session_resolution::view_contains(&view, step));
        if gateway.ledger_reach() == QuorumReachability::Quorum {
            unapplied.take_due(MAX_STEPS_PER_SWEEP)
        } else {
            Vec::new()
        }
    };
    for step in due {
        commit::submit_commits(gateway, step);
    }
}

/// Waits, for a limited time, until the ledger has answered all pending commits.
pub async fn flush(gateway: &Arc<AppState>) {
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    while gateway.ledger_reach() == QuorumReachability::Quorum
        && gateway.pending_commits().pending_count() > 0
        && Instant::now() < deadline
    {
        sweep(gateway);
        sleep(Duration::from_millis(5)).await;
    }
}
