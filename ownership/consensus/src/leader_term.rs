//! The leader's term: its clock and its periodic tasks, as pure functions of what the leader sees.

use derive_where::derive_where;
use ledger::{Command, ExpireLease, Ledger, LedgerLimits, RenewLease};
use openraft::async_runtime::instant::Instant;
use vocabulary::{Incarnation, LedgerTime, Micros, WorkerId};

use crate::leader_clock::LeaderClock;

/// Maximum number of leases that one tick may expire.
const MAX_EXPIRIES: usize = 256;

/// State of a node while it leads. Each Raft term has its own clock.
#[derive(Debug)]
#[derive_where(Default)]
pub struct LeaderTermClock<I = std::time::Instant>(Option<(u64, LeaderClock<I>)>);

impl<I: Instant> LeaderTermClock<I> {
    /// Follows Raft's state: begins a term when this node starts to lead, and ends it when it stops.
    ///
    /// `ledger` is the time on the ledger's clock.
    pub fn follow(&mut self, leads: Option<u64>, ledger: LedgerTime, now: I) {
        let current_term = self.0.as_ref().map(|(term, _)| *term);
        if current_term != leads {
            self.0 = leads.map(|term| (term, LeaderClock::begin_term(ledger, now)));
        }
    }

    /// Returns the time for the next entry, while the ledger's clock shows `ledger`; `None` if this node does not lead.
    pub fn entry_time(&mut self, ledger: LedgerTime, now: I) -> Option<LedgerTime> {
        self.0.as_mut().map(|(_, clock)| clock.read(ledger, now))
    }

    /// Returns how long this node has led, without pauses; zero if it does not lead.
    pub fn time_leading(&self) -> Micros {
        self.0.as_ref().map_or(Micros(0), |(_, clock)| clock.time_leading())
    }
}

/// Returns one lease renewal for all workers that were reached.
///
/// The renewal also advances the ledger's clock, so it is due even if no worker was reached. `None` while nothing in
/// the ledger can expire.
pub fn renewal(ledger: &Ledger, alive: Vec<(WorkerId, Incarnation)>, lease: Micros) -> Option<Command> {
    let is_empty = ledger.workers().next().is_none() && ledger.session_count() == 0;
    (!alive.is_empty() || !is_empty).then_some(Command::RenewLease(RenewLease { alive, ttl: lease }))
}

/// Returns the overdue leases with the deadlines that were seen. Empty during the first lease duration of a term,
/// because liveness reports may have gone to the previous leader.
pub fn expiries(ledger: &Ledger, time_leading: Micros, lease: Micros) -> Vec<ExpireLease> {
    if time_leading < lease {
        return Vec::new();
    }
    let overdue = ledger.overdue_leases(ledger.now()).take(MAX_EXPIRIES);
    overdue.map(|(deadline, worker)| ExpireLease { worker: worker.id, epoch: worker.epoch, deadline }).collect()
}

/// Table sizes that a node's operator asks for; `None` leaves the ledger's limit as it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RequestedLedgerLimits {
    /// Maximum number of artifacts.
    pub artifacts: Option<u32>,
    /// Maximum number of sessions.
    pub sessions: Option<u32>,
}

