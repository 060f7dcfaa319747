use super::*;

fn claim(id: u128, n: u64) -> Command {
    Command::ClaimOwner(ClaimOwner { subject: Subject::Session(session(id)), owner: owner(n) })
}

#[test]
fn a_claim_is_refused_while_another_owner_is_live() {
    let mut bench = Bench::new();
    let granted = bench.step(step(1, &chain(&[('a', 30)]), 0, 1)).granted.unwrap();
    assert_eq!(bench.run(claim(1, 1)), Outcome::Granted { epoch: granted }, "claiming again is the same grant");
    assert_eq!(bench.run(claim(1, 2)), Outcome::Refused(Refusal::Owned { by: owner(1), epoch: granted }));
    bench.end_lease(1);
    bench.run(register(2, 1));
    assert!(epoch_of(&bench.run(claim(1, 2))) > granted);
    assert_eq!(bench.run(claim(9, 2)), Outcome::Refused(Refusal::UnknownSession));
}

#[test]
fn a_step_beside_the_owner_leaves_the_owner() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let commit = chain(&[('a', 60)]);
    let outcome = bench.step(StepCommit { custody: Custody::Stays, ..step(1, &commit, 30, 2) });
    assert_eq!((outcome.sealed, outcome.granted), (true, None));
    assert_eq!(bench.session(session(1)).owner, Some(owner(1)));
    assert_eq!(bench.extent(session(1)).owner, Some(owner(2)), "who computed the new blocks has them");
    assert_eq!(bench.ledger.artifact_count(), 2);
}

#[test]
fn a_migration_moves_session_and_extents_and_the_step_joins_them() {
    let mut bench = Bench::new();
    let (one, two) = (chain(&[('a', 30)]), chain(&[('a', 60)]));
    bench.step(step(1, &one, 0, 1));
    let seen = bench.session(session(1)).epoch;
    let outcome = bench.step(StepCommit { custody: Custody::Moves { seen }, ..step(1, &two, 30, 2) });
    assert!(outcome.granted.unwrap() > seen);
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.extent(session(1)).owner, Some(owner(2)));
    assert_eq!((bench.ledger.artifact_count(), bench.extent(session(1)).end().id), (1, two.head()));
}

#[test]
fn of_two_migrations_decided_on_one_epoch_the_first_wins() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    let seen = bench.session(session(1)).epoch;
    let to = |n| Command::Migrate(Migrate { session: session(1), to: owner(n), head: Some(one.head()), seen });
    let current = epoch_of(&bench.run(to(2)));
    assert_eq!(bench.run(to(3)), Outcome::Refused(Refusal::Stale { current }));
    assert_eq!(bench.run(to(2)), Outcome::Granted { epoch: current }, "repeated, it is the same grant");
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
}

#[test]
fn a_session_that_nobody_owns_can_be_moved_whatever_was_seen() {
    let mut bench = Bench::new();
    let commit = chain(&[('a', 30)]);
    // The session is opened by this very step; its writer had another session's epoch in hand.
    let custody = Custody::Moves { seen: Epoch::default() };
    let outcome = bench.step(StepCommit { custody, ..step(1, &commit, 0, 2) });
    assert!(outcome.granted.is_some());
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
}

#[test]
fn a_migration_leaves_what_others_share() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('c', 10)]), 0, 1));
    let (theirs, seen) = (bench.extent(session(1)).id, bench.session(session(2)).epoch);
    let head = chain(&[('a', 64), ('c', 10)]).head();
    bench.run(Command::Migrate(Migrate { session: session(2), to: owner(2), head: Some(head), seen }));
    assert_eq!(bench.extent(session(2)).owner, Some(owner(2)));
    assert_eq!(bench.ledger.artifact(theirs).unwrap().owner, Some(owner(1)));
}

#[test]
fn only_the_grant_that_was_seen_can_be_released() {
    let mut bench = Bench::new();
    let granted = bench.step(step(1, &chain(&[('a', 30)]), 0, 1)).granted.unwrap();
    let release = |owner, seen| Command::Release(Release { subject: Subject::Session(session(1)), owner, seen });
    assert_eq!(bench.run(release(owner(2), granted)), Outcome::Done, "not its owner: nothing to give back");
    let stale = Refusal::Stale { current: granted };
    assert_eq!(bench.run(release(owner(1), Epoch::default())), Outcome::Refused(stale));
    assert_eq!(bench.run(release(owner(1), granted)), Outcome::Done);
    assert_eq!(bench.session(session(1)).owner, None);
    assert_eq!(bench.run(release(owner(1), granted)), Outcome::Done);
    assert!(bench.session(session(1)).epoch > granted, "a write decided on the released grant is out of date");
}

