//! Tests of what is forgotten and when: copies, idle artifacts, groups, limits, owners whose lease ended.

use vocabulary::{ArtifactGroupId, ArtifactId};

use super::*;

const SECOND: Micros = Micros(1_000_000);

fn group(artifact: ArtifactId, group: u128) -> Command {
    Command::SetGroup(SetGroup { artifact, group: Some(ArtifactGroupId(group)) })
}

/// Returns a chain that only one session uses.
fn text(letter: char) -> PrefixChain {
    chain(&[(letter, 30)])
}

/// Seals an artifact that nothing references afterwards.
fn seal_unreferenced(fixture: &mut LedgerFixture, id: u128, letter: char) -> ArtifactId {
    fixture.step(step(id, &text(letter), 0, 1));
    let extent = fixture.head_artifact(session(id)).id;
    fixture.run(Command::CloseSession(session(id)));
    extent
}

#[test]
fn a_replica_is_listed_until_it_expires() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &text('a'), 0, 1));
    let copy = ReplicateReadonly { place: prefix_ref(&text('a'), 30), holder: owner(2), ttl: SECOND * 2 };
    bench.run(Command::ReplicateReadonly(copy));
    let copies = |fixture: &LedgerFixture| fixture.locate(None, &text('a')).sealed.unwrap().replicas.len();
    let expires = bench.head_artifact(session(1)).replicas[0].expires;
    while bench.ledger.now().after(Micros(1)) < expires {
        assert_eq!(copies(&bench), 1);
        let left = (expires - bench.ledger.now()).0 - 1;
        bench.entry(Micros(left.min(SECOND.0)), Vec::new());
    }
    assert_eq!(copies(&bench), 1, "a microsecond before");
    bench.entry(Micros(1), Vec::new());
    assert_eq!((bench.ledger.now(), copies(&bench)), (expires, 0));
}

#[test]
fn a_repeated_replica_report_keeps_the_longest_prefix_and_expiry() {
    let mut bench = LedgerFixture::new();
    let long = chain(&[('a', 130)]);
    bench.step(step(1, &long, 0, 1));
    let copy = |blocks, ttl| {
        let place = prefix_ref(&long, blocks);
        Command::ReplicateReadonly(ReplicateReadonly { place, holder: owner(2), ttl })
    };
    bench.run(copy(130, SECOND));
    bench.run(copy(64, SECOND * 9));
    let known = bench.head_artifact(session(1)).replicas;
    assert_eq!(known.len(), 1);
    assert_eq!(known[0].upto.blocks, Blocks(130));
    assert!(known[0].expires > bench.ledger.now().after(SECOND * 8));
}

#[test]
fn the_replica_that_expires_first_is_dropped_at_the_bound() {
    let mut bench = LedgerFixture::empty(LedgerLimits { replicas: 1, ..LedgerLimits::default() });
    for n in 1..=3 {
        bench.run(register(n, 1));
    }
    bench.step(step(1, &text('a'), 0, 1));
    for (n, ttl) in [(2, SECOND), (3, SECOND * 5)] {
        let place = prefix_ref(&text('a'), 30);
        bench.run(Command::ReplicateReadonly(ReplicateReadonly { place, holder: owner(n), ttl }));
    }
    assert_eq!(bench.head_artifact(session(1)).replicas.iter().map(|copy| copy.holder).collect::<Vec<_>>(), [owner(3)]);
}

#[test]
fn an_unreferenced_artifact_expires_an_idle_time_after_its_last_write() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifact_idle: SECOND * 10, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    bench.run(register(2, 1));
    // Two artifacts, because two workers computed them; the child keeps its parent alive.
    bench.step(step(1, &text('a'), 0, 1));
    bench.step(StepCommit { ownership: OwnershipTransition::Unchanged, ..step(1, &chain(&[('a', 50)]), 30, 2) });
    assert_eq!(bench.ledger.artifact_count(), 2);
    bench.advance_time(SECOND * 20);
    assert_eq!(bench.ledger.artifact_count(), 2, "a session references them");
    bench.step(StepCommit { ownership: OwnershipTransition::Unchanged, ..step(1, &chain(&[('a', 60)]), 50, 2) });
    bench.run(Command::CloseSession(session(1)));
    bench.advance_time(SECOND * 9);
    assert_eq!(bench.ledger.artifact_count(), 2);
    bench.advance_time(SECOND * 3);
    assert_eq!(bench.ledger.artifact_count(), 0, "the parent follows its child");
}

