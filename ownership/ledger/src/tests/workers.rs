use super::*;

fn renew(n: u64, incarnation: u64) -> Command {
    Command::RenewLease(RenewLease { alive: vec![(WorkerId(n), Incarnation(incarnation))], ttl: TTL })
}

fn lease(fixture: &LedgerFixture, n: u64) -> (Epoch, WorkerLease) {
    let worker = fixture.ledger.worker(WorkerId(n)).unwrap();
    (worker.epoch, worker.lease)
}

#[test]
fn registering_the_same_incarnation_twice_has_the_same_outcome() {
    let mut bench = LedgerFixture::new();
    let first = lease(&bench, 1);
    let again = bench.run(register(1, 1));
    assert_eq!(again, Outcome::Granted { epoch: first.0 });
    let (epoch, WorkerLease::Held { until }) = lease(&bench, 1) else { panic!("held") };
    assert_eq!(epoch, first.0);
    assert_eq!(until, bench.ledger.now().after(TTL), "a registration is a sign of life too");
}

#[test]
fn a_restarted_worker_gets_a_new_epoch_and_its_old_incarnation_is_refused() {
    let mut bench = LedgerFixture::new();
    let old = lease(&bench, 1).0;
    let new = epoch_of(&bench.run(register(1, 2)));
    assert!(new > old);
    assert_eq!(bench.run(register(1, 1)), Outcome::Refused(Refusal::StaleIncarnation));
    assert_eq!(bench.run(renew(1, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(1)] });
    let claim = ClaimOwner { subject: OwnershipSubject::Session(session(1)), owner: owner(1) };
    assert_eq!(bench.run(Command::ClaimOwner(claim)), Outcome::Refused(Refusal::StaleIncarnation));
}

#[test]
fn an_incarnation_with_a_lower_clock_is_accepted_after_the_lease_ends() {
    let mut bench = LedgerFixture::new();
    bench.run(register(1, 5));
    bench.expire_lease(1);
    assert!(matches!(bench.run(register(1, 4)), Outcome::Granted { .. }));
    assert_eq!(bench.ledger.worker(WorkerId(1)).unwrap().incarnation, Incarnation(4));
}

#[test]
fn a_lease_expires_only_at_the_deadline_the_leader_saw() {
    let mut bench = LedgerFixture::new();
    let (epoch, WorkerLease::Held { until }) = lease(&bench, 1) else { panic!("held") };
    let expire = |deadline| Command::ExpireLease(ExpireLease { worker: WorkerId(1), epoch, deadline });
    assert_eq!(bench.run(expire(until)), Outcome::Refused(Refusal::LeaseChanged), "its time has not come");
    bench.advance_time(Micros(10_000_000));
    assert_eq!(bench.run(renew(1, 1)), Outcome::Renewed { renewed: 1, refused: vec![] });
    bench.advance_time(Micros(10_000_000));
    assert_eq!(bench.run(expire(until)), Outcome::Refused(Refusal::LeaseChanged), "it was renewed");
    assert!(bench.ledger.worker(WorkerId(1)).unwrap().is_live());
    bench.expire_lease(1);
    assert!(!bench.ledger.worker(WorkerId(1)).unwrap().is_live());
}

#[test]
fn no_renewal_succeeds_after_expiry_and_a_new_grant_has_a_new_epoch() {
    let mut bench = LedgerFixture::new();
    let old = lease(&bench, 2).0;
    bench.expire_lease(2);
    assert_eq!(bench.run(renew(2, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(2)] });
    let claim = ClaimOwner { subject: OwnershipSubject::Session(session(1)), owner: owner(2) };
    assert_eq!(bench.run(Command::ClaimOwner(claim)), Outcome::Refused(Refusal::LeaseExpired));
    assert!(epoch_of(&bench.run(register(2, 1))) > old);
    assert_eq!(bench.run(renew(2, 1)), Outcome::Renewed { renewed: 1, refused: vec![] });
}

