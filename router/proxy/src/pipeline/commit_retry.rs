//! Retries steps that are not committed to the ledger: submits them when there is a quorum again, and forgets them when
//! the view shows them.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::{commit, session_resolution};
use crate::ledger_access::LedgerAccess;
use crate::peer_exchange::pending_commits::QuorumReachability;

/// Time between two sweeps.
const SWEEP_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of steps submitted per sweep, so that a returning quorum is not overloaded.
const MAX_STEPS_PER_SWEEP: usize = 512;
/// How long a stopping router waits for the ledger's answers.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Retries until aborted.
pub async fn run(ledger: LedgerAccess) {
    let mut look = interval(SWEEP_INTERVAL);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        sweep(&ledger);
    }
}

fn sweep(ledger: &LedgerAccess) {
    let due = {
        let mut pending = ledger.pending_commits();
        if pending.is_empty() {
            return;
        }
        let view = ledger.directory().view();
        pending.sweep(Instant::now(), |step| session_resolution::view_contains(&view, step));
        if ledger.ledger_reach() == QuorumReachability::Quorum {
            pending.take_due(MAX_STEPS_PER_SWEEP)
        } else {
            Vec::new()
        }
    };
    for step in due {
        commit::submit_commits(ledger, step);
    }
}

/// Waits, for a limited time, until the ledger has answered all pending commits.
pub async fn flush(ledger: &LedgerAccess) {
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    while ledger.ledger_reach() == QuorumReachability::Quorum
        && ledger.pending_commits().pending_count() > 0
        && Instant::now() < deadline
    {
        sweep(ledger);
        sleep(Duration::from_millis(5)).await;
    }
}
