//! Liveness reports of workers: those that are not sent yet, and the latest of each worker for the length of a lease.

use std::time::{Duration, Instant};

use consensus::WorkerLiveness;
use ledger::{ExpireLease, Ledger};
use parking_lot::Mutex;
use vocabulary::{Incarnation, WorkerId};

/// Liveness reports of this node.
#[derive(Debug, Default)]
pub(crate) struct LivenessReports(Mutex<WorkerLiveness>);

impl LivenessReports {
    /// Records that an incarnation of a worker was reached; the latest report wins. Returns false if too many are
    /// pending.
    pub(crate) fn record(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        self.0.lock().record((worker, incarnation), Instant::now())
    }

    /// Puts back reports that could not be sent; newer reports win.
    pub(crate) fn requeue(&self, alive: Vec<(WorkerId, Incarnation)>) {
        self.0.lock().requeue(alive);
    }

    pub(crate) fn take(&self) -> Vec<(WorkerId, Incarnation)> {
        self.0.lock().take()
    }

    /// Sends the pending reports; keeps them for the next time if that fails.
    pub(crate) fn send_with<E>(
        &self,
        send: impl FnOnce(Vec<(WorkerId, Incarnation)>) -> Result<(), E>,
    ) -> Result<(), E> {
        let alive = self.take();
        send(alive.clone()).inspect_err(|_| self.requeue(alive))
    }

    /// Removes expiries of workers that were reported less than a lease ago.
    pub(crate) fn veto_recently_reached(
        &self,
        expiries: Vec<ExpireLease>,
        ledger: &Ledger,
        lease: Duration,
    ) -> Vec<ExpireLease> {
        self.0.lock().veto_recently_reached(expiries, ledger, (lease, Instant::now()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsent_liveness_reports_are_resent_unless_superseded() {
        let reports = LivenessReports::default();
        let (first, second) = ((WorkerId(1), Incarnation(1)), (WorkerId(2), Incarnation(1)));
        assert!(reports.record(first.0, first.1) && reports.record(second.0, second.1));
        let refused = reports.send_with(|alive| {
            assert_eq!(alive, [first, second]);
            assert!(reports.record(second.0, Incarnation(2)));
            Err("the queue is full")
        });
        assert_eq!(refused, Err("the queue is full"));
        assert_eq!(
            reports.send_with(|alive| if alive == [first, (WorkerId(2), Incarnation(2))] {
                Ok(())
            } else {
                Err(alive)
            }),
            Ok(())
        );
        assert_eq!(reports.take(), []);
    }
}