#[test]
fn an_idle_session_is_closed_and_an_active_session_is_not() {
    let mut bench = LedgerFixture::empty(LedgerLimits { session_idle: SECOND * 10, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    bench.step(step(1, &text('a'), 0, 1));
    bench.step(step(2, &text('b'), 0, 1));
    bench.advance_time(SECOND * 6);
    bench.step(step(2, &chain(&[('b', 40)]), 30, 1));
    bench.advance_time(SECOND * 6);
    assert!(bench.ledger.session(session(1)).is_none());
    assert!(bench.ledger.session(session(2)).is_some());
}

#[test]
fn a_full_table_evicts_only_the_coldest_unreferenced_artifact() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifacts: 3, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    let (old, young) = (seal_unreferenced(&mut bench, 1, 'a'), seal_unreferenced(&mut bench, 2, 'b'));
    bench.step(step(3, &text('c'), 0, 1));
    let used = bench.head_artifact(session(3)).id;
    bench.step(step(4, &text('d'), 0, 1));
    let there = |fixture: &LedgerFixture, id| fixture.ledger.artifact(id).is_some();
    assert_eq!([old, young, used].map(|id| there(&bench, id)), [false, true, true]);
    bench.step(step(5, &text('e'), 0, 1));
    assert_eq!([young, used].map(|id| there(&bench, id)), [false, true]);
    let outcome = bench.run(Command::commit_step(step(6, &text('f'), 0, 1)).unwrap());
    assert!(outcome.refusals().contains(&&Refusal::LedgerFull), "all are referenced: {outcome:?}");
    assert_eq!(bench.ledger.artifact_count(), 3);
}

#[test]
fn a_pinned_artifact_is_never_the_coldest() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifacts: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    let (pinned, other) = (seal_unreferenced(&mut bench, 1, 'a'), seal_unreferenced(&mut bench, 2, 'b'));
    bench.run(Command::Pin(PinArtifact { artifact: pinned, pinned: ArtifactPinFlag::Yes }));
    bench.step(step(3, &text('c'), 0, 1));
    assert!(bench.ledger.artifact(pinned).is_some() && bench.ledger.artifact(other).is_none());
}

#[test]
fn an_artifact_of_an_active_group_outlives_a_younger_ungrouped_artifact() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifacts: 3, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    let (old, young) = (seal_unreferenced(&mut bench, 1, 'a'), seal_unreferenced(&mut bench, 2, 'b'));
    bench.step(step(3, &text('c'), 0, 1));
    let active = bench.head_artifact(session(3)).id;
    for artifact in [old, active] {
        bench.run(group(artifact, 7));
    }
    bench.step(step(3, &chain(&[('c', 40)]), 30, 1));
    assert_eq!(bench.ledger.group_touched(ArtifactGroupId(7)), Some(bench.ledger.now()));
    bench.step(step(4, &text('d'), 0, 1));
    assert!(bench.ledger.artifact(old).is_some(), "its repository is being worked on");
    assert!(bench.ledger.artifact(young).is_none());
}

#[test]
fn groups_do_not_affect_eviction_at_level_1() {
    let mut bench = LedgerFixture::level1(LedgerLimits { artifacts: 3, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    let (old, young) = (seal_unreferenced(&mut bench, 1, 'a'), seal_unreferenced(&mut bench, 2, 'b'));
    bench.step(step(3, &text('c'), 0, 1));
    for artifact in [old, bench.head_artifact(session(3)).id] {
        bench.run(group(artifact, 7));
    }
    bench.step(step(3, &chain(&[('c', 40)]), 30, 1));
    bench.step(step(4, &text('d'), 0, 1));
    assert!(bench.ledger.artifact(old).is_none() && bench.ledger.artifact(young).is_some());
}

#[test]
fn a_group_lists_its_artifacts_and_their_workers() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 9)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('c', 9)]), 0, 1));
    bench.step(step(3, &text('d'), 0, 1));
    for id in [1, 2] {
        let artifact = bench.head_artifact(session(id)).id;
        bench.run(group(artifact, 7));
    }
    let listed: Vec<_> = bench.ledger.group(ArtifactGroupId(7)).map(|artifact| artifact.id).collect();
    let mut wanted = [bench.head_artifact(session(1)).id, bench.head_artifact(session(2)).id];
    wanted.sort_unstable();
    assert_eq!(listed, wanted);
    assert_eq!(
        (bench.ledger.group(ArtifactGroupId(8)).count(), bench.ledger.group_touched(ArtifactGroupId(8))),
        (0, None)
    );
}

