//! What a leader does by itself once a tick, as pure functions of what it sees.

use ledger::{Command, Expire, Ledger, RenewLease};
use vocabulary::{Incarnation, Micros, WorkerId};

/// Leases that one tick may end.
const MAX_EXPIRIES: usize = 256;

/// One renewal for all workers that were reached.
///
/// It also moves the ledger's clock, so it is due even when nobody was reached; none while there is nothing that ends.
pub fn renewal(ledger: &Ledger, alive: Vec<(WorkerId, Incarnation)>, lease: Micros) -> Option<Command> {
    let is_empty = ledger.workers().next().is_none() && ledger.session_count() == 0;
    (!alive.is_empty() || !is_empty).then_some(Command::RenewLease(RenewLease { alive, ttl: lease }))
}

/// The ends of overdue leases, with the deadlines that were seen. None in the first lease time of an office: reports
/// may have gone to the leader before.
pub fn expiries(ledger: &Ledger, in_office: Micros, lease: Micros) -> Vec<Expire> {
    if in_office < lease {
        return Vec::new();
    }
    let overdue = ledger.overdue(ledger.now()).take(MAX_EXPIRIES);
    overdue.map(|(deadline, worker)| Expire { worker: worker.id, epoch: worker.epoch, deadline }).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ledger::{Entry, RegisterWorker, Submission, WorkerKind, WorkerSpec};
    use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId, Role};

    use super::*;

    const LEASE: Micros = Micros(15_000_000);

    fn run(ledger: &mut Ledger, time: LedgerTime, command: Command) {
        let index = ledger.applied() + 1;
        let submission = Submission { client: ClientId(1), serial: ClientSerial(index), command };
        ledger.apply(index, &Entry { time, submissions: vec![submission] });
    }

    fn with_a_worker() -> Ledger {
        let mut ledger = Ledger::default();
        run(&mut ledger, LedgerTime(0), Command::OpenClient(NodeId(1)));
        let (role, kind) = (Role::Hybrid, WorkerKind::Engine);
        let spec = WorkerSpec { endpoint: "http://worker".into(), role, kind, models: Arc::from([]), ranks: 1 };
        let (worker, incarnation) = (WorkerId(1), Incarnation(1));
        run(
            &mut ledger,
            LedgerTime(0),
            Command::RegisterWorker(RegisterWorker { worker, incarnation, spec, ttl: LEASE }),
        );
        ledger
    }

    #[test]
    fn an_empty_ledger_needs_no_renewal_and_any_other_gets_one_each_tick() {
        assert_eq!(renewal(&Ledger::default(), Vec::new(), LEASE), None);
        let alive = vec![(WorkerId(1), Incarnation(1))];
        let all = Command::RenewLease(RenewLease { alive: alive.clone(), ttl: LEASE });
        assert_eq!(renewal(&Ledger::default(), alive, LEASE), Some(all));
        let none = Command::RenewLease(RenewLease { alive: Vec::new(), ttl: LEASE });
        assert_eq!(renewal(&with_a_worker(), Vec::new(), LEASE), Some(none));
    }

    #[test]
    fn only_overdue_leases_end_and_none_in_the_first_lease_time_of_an_office() {
        let mut ledger = with_a_worker();
        assert_eq!(expiries(&ledger, LEASE, LEASE), []);
        while ledger.now() < LedgerTime(LEASE.0) {
            let time = ledger.now().after(Micros(1_000_000));
            run(&mut ledger, time, Command::RenewLease(RenewLease { alive: Vec::new(), ttl: LEASE }));
        }
        assert_eq!(expiries(&ledger, Micros(LEASE.0 - 1), LEASE), []);
        let epoch = ledger.worker(WorkerId(1)).unwrap().epoch;
        let end = Expire { worker: WorkerId(1), epoch, deadline: LedgerTime(LEASE.0) };
        assert_eq!(expiries(&ledger, LEASE, LEASE), [end]);
    }
}
