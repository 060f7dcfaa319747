use super::*;

fn submission(client: u128, serial: u64, command: Command) -> Submission {
    Submission { client: ClientId(client), serial: ClientSerial(serial), command }
}

#[test]
fn a_replayed_serial_returns_the_first_outcome_and_changes_nothing() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 30)]);
    let commit = Command::commit_step(step(1, &one, 0, 1)).unwrap();
    let first = bench.entry(Micros(1), vec![submission(1, 900, commit.clone())]);
    bench.run(Command::CloseSession(session(1)));
    let again = bench.entry(Micros(1), vec![submission(1, 900, commit)]);
    assert_eq!(first, again);
    assert!(bench.ledger.session(session(1)).is_none(), "it was not executed again");
}

#[test]
fn a_forgotten_serial_has_an_unknown_outcome() {
    let mut bench = LedgerFixture::empty(LedgerLimits { outcomes: 4, ..LedgerLimits::default() });
    for n in 100..110 {
        bench.entry(Micros(1), vec![submission(1, n, register(1, 1))]);
    }
    let late = bench.entry(Micros(1), vec![submission(1, 101, Command::RetireWorker(WorkerId(1)))]);
    assert_eq!(late, [Outcome::Forgotten]);
    assert!(bench.ledger.worker(WorkerId(1)).unwrap().is_live());
}

#[test]
fn a_client_must_open_first_and_a_full_table_evicts_the_longest_idle() {
    let mut bench = LedgerFixture::empty(LedgerLimits { clients: 2, ..LedgerLimits::default() });
    let refused = [Outcome::Refused(Refusal::UnknownClient)];
    assert_eq!(bench.entry(Micros(1), vec![submission(2, 1, register(1, 1))]), refused);
    for client in [2, 3] {
        let open = submission(client, 5, Command::OpenClient(NodeId(2)));
        assert_eq!(bench.entry(Micros(1), vec![open]), [Outcome::Done]);
    }
    assert_eq!(bench.run(register(1, 1)), refused[0], "the first client was evicted");
    let before_it_opened = bench.entry(Micros(1), vec![submission(3, 4, register(1, 1))]);
    assert_eq!(before_it_opened, [Outcome::Forgotten]);
}

#[test]
fn a_batch_is_not_atomic_and_has_one_outcome_for_each_command() {
    let mut bench = LedgerFixture::new();
    let open = |id| {
        let (tenant, model) = (tenant(), ModelId::from("tiny"));
        Command::OpenSession(OpenSession { session: session(id), tenant, model, parent: None })
    };
    let claim =
        |id| Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(session(id)), owner: owner(1) });
    let outcome = bench.run(Command::Batch(vec![open(1), claim(7), claim(1)]));
    let Outcome::Batch(outcomes) = &outcome else { panic!("{outcome:?}") };
    assert_eq!(outcomes[1], Outcome::Refused(Refusal::UnknownSession));
    assert!(epoch_of(&outcomes[2]) > epoch_of(&outcomes[0]), "later in the entry is a later epoch");
    assert_eq!(outcome.refusals(), [&Refusal::UnknownSession]);
}

#[test]
fn nested_and_oversized_batches_are_refused() {
    let mut bench = LedgerFixture::empty(LedgerLimits { batch: 3, ..LedgerLimits::default() });
    let bad = Outcome::Refused(Refusal::InvalidBatch);
    assert_eq!(bench.run(Command::Batch(vec![Command::Batch(Vec::new())])), bad);
    assert_eq!(bench.run(Command::Batch(vec![Command::OpenClient(NodeId(3))])), bad);
    assert_eq!(bench.run(Command::Batch(vec![register(1, 1); 4])), bad);
    assert!(bench.ledger.worker(WorkerId(1)).is_none());
}

#[test]
#[should_panic(expected = "applied twice")]
fn an_entry_is_not_applied_twice() {
    let mut bench = LedgerFixture::new();
    let index = bench.ledger.applied();
    bench.ledger.apply(index, &LedgerEntry { time: LedgerTime(0), submissions: Vec::new() });
}
