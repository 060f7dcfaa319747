//! Signs of life that a leader was given, until a lease time later.
//!
//! A renewal can be lost on its way into the log, while leadership is being transferred for instance. So a leader
//! proposes no end of a lease whose holder it was told about less than a lease ago, whatever became of the renewal.

use std::collections::BTreeMap;
use std::time::Duration;

use derive_where::derive_where;
use ledger::{Expire, Ledger};
use openraft::async_runtime::instant::Instant;
use vocabulary::{Incarnation, WorkerId};

const MAX_WORKERS: usize = 4_096;

/// A life of a worker, by name.
type Life = (WorkerId, Incarnation);

/// The last sign of each worker.
#[derive(Debug)]
#[derive_where(Default)]
pub struct Signs<I = std::time::Instant> {
    last: BTreeMap<WorkerId, (Incarnation, I)>,
    untold: BTreeMap<WorkerId, Incarnation>,
}

impl<I: Instant> Signs<I> {
    /// Notes that a life was reached; the one that was noted last counts. False when there are too many.
    pub fn note(&mut self, (worker, incarnation): Life, now: I) -> bool {
        if self.last.len() >= MAX_WORKERS && !self.last.contains_key(&worker) {
            return false;
        }
        self.last.insert(worker, (incarnation, now));
        self.untold.insert(worker, incarnation);
        true
    }

    /// What was noted since this was asked last, for the next renewal.
    pub fn take(&mut self) -> Vec<Life> {
        std::mem::take(&mut self.untold).into_iter().collect()
    }

    /// Takes back what could not be told; what was noted meanwhile counts more.
    pub fn put_back(&mut self, alive: Vec<Life>) {
        for (worker, incarnation) in alive {
            self.untold.entry(worker).or_insert(incarnation);
        }
    }

    /// Takes from `ends` those of lives that were noted less than `lease` ago, and forgets what is older.
    pub fn spare(&mut self, ends: Vec<Expire>, ledger: &Ledger, (lease, now): (Duration, I)) -> Vec<Expire> {
        self.last.retain(|_, (_, noted)| now.saturating_duration_since(*noted) < lease);
        let is_alive = |end: &Expire| {
            let noted = self.last.get(&end.worker).map(|(incarnation, _)| *incarnation);
            noted.is_some() && noted == ledger.worker(end.worker).map(|worker| worker.incarnation)
        };
        ends.into_iter().filter(|end| !is_alive(end)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use ledger::{Command, Entry, RegisterWorker, Submission, WorkerKind, WorkerSpec};
    use vocabulary::{ClientId, ClientSerial, Epoch, LedgerTime, Micros, NodeId, Role};

    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    fn ledger() -> Ledger {
        let (role, kind) = (Role::Hybrid, WorkerKind::Engine);
        let spec = WorkerSpec { endpoint: "http://worker".into(), role, kind, models: Arc::from([]), ranks: 1 };
        let (worker, incarnation, ttl) = (WorkerId(1), Incarnation(2), Micros::of(LEASE));
        let register = Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl });
        let of = |serial, command| Submission { client: ClientId(1), serial: ClientSerial(serial), command };
        let submissions = vec![of(0, Command::OpenClient(NodeId(1))), of(1, register)];
        let mut ledger = Ledger::default();
        ledger.apply(1, &Entry { time: LedgerTime(0), submissions });
        ledger
    }

    fn end() -> Expire {
        Expire { worker: WorkerId(1), epoch: Epoch::default(), deadline: LedgerTime(1) }
    }

    #[test]
    fn a_life_that_was_noted_lately_is_spared_though_its_renewal_was_lost() {
        let (mut signs, ledger, start) = (Signs::default(), ledger(), Instant::now());
        assert_eq!(signs.spare(vec![end()], &ledger, (LEASE, start)), [end()]);
        assert!(signs.note((WorkerId(1), Incarnation(2)), start));
        assert_eq!(signs.take(), [(WorkerId(1), Incarnation(2))]);
        assert_eq!(signs.take(), []);
        signs.put_back(vec![(WorkerId(1), Incarnation(2))]);
        assert_eq!(signs.take(), [(WorkerId(1), Incarnation(2))]);
        let almost = start + LEASE - Duration::from_millis(1);
        assert_eq!(signs.spare(vec![end()], &ledger, (LEASE, almost)), []);
        assert_eq!(signs.spare(vec![end()], &ledger, (LEASE, start + LEASE)), [end()]);
    }

    #[test]
    fn a_sign_of_another_life_spares_nothing() {
        let (mut signs, ledger, start) = (Signs::default(), ledger(), Instant::now());
        assert!(signs.note((WorkerId(1), Incarnation(1)), start));
        assert_eq!(signs.spare(vec![end()], &ledger, (LEASE, start)), [end()]);
    }

    #[test]
    fn so_many_workers_are_noted_and_no_more() {
        let (mut signs, now) = (Signs::default(), Instant::now());
        for n in 0..MAX_WORKERS as u64 {
            assert!(signs.note((WorkerId(n), Incarnation(1)), now));
        }
        assert!(!signs.note((WorkerId(u64::MAX), Incarnation(1)), now));
        assert!(signs.note((WorkerId(0), Incarnation(2)), now));
    }
}
