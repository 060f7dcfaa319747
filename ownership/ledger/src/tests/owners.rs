use super::*;

fn claim(id: u128, n: u64) -> Command {
    Command::ClaimOwner(ClaimOwner { subject: OwnershipSubject::Session(session(id)), owner: owner(n) })
}

#[test]
fn a_claim_is_refused_while_another_owner_is_live() {
    let mut bench = LedgerFixture::new();
    let granted = bench.step(step(1, &chain(&[('a', 30)]), 0, 1)).granted.unwrap();
    assert_eq!(bench.run(claim(1, 1)), Outcome::Granted { epoch: granted }, "claiming again is the same grant");
    assert_eq!(bench.run(claim(1, 2)), Outcome::Refused(Refusal::AlreadyOwned { by: owner(1), epoch: granted }));
    bench.expire_lease(1);
    bench.run(register(2, 1));
    assert!(epoch_of(&bench.run(claim(1, 2))) > granted);
    assert_eq!(bench.run(claim(9, 2)), Outcome::Refused(Refusal::UnknownSession));
}

#[test]
fn a_step_served_by_another_worker_does_not_move_session_ownership() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let commit = chain(&[('a', 60)]);
    let outcome = bench.step(StepCommit { ownership: OwnershipTransition::Unchanged, ..step(1, &commit, 30, 2) });
    assert_eq!((outcome.sealed, outcome.granted), (true, None));
    assert_eq!(bench.session(session(1)).owner, Some(owner(1)));
    assert_eq!(bench.head_artifact(session(1)).owner, Some(owner(2)), "who computed the new blocks has them");
    assert_eq!(bench.ledger.artifact_count(), 2);
}

#[test]
fn a_migration_moves_session_and_artifacts_and_the_step_extends_them() {
    let mut bench = LedgerFixture::new();
    let (one, two) = (chain(&[('a', 30)]), chain(&[('a', 60)]));
    bench.step(step(1, &one, 0, 1));
    let seen = bench.session(session(1)).epoch;
    let outcome = bench.step(StepCommit { ownership: OwnershipTransition::Migrate { seen }, ..step(1, &two, 30, 2) });
    assert!(outcome.granted.unwrap() > seen);
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.head_artifact(session(1)).owner, Some(owner(2)));
    assert_eq!((bench.ledger.artifact_count(), bench.head_artifact(session(1)).end().id), (1, two.head()));
}

#[test]
fn the_first_of_two_migrations_from_one_epoch_wins() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    let seen = bench.session(session(1)).epoch;
    let to = |n| Command::Migrate(MigrateSession { session: session(1), to: owner(n), head: Some(one.head()), seen });
    let current = epoch_of(&bench.run(to(2)));
    assert_eq!(bench.run(to(3)), Outcome::Refused(Refusal::StaleEpoch { current }));
    assert_eq!(bench.run(to(2)), Outcome::Granted { epoch: current }, "repeated, it is the same grant");
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
}

#[test]
fn an_unowned_session_can_be_moved_from_any_seen_epoch() {
    let mut bench = LedgerFixture::new();
    let commit = chain(&[('a', 30)]);
    // The session is opened by this very step; its writer used another session's epoch.
    let transition = OwnershipTransition::Migrate { seen: Epoch::default() };
    let outcome = bench.step(StepCommit { ownership: transition, ..step(1, &commit, 0, 2) });
    assert!(outcome.granted.is_some());
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
}

#[test]
fn a_migration_leaves_artifacts_shared_with_other_sessions() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('c', 10)]), 0, 1));
    let (theirs, seen) = (bench.head_artifact(session(1)).id, bench.session(session(2)).epoch);
    let head = chain(&[('a', 64), ('c', 10)]).head();
    bench.run(Command::Migrate(MigrateSession { session: session(2), to: owner(2), head: Some(head), seen }));
    assert_eq!(bench.head_artifact(session(2)).owner, Some(owner(2)));
    assert_eq!(bench.ledger.artifact(theirs).unwrap().owner, Some(owner(1)));
}

#[test]
fn a_release_needs_the_current_grant_epoch() {
    let mut bench = LedgerFixture::new();
    let granted = bench.step(step(1, &chain(&[('a', 30)]), 0, 1)).granted.unwrap();
    let release =
        |owner, seen| Command::Release(ReleaseOwner { subject: OwnershipSubject::Session(session(1)), owner, seen });
    assert_eq!(bench.run(release(owner(2), granted)), Outcome::Done, "not its owner: nothing to give back");
    let stale = Refusal::StaleEpoch { current: granted };
    assert_eq!(bench.run(release(owner(1), Epoch::default())), Outcome::Refused(stale));
    assert_eq!(bench.run(release(owner(1), granted)), Outcome::Done);
    assert_eq!(bench.session(session(1)).owner, None);
    assert_eq!(bench.run(release(owner(1), granted)), Outcome::Done);
    assert!(bench.session(session(1)).epoch > granted, "a write decided on the released grant is out of date");
}