#[test]
fn the_effective_owner_falls_back_to_copies_then_stores_then_nobody() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 70)]);
    bench.run(Command::RegisterWorker(RegisterWorker {
        worker: WorkerId(0),
        incarnation: Incarnation(1),
        spec: spec(WorkerKind::Store),
        ttl: Micros(3_600_000_000),
    }));
    bench.step(step(1, &one, 0, 1));
    for holder in [owner(0), owner(2)] {
        let copy = ReplicateReadonly { place: place(&one, 64), holder, ttl: Micros(3_600_000_000) };
        assert_eq!(bench.run(Command::ReplicateReadonly(copy)), Outcome::Done);
    }
    let standing = |bench: &Bench| bench.locate(Some(session(1)), &one).sealed.unwrap().standing;
    assert_eq!(standing(&bench), Standing::Owned(owner(1)));
    bench.end_lease(1);
    assert_eq!(standing(&bench), Standing::Copied(owner(2)));
    bench.end_lease(2);
    assert_eq!(standing(&bench), Standing::Stored(owner(0)));
    bench.run(Command::DropReplica(DropReplica { place: place(&one, 64), holder: owner(0) }));
    assert_eq!(standing(&bench), Standing::Unowned);
    assert_eq!(Standing::Unowned.owner(), None);
    bench.run(register(1, 1));
    assert_eq!(standing(&bench), Standing::Owned(owner(1)), "the same process still has its blocks");
}

#[test]
fn a_seal_adopts_the_path_whose_owner_is_gone() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.end_lease(1);
    bench.run(register(2, 1));
    bench.step(step(1, &chain(&[('a', 60)]), 30, 2));
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.extent(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.ledger.artifact_count(), 1, "adopted, then joined");
}

#[test]
fn copies_end_by_themselves_and_reach_as_far_as_was_copied() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 130)]);
    bench.step(step(1, &one, 0, 1));
    let copy = ReplicateReadonly { place: place(&one, 64), holder: owner(2), ttl: Micros(2_000_000) };
    bench.run(Command::ReplicateReadonly(copy));
    let copies = |bench: &Bench, blocks| {
        let prompt = chain(&[('a', blocks)]);
        bench.locate(None, &prompt).sealed.unwrap().replicas
    };
    assert_eq!(copies(&bench, 64), [owner(2)]);
    assert_eq!(copies(&bench, 130), []);
    bench.pass(Micros(2_500_000));
    assert_eq!(copies(&bench, 64), []);
    assert_eq!(bench.extent(session(1)).replicas, []);
}

#[test]
fn a_copied_prefix_is_recorded_on_every_extent_it_goes_through() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    let two = chain(&[('a', 64), ('c', 10)]);
    bench.step(step(2, &two, 0, 1));
    let place = place(&two, 74);
    bench.run(Command::ReplicateReadonly(ReplicateReadonly { place, holder: owner(3), ttl: TTL }));
    let reach =
        |bench: &Bench, id| bench.extent(session(id)).replicas.iter().map(|r| r.upto.blocks.0).collect::<Vec<_>>();
    assert_eq!((reach(&bench, 1), reach(&bench, 2)), (vec![64], vec![74]));
    bench.run(Command::DropReplica(DropReplica { place, holder: owner(3) }));
    assert_eq!((reach(&bench, 1), reach(&bench, 2)), (vec![], vec![]));
}

#[test]
fn groups_list_their_extents() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let (artifact, group) = (bench.extent(session(1)).id, vocabulary::GroupId(7));
    bench.run(Command::SetGroup(SetGroup { artifact, group: Some(group) }));
    assert_eq!(bench.ledger.group(group).map(|a| a.id).collect::<Vec<_>>(), [artifact]);
    bench.run(Command::SetGroup(SetGroup { artifact, group: None }));
    assert_eq!(bench.ledger.group(group).count(), 0);
}

#[test]
fn an_extent_with_a_live_copy_is_not_joined_and_keeps_it() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    let first = bench.extent(session(1)).id;
    let copy = ReplicateReadonly { place: place(&one, 30), holder: owner(2), ttl: Micros(3_000_000) };
    bench.run(Command::ReplicateReadonly(copy));
    bench.step(step(1, &chain(&[('a', 50)]), 30, 1));
    assert_eq!(bench.ledger.artifact_count(), 2);
    assert_eq!(bench.ledger.artifact(first).unwrap().replicas.len(), 1);
}