#[test]
fn a_sweep_is_bounded_per_entry() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifact_idle: SECOND, sweep: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    for (id, letter) in (1..).zip('a'..='g') {
        seal_unreferenced(&mut bench, id, letter);
    }
    let mut left = bench.ledger.artifact_count();
    assert_eq!(left, 7);
    while left > 0 {
        bench.entry(SECOND, Vec::new());
        let now = bench.ledger.artifact_count();
        assert!(left - now <= 2, "{left} became {now}");
        assert!(now < left || left == 7, "the sweep goes on at {now}");
        left = now;
    }
}

fn tenant_named(tenant: &str) -> TenantId {
    TenantId(tenant.into())
}

fn open_session_of(fixture: &mut LedgerFixture, id: u128, tenant: &TenantId) {
    let open = OpenSession { session: session(id), tenant: tenant.clone(), model: ModelId::from("tiny"), parent: None };
    assert!(matches!(fixture.run(Command::OpenSession(open)), Outcome::Opened { .. }));
}

#[test]
fn a_tenant_over_its_share_of_sessions_closes_its_own_coldest() {
    let mut bench = LedgerFixture::empty(LedgerLimits { sessions: 8, ..LedgerLimits::default() });
    let (small, large, late) = (tenant_named("small"), tenant_named("large"), tenant_named("late"));
    open_session_of(&mut bench, 1, &small);
    open_session_of(&mut bench, 2, &small);
    for id in 100..140 {
        open_session_of(&mut bench, id, &large);
    }
    let held = |fixture: &LedgerFixture, tenant| fixture.ledger.usage(tenant).sessions;
    assert_eq!((held(&bench, &small), held(&bench, &large)), (2, 6));
    assert!(bench.ledger.session(session(1)).is_some(), "the coldest of all, and within its tenant's share");
    // Later tenants get their share from the largest tenant, coldest first.
    for id in 200..203 {
        open_session_of(&mut bench, id, &late);
    }
    assert_eq!([&small, &large, &late].map(|tenant| held(&bench, tenant)), [2, 3, 3]);
    assert!(bench.ledger.session(session(139)).is_some() && bench.ledger.session(session(134)).is_none());
    open_session_of(&mut bench, 203, &late);
    assert_eq!([&small, &large, &late].map(|tenant| held(&bench, tenant)), [2, 3, 3], "all have their shares");
}

#[test]
fn a_tenant_over_its_share_of_artifacts_evicts_its_own_or_is_refused() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifacts: 4, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    let (small, large) = (tenant_named("small"), tenant_named("large"));
    let seal = |fixture: &mut LedgerFixture, id: u128, letter: char, tenant: &TenantId, closes: bool| {
        let text = text(letter);
        let outcome = fixture.run(Command::commit_step(StepCommit { tenant, ..step(id, &text, 0, 1) }).unwrap());
        if closes {
            fixture.run(Command::CloseSession(session(id)));
        }
        outcome
    };
    seal(&mut bench, 1, 'a', &small, true);
    for (id, letter) in (10..).zip('b'..='h') {
        seal(&mut bench, id, letter, &large, true);
    }
    let held = |fixture: &LedgerFixture, tenant| fixture.ledger.usage(tenant).artifacts;
    assert_eq!((held(&bench, &small), held(&bench, &large)), (1, 3), "the small one's was idle longest");
    for (id, letter) in (20..).zip('i'..='k') {
        seal(&mut bench, id, letter, &large, false);
    }
    let refused = seal(&mut bench, 30, 'l', &large, false);
    assert!(refused.refusals().contains(&&Refusal::LedgerFull), "{refused:?}");
    assert_eq!(held(&bench, &small), 1, "it is idle, and not the large one's to evict");
    // The small tenant replaces its own artifact, because none of the large tenant's can be evicted.
    assert!(seal(&mut bench, 2, 'm', &small, false).refusals().is_empty());
    assert_eq!((held(&bench, &small), held(&bench, &large)), (1, 3));
}

#[test]
fn tenants_have_no_shares_at_level_1() {
    let mut bench = LedgerFixture::level1(LedgerLimits { sessions: 2, ..LedgerLimits::default() });
    open_session_of(&mut bench, 1, &tenant_named("small"));
    open_session_of(&mut bench, 2, &tenant_named("large"));
    open_session_of(&mut bench, 3, &tenant_named("large"));
    assert!(bench.ledger.session(session(1)).is_none());
}
