//! Looks after steps that the ledger has not been told of: says them when there is a quorum again, and forgets them when
//! the view shows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::pending_commits::QuorumReachability;
use crate::app_state::AppState;
use crate::pipeline::{commit, session_resolution};

/// Between two looks.
const SWEEP_INTERVAL: Duration = Duration::from_millis(200);
/// Steps that are said in one look, so that a quorum that just came back is not run over.
const MAX_STEPS_PER_SWEEP: usize = 512;
/// How long an ending router waits for the ledger's answers.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs until aborted.
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

/// Waits, not for long, until the ledger has answered for everything that it was and is to be told.
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