#[test]
fn a_retired_worker_stays_retired_until_it_registers_again() {
    let mut bench = LedgerFixture::new();
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(3))), Outcome::Done);
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(3))), Outcome::Done);
    assert_eq!(bench.run(renew(3, 1)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(3)] });
    assert_eq!(bench.run(Command::RetireWorker(WorkerId(99))), Outcome::Done);
    assert!(matches!(bench.run(register(3, 1)), Outcome::Granted { .. }));
}

#[test]
fn a_late_retirement_does_not_retire_a_new_registration() {
    let mut bench = LedgerFixture::new();
    let seen = lease(&bench, 3).0;
    let retire = Command::RetireLife(RetireIncarnation { worker: WorkerId(3), seen });
    bench.expire_lease(3);
    let current = epoch_of(&bench.run(register(3, 2)));
    assert_eq!(bench.run(retire), Outcome::Refused(Refusal::StaleEpoch { current }));
    assert_eq!(bench.run(renew(3, 2)), Outcome::Renewed { renewed: 1, refused: vec![] });
    let retire = Command::RetireLife(RetireIncarnation { worker: WorkerId(3), seen: current });
    assert_eq!(bench.run(retire.clone()), Outcome::Done);
    assert_eq!(bench.run(retire), Outcome::Done, "told twice it is one outcome");
    assert_eq!(bench.run(renew(3, 2)), Outcome::Renewed { renewed: 0, refused: vec![WorkerId(3)] });
    let unknown = RetireIncarnation { worker: WorkerId(99), seen: current };
    assert_eq!(bench.run(Command::RetireLife(unknown)), Outcome::Done);
}

#[test]
fn the_ledger_clock_advances_a_second_per_entry_at_most_and_never_back() {
    let mut bench = LedgerFixture::new();
    let before = bench.ledger.now();
    bench.entry(Micros(3_600_000_000), Vec::new());
    assert_eq!(bench.ledger.now(), before.after(MAX_CLOCK_STEP));
    let mut late = bench.ledger.clone();
    late.apply(1_000, &LedgerEntry { time: LedgerTime(0), submissions: Vec::new() });
    assert_eq!(late.now(), bench.ledger.now());
}

#[test]
fn only_expired_leases_are_overdue_oldest_first() {
    let mut bench = LedgerFixture::new();
    bench.advance_time(Micros(5_000_000));
    bench.run(renew(1, 1));
    bench.advance_time(Micros(10_500_000));
    let overdue: Vec<u64> = bench.ledger.overdue_leases(bench.ledger.now()).map(|(_, worker)| worker.id.0).collect();
    assert_eq!(overdue, [2, 3]);
}

#[test]
fn a_full_worker_table_forgets_the_longest_expired_worker() {
    let mut bench = LedgerFixture::empty(LedgerLimits { workers: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    bench.run(register(2, 1));
    assert_eq!(bench.run(register(3, 1)), Outcome::Refused(Refusal::LedgerFull));
    bench.run(Command::RetireWorker(WorkerId(2)));
    assert!(matches!(bench.run(register(3, 1)), Outcome::Granted { .. }));
    assert!(bench.ledger.worker(WorkerId(2)).is_none());
}

#[test]
fn a_rank_beyond_the_worker_size_owns_nothing() {
    let mut bench = LedgerFixture::new();
    let (rank_1, rank_2) = (Owner { rank: DpRank(1), ..owner(1) }, Owner { rank: DpRank(2), ..owner(1) });
    let chain = chain(&[('a', 4)]);
    let commit = |owner| StepCommit { owner, ..step(1, &chain, 0, 1) };
    assert!(!bench.step(commit(rank_2)).sealed);
    assert!(bench.step(commit(rank_1)).sealed);
}

#[test]
fn a_shorter_renewal_does_not_shorten_a_lease() {
    let mut bench = LedgerFixture::new();
    let held = lease(&bench, 1).1;
    let short = RenewLease { alive: vec![(WorkerId(1), Incarnation(1))], ttl: Micros(1_000) };
    assert_eq!(bench.run(Command::RenewLease(short)), Outcome::Renewed { renewed: 1, refused: vec![] });
    assert_eq!(lease(&bench, 1).1, held);
}
