use super::*;

/// Recorded from the release before feature levels: a ledger with small limits, a log over it, its outcomes, and the
/// final ledger.
const BEGIN: &[u8] = include_bytes!("level1/begin.mp");
const LOG: &[u8] = include_bytes!("level1/log.mp");
const OUTCOMES: &[u8] = include_bytes!("level1/outcomes.mp");
const END: &[u8] = include_bytes!("level1/end.mp");
const EMPTY: &[u8] = include_bytes!("level1/default.mp");

fn log() -> Vec<(u64, LedgerEntry)> {
    rmp_serde::from_slice(LOG).unwrap()
}

#[test]
fn a_log_of_the_last_release_replays_to_identical_bytes() {
    let mut ledger: Ledger = rmp_serde::from_slice(BEGIN).unwrap();
    let outcomes: Vec<Vec<Outcome>> = log().iter().map(|(index, entry)| ledger.apply(*index, entry)).collect();
    assert_eq!(rmp_serde::to_vec(&outcomes).unwrap(), OUTCOMES);
    assert_eq!(rmp_serde::to_vec(&ledger).unwrap(), END);
    assert_eq!(ledger.level(), 1);
}

#[test]
fn records_of_the_last_release_are_encoded_identically() {
    assert_eq!(rmp_serde::to_vec(&log()).unwrap(), LOG);
    assert_eq!(rmp_serde::to_vec(&Ledger::default()).unwrap(), EMPTY);
    let end: Ledger = rmp_serde::from_slice(END).unwrap();
    assert_eq!(rmp_serde::to_vec(&end).unwrap(), END);
    assert!(log().iter().all(|(_, entry)| entry.required_level() == 1));
}

#[test]
fn commands_above_the_level_are_refused_until_it_is_raised() {
    let mut bench = LedgerFixture::level1(LedgerLimits::default());
    let admit = || Command::AdmitNode(AdmitNode { nonce: 7, address: "a:1".into() });
    let refused = Outcome::Refused(Refusal::FeatureLevelTooLow { needed: 2, current: 1 });
    let commands = [
        admit(),
        Command::RetireNode(NodeId(1)),
        Command::SetLimits(Box::default()),
        Command::Pin(PinArtifact { artifact: vocabulary::ArtifactId(1), pinned: ArtifactPinFlag::Yes }),
        Command::Evict(vocabulary::ArtifactId(1)),
        Command::DrainWorker(DrainWorker { worker: WorkerId(1), draining: DrainFlag::Yes }),
        Command::SetQuota(SetQuota { tenant: tenant(), artifacts: Some(1) }),
        Command::RetireLife(RetireIncarnation { worker: WorkerId(1), seen: Epoch::default() }),
    ];
    for command in commands {
        assert_eq!((command.level(), command.required_level()), (2, 2));
        assert_eq!(bench.run(command.clone()), refused);
        assert_eq!(bench.run(Command::Batch(vec![command])), Outcome::Batch(vec![refused.clone()]));
    }
    assert_eq!(bench.run(Command::RaiseLevel(2)), Outcome::Done);
    assert_eq!((bench.ledger.level(), bench.ledger.nodes().count()), (2, 1));
    assert_eq!(bench.run(admit()), Outcome::Admitted { node: NodeId(2) });
}

#[test]
fn the_level_never_falls_and_never_exceeds_the_supported_level() {
    let mut bench = LedgerFixture::new();
    assert_eq!(bench.run(Command::RaiseLevel(1)), Outcome::Done);
    assert_eq!(bench.ledger.level(), LEVEL);
    let refused = Refusal::FeatureLevelTooLow { needed: NEXT_LEVEL + 1, current: LEVEL };
    assert_eq!(bench.run(Command::RaiseLevel(NEXT_LEVEL + 1)), Outcome::Refused(refused));
}

#[test]
fn the_next_level_only_adds_its_own_command() {
    let mut bench = LedgerFixture::new();
    let refused = Outcome::Refused(Refusal::FeatureLevelTooLow { needed: NEXT_LEVEL, current: LEVEL });
    assert_eq!(bench.run(Command::Barrier), refused);
    assert_eq!(bench.run(Command::Batch(vec![Command::Barrier])), Outcome::Batch(vec![refused]));
    assert_eq!((Command::Barrier.level(), Command::Barrier.required_level()), (NEXT_LEVEL, NEXT_LEVEL));
    assert_eq!(bench.run(Command::RaiseLevel(NEXT_LEVEL)), Outcome::Done);
    let before = bench.ledger.clone();
    assert_eq!(bench.run(Command::Barrier), Outcome::Done);
    assert!(before.nodes().eq(bench.ledger.nodes()) && bench.ledger.level() == NEXT_LEVEL);
}

#[test]
fn an_entry_reports_the_level_needed_to_read_it() {
    let of = |command| {
        let submission = Submission { client: CLIENT, serial: ClientSerial(1), command };
        LedgerEntry { time: LedgerTime(0), submissions: vec![submission] }.required_level()
    };
    assert_eq!(of(register(1, 1)), 1);
    assert_eq!(of(Command::Batch(vec![register(1, 1), Command::RetireNode(NodeId(2))])), 2);
    assert_eq!(of(Command::RaiseLevel(5)), 5);
    // Even a raise that changes nothing is a command that level 1 does not know.
    assert_eq!(of(Command::RaiseLevel(1)), 2);
}
