use super::*;

fn renew(n: u64, incarnation: u64) -> Command {
    Command::RenewLease(RenewLease { alive: vec![(WorkerId(n), Incarnation(incarnation))], ttl: TTL })
}

fn lease(bench: &Bench, n: u64) -> (Epoch, Lease) {
    let worker = bench.ledger.worker(WorkerId(n)).unwrap();
    (worker.epoch, worker.lease)
}

#[test]
fn the_same_process_registered_twice_is_one_outcome() {
    let mut bench = Bench::new();
    let first = lease(&bench, 1);
    let again = bench.run(register(1, 1));
    assert_eq!(again, Outcome::Granted { epoch: first.0 });
    let (epoch, Lease::Held { until }) = lease(&bench, 1) else { panic!("held") };
    assert_eq!(epoch, first.0);
    assert_eq!(until, bench.ledger.now().after(TTL), "a registration is a sign of life too");
}

#[test]
fn a_restarted_process_gets_a_new_epoch_and_its_old_life_is_refused() {
    let mut bench = Bench::new();
    let old = lease(&bench, 1).0;
    let new = epoch_of(&bench.run(register(1, 2)));
    assert!(new > old);
    assert_eq!(bench.run(register(1, 1)), Outcome::Refused(Refusal::StaleIncarnation));
    assert_eq!(bench.run(renew(1, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(1)] });
    let claim = ClaimOwner { subject: Subject::Session(session(1)), owner: owner(1) };
    assert_eq!(bench.run(Command::ClaimOwner(claim)), Outcome::Refused(Refusal::StaleIncarnation));
}

#[test]
fn a_process_whose_clock_was_set_back_is_accepted_once_the_lease_is_over() {
    let mut bench = Bench::new();
    bench.run(register(1, 5));
    bench.end_lease(1);
    assert!(matches!(bench.run(register(1, 4)), Outcome::Granted { .. }));
    assert_eq!(bench.ledger.worker(WorkerId(1)).unwrap().incarnation, Incarnation(4));
}

#[test]
fn a_lease_ends_only_at_the_deadline_that_was_seen() {
    let mut bench = Bench::new();
    let (epoch, Lease::Held { until }) = lease(&bench, 1) else { panic!("held") };
    let expire = |deadline| Command::Expire(Expire { worker: WorkerId(1), epoch, deadline });
    assert_eq!(bench.run(expire(until)), Outcome::Refused(Refusal::LeaseChanged), "its time has not come");
    bench.pass(Micros(10_000_000));
    assert_eq!(bench.run(renew(1, 1)), Outcome::Renewed { renewed: 1, refused: vec![] });
    bench.pass(Micros(10_000_000));
    assert_eq!(bench.run(expire(until)), Outcome::Refused(Refusal::LeaseChanged), "it was renewed");
    assert!(bench.ledger.worker(WorkerId(1)).unwrap().is_live());
    bench.end_lease(1);
    assert!(!bench.ledger.worker(WorkerId(1)).unwrap().is_live());
}

#[test]
fn no_renewal_succeeds_after_the_end_and_a_new_grant_has_a_new_epoch() {
    let mut bench = Bench::new();
    let old = lease(&bench, 2).0;
    bench.end_lease(2);
    assert_eq!(bench.run(renew(2, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(2)] });
    let claim = ClaimOwner { subject: Subject::Session(session(1)), owner: owner(2) };
    assert_eq!(bench.run(Command::ClaimOwner(claim)), Outcome::Refused(Refusal::LeaseOver));
    assert!(epoch_of(&bench.run(register(2, 1))) > old);
    assert_eq!(bench.run(renew(2, 1)), Outcome::Renewed { renewed: 1, refused: vec![] });
}

#[test]
fn a_retired_worker_stays_out_until_it_is_registered_again() {
    let mut bench = Bench::new();
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(3))), Outcome::Done);
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(3))), Outcome::Done);
    assert_eq!(bench.run(renew(3, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(3)] });
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(99))), Outcome::Done);
    assert!(matches!(bench.run(register(3, 1)), Outcome::Granted { .. }));
}

#[test]
fn a_late_retirement_does_not_take_out_a_worker_that_was_registered_anew() {
    let mut bench = Bench::new();
    let seen = lease(&bench, 3).0;
    let retire = Command::RetireLife(RetireLife { worker: WorkerId(3), seen });
    bench.end_lease(3);
    let current = epoch_of(&bench.run(register(3, 2)));
    assert_eq!(bench.run(retire), Outcome::Refused(Refusal::Stale { current }));
    assert_eq!(bench.run(renew(3, 2)), Outcome::Renewed { renewed: 1, refused: vec![] });
    let retire = Command::RetireLife(RetireLife { worker: WorkerId(3), seen: current });
    assert_eq!(bench.run(retire.clone()), Outcome::Done);
    assert_eq!(bench.run(retire), Outcome::Done, "told twice it is one outcome");
    assert_eq!(bench.run(renew(3, 2)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(3)] });
    let unknown = RetireLife { worker: WorkerId(99), seen: current };
    assert_eq!(bench.run(Command::RetireLife(unknown)), Outcome::Done);
}

#[test]
fn the_clock_moves_a_second_an_entry_at_most_and_never_back() {
    let mut bench = Bench::new();
    let before = bench.ledger.now();
    bench.entry(Micros(3_600_000_000), Vec::new());
    assert_eq!(bench.ledger.now(), before.after(MAX_CLOCK_STEP));
    let mut late = bench.ledger.clone();
    late.apply(1_000, &Entry { time: LedgerTime(0), submissions: Vec::new() });
    assert_eq!(late.now(), bench.ledger.now());
}

#[test]
fn only_leases_whose_time_has_come_are_overdue_the_oldest_first() {
    let mut bench = Bench::new();
    bench.pass(Micros(5_000_000));
    bench.run(renew(1, 1));
    bench.pass(Micros(10_500_000));
    let overdue: Vec<u64> = bench.ledger.overdue(bench.ledger.now()).map(|(_, worker)| worker.id.0).collect();
    assert_eq!(overdue, [2, 3]);
}

#[test]
fn a_full_worker_table_forgets_the_one_that_has_been_gone_longest() {
    let mut bench = Bench::empty(Limits { workers: 2, ..Limits::default() });
    bench.run(register(1, 1));
    bench.run(register(2, 1));
    assert_eq!(bench.run(register(3, 1)), Outcome::Refused(Refusal::Full));
    bench.run(Command::RetireWorker(WorkerId(2)));
    assert!(matches!(bench.run(register(3, 1)), Outcome::Granted { .. }));
    assert!(bench.ledger.worker(WorkerId(2)).is_none());
}

#[test]
fn a_rank_that_the_worker_does_not_have_owns_nothing() {
    let mut bench = Bench::new();
    let (rank_1, rank_2) = (Owner { rank: DpRank(1), ..owner(1) }, Owner { rank: DpRank(2), ..owner(1) });
    let chain = chain(&[('a', 4)]);
    let commit = |owner| StepCommit { owner, ..step(1, &chain, 0, 1) };
    assert!(!bench.step(commit(rank_2)).sealed);
    assert!(bench.step(commit(rank_1)).sealed);
}

#[test]
fn a_shorter_renewal_does_not_shorten_a_lease() {
    let mut bench = Bench::new();
    let held = lease(&bench, 1).1;
    let short = RenewLease { alive: vec![(WorkerId(1), Incarnation(1))], ttl: Micros(1_000) };
    assert_eq!(bench.run(Command::RenewLease(short)), Outcome::Renewed { renewed: 1, refused: vec![] });
    assert_eq!(lease(&bench, 1).1, held);
}