/// Returns wider limits if the ledger's are narrower than requested. Limits never narrow: if nodes ask for different
/// ones, the widest win.
pub fn limit_widening(ledger: &Ledger, room: RequestedLedgerLimits) -> Option<Command> {
    let current = *ledger.limits();
    let wider = LedgerLimits {
        artifacts: current.artifacts.max(room.artifacts.unwrap_or(0)),
        sessions: current.sessions.max(room.sessions.unwrap_or(0)),
        ..current
    };
    let command = Command::SetLimits(Box::new(wider));
    (wider != current && command.level() <= ledger.level()).then_some(command)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ledger::{LedgerEntry, RegisterWorker, Submission, WorkerKind, WorkerSpec};
    use vocabulary::{ClientId, ClientSerial, LedgerTime, NodeId, WorkerRole};

    use super::*;

    const LEASE: Micros = Micros(15_000_000);

    fn run(ledger: &mut Ledger, time: LedgerTime, command: Command) {
        let index = ledger.applied() + 1;
        let submission = Submission { client: ClientId(1), serial: ClientSerial(index), command };
        ledger.apply(index, &LedgerEntry { time, submissions: vec![submission] });
    }

    fn ledger_with_worker() -> Ledger {
        let mut ledger = Ledger::default();
        run(&mut ledger, LedgerTime(0), Command::OpenClient(NodeId(1)));
        let (role, kind) = (WorkerRole::Hybrid, WorkerKind::Engine);
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
    fn each_raft_term_is_a_separate_leader_term() {
        use std::time::{Duration, Instant};
        let start = Instant::now();
        let after = |micros| start + Duration::from_micros(micros);
        let mut leader_term = LeaderTermClock::default();
        leader_term.follow(None, LedgerTime(50), start);
        assert_eq!((leader_term.entry_time(LedgerTime(50), start), leader_term.time_leading()), (None, Micros(0)));
        leader_term.follow(Some(3), LedgerTime(50), start);
        assert_eq!(leader_term.entry_time(LedgerTime(50), after(20)), Some(LedgerTime(70)));
        // Following the same term again does not restart its clock.
        leader_term.follow(Some(3), LedgerTime(60), after(30));
        assert_eq!(
            (leader_term.entry_time(LedgerTime(60), after(40)), leader_term.time_leading()),
            (Some(LedgerTime(90)), Micros(40))
        );
        leader_term.follow(Some(5), LedgerTime(200), after(50));
        assert_eq!(
            (leader_term.entry_time(LedgerTime(200), after(60)), leader_term.time_leading()),
            (Some(LedgerTime(210)), Micros(10))
        );
        leader_term.follow(None, LedgerTime(300), after(70));
        assert_eq!(leader_term.entry_time(LedgerTime(300), after(80)), None);
    }

    #[test]
    fn an_empty_ledger_needs_no_renewal_and_any_other_renews_each_tick() {
        assert_eq!(renewal(&Ledger::default(), Vec::new(), LEASE), None);
        let alive = vec![(WorkerId(1), Incarnation(1))];
        let all = Command::RenewLease(RenewLease { alive: alive.clone(), ttl: LEASE });
        assert_eq!(renewal(&Ledger::default(), alive, LEASE), Some(all));
        let none = Command::RenewLease(RenewLease { alive: Vec::new(), ttl: LEASE });
        assert_eq!(renewal(&ledger_with_worker(), Vec::new(), LEASE), Some(none));
    }

    #[test]
    fn only_overdue_leases_expire_and_none_in_the_first_lease_time() {
        let mut ledger = ledger_with_worker();
        assert_eq!(expiries(&ledger, LEASE, LEASE), []);
        while ledger.now() < LedgerTime(LEASE.0) {
            let time = ledger.now().after(Micros(1_000_000));
            run(&mut ledger, time, Command::RenewLease(RenewLease { alive: Vec::new(), ttl: LEASE }));
        }
        assert_eq!(expiries(&ledger, Micros(LEASE.0 - 1), LEASE), []);
        let epoch = ledger.worker(WorkerId(1)).unwrap().epoch;
        let end = ExpireLease { worker: WorkerId(1), epoch, deadline: LedgerTime(LEASE.0) };
        assert_eq!(expiries(&ledger, LEASE, LEASE), [end]);
    }

    #[test]
    fn limits_widen_once_and_never_narrow() {
        let mut ledger = ledger_with_worker();
        let usual = *ledger.limits();
        let room = RequestedLedgerLimits { artifacts: Some(usual.artifacts * 5), sessions: Some(usual.sessions / 2) };
        assert_eq!(limit_widening(&ledger, room), None, "the cluster's level does not have it");
        run(&mut ledger, LedgerTime(0), Command::RaiseLevel(2));
        assert_eq!(limit_widening(&ledger, RequestedLedgerLimits::default()), None);
        let wider = LedgerLimits { artifacts: usual.artifacts * 5, ..usual };
        let command = limit_widening(&ledger, room).unwrap();
        assert_eq!(command, Command::SetLimits(Box::new(wider)));
        run(&mut ledger, LedgerTime(0), command);
        assert_eq!((*ledger.limits(), limit_widening(&ledger, room)), (wider, None));
        assert_eq!(
            limit_widening(&ledger, RequestedLedgerLimits { artifacts: Some(7), sessions: None }),
            None,
            "they never narrow"
        );
    }
}
