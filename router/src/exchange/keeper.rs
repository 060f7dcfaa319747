//! Looks after steps that the ledger has not been told of: says them when there is a quorum again, and forgets them when
//! the view shows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, sleep};

use super::unapplied::Reach;
use crate::gateway::Gateway;
use crate::pipeline::{commit, place};

/// Between two looks.
const EVERY: Duration = Duration::from_millis(200);
/// Steps that are said in one look, so that a quorum that just came back is not run over.
const AT_ONCE: usize = 512;
/// How long an ending router waits for the ledger's answers.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Runs until aborted.
pub async fn keep(gateway: Arc<Gateway>) {
    let mut look = interval(EVERY);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        look_after(&gateway);
    }
}

fn look_after(gateway: &Arc<Gateway>) {
    let due = {
        let mut unapplied = gateway.unapplied();
        if unapplied.is_empty() {
            return;
        }
        let view = gateway.directory().view();
        unapplied.sweep(Instant::now(), |step| place::shows(&view, step));
        if gateway.reach() == Reach::Quorum { unapplied.due(AT_ONCE) } else { Vec::new() }
    };
    for step in due {
        commit::tell(gateway, step);
    }
}

/// Waits, not for long, until the ledger has answered for everything that it was and is to be told.
pub async fn last_words(gateway: &Arc<Gateway>) {
    let deadline = Instant::now() + LAST_WORDS;
    while gateway.reach() == Reach::Quorum && gateway.unapplied().untold() > 0 && Instant::now() < deadline {
        look_after(gateway);
        sleep(Duration::from_millis(5)).await;
    }
}