#[test]
fn the_effective_owner_falls_back_to_replicas_then_stores_then_none() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 70)]);
    bench.run(Command::RegisterWorker(RegisterWorker {
        worker: WorkerId(0),
        incarnation: Incarnation(1),
        spec: spec(WorkerKind::Store),
        ttl: Micros(3_600_000_000),
    }));
    bench.step(step(1, &one, 0, 1));
    for holder in [owner(0), owner(2)] {
        let copy = ReplicateReadonly { place: prefix_ref(&one, 64), holder, ttl: Micros(3_600_000_000) };
        assert_eq!(bench.run(Command::ReplicateReadonly(copy)), Outcome::Done);
    }
    let standing = |fixture: &LedgerFixture| fixture.locate(Some(session(1)), &one).sealed.unwrap().status;
    assert_eq!(standing(&bench), OwnershipStatus::Owned(owner(1)));
    bench.expire_lease(1);
    assert_eq!(standing(&bench), OwnershipStatus::Replicated(owner(2)));
    bench.expire_lease(2);
    assert_eq!(standing(&bench), OwnershipStatus::InStore(owner(0)));
    bench.run(Command::DropReplica(DropReplica { place: prefix_ref(&one, 64), holder: owner(0) }));
    assert_eq!(standing(&bench), OwnershipStatus::Unowned);
    assert_eq!(OwnershipStatus::Unowned.owner(), None);
    bench.run(register(1, 1));
    assert_eq!(standing(&bench), OwnershipStatus::Owned(owner(1)), "the same process still has its blocks");
}

#[test]
fn a_seal_adopts_the_path_of_a_lost_owner() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.expire_lease(1);
    bench.run(register(2, 1));
    bench.step(step(1, &chain(&[('a', 60)]), 30, 2));
    assert_eq!(bench.session(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.head_artifact(session(1)).owner, Some(owner(2)));
    assert_eq!(bench.ledger.artifact_count(), 1, "adopted, then joined");
}

#[test]
fn replicas_expire_and_cover_only_the_copied_prefix() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 130)]);
    bench.step(step(1, &one, 0, 1));
    let copy = ReplicateReadonly { place: prefix_ref(&one, 64), holder: owner(2), ttl: Micros(2_000_000) };
    bench.run(Command::ReplicateReadonly(copy));
    let copies = |fixture: &LedgerFixture, blocks| {
        let prompt = chain(&[('a', blocks)]);
        fixture.locate(None, &prompt).sealed.unwrap().replicas
    };
    assert_eq!(copies(&bench, 64), [owner(2)]);
    assert_eq!(copies(&bench, 130), []);
    bench.advance_time(Micros(2_500_000));
    assert_eq!(copies(&bench, 64), []);
    assert_eq!(bench.head_artifact(session(1)).replicas, []);
}

#[test]
fn a_replicated_prefix_is_recorded_on_every_artifact_of_its_path() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    let two = chain(&[('a', 64), ('c', 10)]);
    bench.step(step(2, &two, 0, 1));
    let place = prefix_ref(&two, 74);
    bench.run(Command::ReplicateReadonly(ReplicateReadonly { place, holder: owner(3), ttl: TTL }));
    let reach = |fixture: &LedgerFixture, id| {
        fixture.head_artifact(session(id)).replicas.iter().map(|r| r.upto.blocks.0).collect::<Vec<_>>()
    };
    assert_eq!((reach(&bench, 1), reach(&bench, 2)), (vec![64], vec![74]));
    bench.run(Command::DropReplica(DropReplica { place, holder: owner(3) }));
    assert_eq!((reach(&bench, 1), reach(&bench, 2)), (vec![], vec![]));
}

#[test]
fn groups_list_their_artifacts() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let (artifact, group) = (bench.head_artifact(session(1)).id, vocabulary::ArtifactGroupId(7));
    bench.run(Command::SetGroup(SetGroup { artifact, group: Some(group) }));
    assert_eq!(bench.ledger.group(group).map(|a| a.id).collect::<Vec<_>>(), [artifact]);
    bench.run(Command::SetGroup(SetGroup { artifact, group: None }));
    assert_eq!(bench.ledger.group(group).count(), 0);
}

#[test]
fn an_artifact_with_a_live_replica_is_not_merged() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    let first = bench.head_artifact(session(1)).id;
    let copy = ReplicateReadonly { place: prefix_ref(&one, 30), holder: owner(2), ttl: Micros(3_000_000) };
    bench.run(Command::ReplicateReadonly(copy));
    bench.step(step(1, &chain(&[('a', 50)]), 30, 1));
    assert_eq!(bench.ledger.artifact_count(), 2);
    assert_eq!(bench.ledger.artifact(first).unwrap().replicas.len(), 1);
}
