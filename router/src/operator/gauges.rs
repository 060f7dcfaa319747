//! What is known elsewhere, written into the metrics when they are scraped.

use ownership::ledger::Lease;

use crate::gateway::Gateway;
use crate::pipeline::steering::Mode;

/// Writes all of it.
pub(super) fn refresh(gateway: &Gateway) {
    process(gateway);
    ledger(gateway);
}

fn process(gateway: &Gateway) {
    let process = &gateway.metrics.process;
    let steering = gateway.steering.get();
    for mode in [Mode::Shadow, Mode::Sticky, Mode::Own] {
        process.mode.with_label_values(&[mode.as_str()]).set(i64::from(mode == steering.mode));
    }
    process.rollout.set(f64::from(u8::from(steering.rollout_percent)) / 100.0);
}

fn ledger(gateway: &Gateway) {
    let metrics = &gateway.metrics.ledger;
    let view = gateway.directory().view();
    let quorum = view.quorum();
    metrics.applied.set(signed(view.applied()));
    metrics.term.set(signed(quorum.term));
    metrics.stale.set(i64::from(quorum.stale));
    metrics.sessions.set(signed(view.session_count() as u64));
    let mut leases = [0, 0, 0];
    for worker in view.workers() {
        leases[match worker.lease {
            Lease::Held { .. } => 0,
            Lease::Expired { .. } => 1,
            Lease::Retired { .. } => 2,
        }] += 1;
    }
    for (state, count) in ["held", "expired", "retired"].into_iter().zip(leases) {
        metrics.leases.with_label_values(&[state]).set(count);
    }
    let readings = gateway.directory().readings();
    metrics.queue.set(signed(readings.queue_depth));
    let refused: u64 = readings.refusals.values().sum();
    // The directory counts; a counter can only be set by starting it anew.
    metrics.commits.reset();
    metrics.commits.with_label_values(&["applied"]).inc_by(readings.commands.saturating_sub(refused));
    for (cause, count) in readings.refusals.iter().chain(&readings.failures) {
        metrics.commits.with_label_values(&[cause]).inc_by(*count);
    }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}
