//! Liveness reports that a leader has received, kept for one lease duration.
//!
//! A renewal can be lost on its way into the log, for instance during a leadership transfer. Therefore a leader does
//! not expire the lease of a worker that was reported alive less than one lease duration ago, even if the renewal was
//! lost.

use std::collections::BTreeMap;
use std::time::Duration;

use derive_where::derive_where;
use ledger::{ExpireLease, Ledger};
use openraft::async_runtime::instant::Instant;
use vocabulary::{Incarnation, WorkerId};

const MAX_WORKERS: usize = 4_096;

/// A worker and its incarnation.
type WorkerLife = (WorkerId, Incarnation);

/// Latest liveness report of each worker.
#[derive(Debug)]
#[derive_where(Default)]
pub struct WorkerLiveness<I = std::time::Instant> {
    last_reached: BTreeMap<WorkerId, (Incarnation, I)>,
    unsent: BTreeMap<WorkerId, Incarnation>,
}

impl<I: Instant> WorkerLiveness<I> {
    /// Records that an incarnation was reached; the latest report of a worker wins. Returns false if the table is full.
    pub fn record(&mut self, (worker, incarnation): WorkerLife, now: I) -> bool {
        if self.last_reached.len() >= MAX_WORKERS && !self.last_reached.contains_key(&worker) {
            return false;
        }
        self.last_reached.insert(worker, (incarnation, now));
        self.unsent.insert(worker, incarnation);
        true
    }

    /// Takes the reports since the last call, for the next renewal.
    pub fn take(&mut self) -> Vec<WorkerLife> {
        std::mem::take(&mut self.unsent).into_iter().collect()
    }

    /// Puts back reports whose renewal failed; newer reports win.
    pub fn requeue(&mut self, alive: Vec<WorkerLife>) {
        for (worker, incarnation) in alive {
            self.unsent.entry(worker).or_insert(incarnation);
        }
    }

    /// Removes the expiries of workers whose current incarnation was reported alive less than `lease` ago. Drops older
    /// reports.
    pub fn veto_recently_reached(
        &mut self,
        expiries: Vec<ExpireLease>,
        ledger: &Ledger,
        (lease, now): (Duration, I),
    ) -> Vec<ExpireLease> {
        self.last_reached.retain(|_, (_, reached)| now.saturating_duration_since(*reached) < lease);
        let is_alive = |expiry: &ExpireLease| {
            let reached = self.last_reached.get(&expiry.worker).map(|(incarnation, _)| *incarnation);
            reached.is_some() && reached == ledger.worker(expiry.worker).map(|worker| worker.incarnation)
        };
        expiries.into_iter().filter(|expiry| !is_alive(expiry)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use ledger::{Command, LedgerEntry, RegisterWorker, Submission, WorkerKind, WorkerSpec};
    use vocabulary::{ClientId, ClientSerial, Epoch, LedgerTime, Micros, NodeId, WorkerRole};

    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    fn ledger() -> Ledger {
        let (role, kind) = (WorkerRole::Hybrid, WorkerKind::Engine);
        let spec = WorkerSpec { endpoint: "http://worker".into(), role, kind, models: Arc::from([]), ranks: 1 };
        let (worker, incarnation, ttl) = (WorkerId(1), Incarnation(2), Micros::of(LEASE));
        let register = Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl });
        let of = |serial, command| Submission { client: ClientId(1), serial: ClientSerial(serial), command };
        let submissions = vec![of(0, Command::OpenClient(NodeId(1))), of(1, register)];
        let mut ledger = Ledger::default();
        ledger.apply(1, &LedgerEntry { time: LedgerTime(0), submissions });
        ledger
    }

    fn overdue_expiry() -> ExpireLease {
        ExpireLease { worker: WorkerId(1), epoch: Epoch::default(), deadline: LedgerTime(1) }
    }

    #[test]
    fn a_recently_reached_incarnation_keeps_its_lease() {
        let (mut liveness, ledger, start) = (WorkerLiveness::default(), ledger(), Instant::now());
        assert_eq!(liveness.veto_recently_reached(vec![overdue_expiry()], &ledger, (LEASE, start)), [overdue_expiry()]);
        assert!(liveness.record((WorkerId(1), Incarnation(2)), start));
        assert_eq!(liveness.take(), [(WorkerId(1), Incarnation(2))]);
        assert_eq!(liveness.take(), []);
        liveness.requeue(vec![(WorkerId(1), Incarnation(2))]);
        assert_eq!(liveness.take(), [(WorkerId(1), Incarnation(2))]);
        let almost = start + LEASE - Duration::from_millis(1);
        assert_eq!(liveness.veto_recently_reached(vec![overdue_expiry()], &ledger, (LEASE, almost)), []);
        assert_eq!(
            liveness.veto_recently_reached(vec![overdue_expiry()], &ledger, (LEASE, start + LEASE)),
            [overdue_expiry()]
        );
    }

    #[test]
    fn a_report_of_another_incarnation_keeps_no_lease() {
        let (mut liveness, ledger, start) = (WorkerLiveness::default(), ledger(), Instant::now());
        assert!(liveness.record((WorkerId(1), Incarnation(1)), start));
        assert_eq!(liveness.veto_recently_reached(vec![overdue_expiry()], &ledger, (LEASE, start)), [overdue_expiry()]);
    }

    #[test]
    fn liveness_reports_are_bounded_by_max_workers() {
        let (mut liveness, now) = (WorkerLiveness::default(), Instant::now());
        for n in 0..MAX_WORKERS as u64 {
            assert!(liveness.record((WorkerId(n), Incarnation(1)), now));
        }
        assert!(!liveness.record((WorkerId(u64::MAX), Incarnation(1)), now));
        assert!(liveness.record((WorkerId(0), Incarnation(2)), now));
    }
}
