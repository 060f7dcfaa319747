use super::*;

#[test]
fn a_shared_prefix_is_one_artifact_and_only_deltas_are_new() {
    let mut bench = LedgerFixture::new();
    for (id, letter) in [(1, 'b'), (2, 'c'), (3, 'd')] {
        bench.step(step(id, &chain(&[('p', 128), (letter, 20)]), 0, 1));
    }
    let root = bench.head_artifact(session(1));
    assert_eq!((root.from(), root.children.len()), (Blocks(0), 2));
    for id in [2, 3] {
        let extent = bench.head_artifact(session(id));
        assert_eq!((extent.from(), extent.bytes()), (Blocks(128), Bytes(2_000)));
        assert_eq!(extent.parent.unwrap().artifact, root.id);
    }
}

#[test]
fn an_artifact_with_two_sessions_is_not_merged() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 30)]);
    bench.step(step(1, &one, 0, 1));
    bench.step(step(2, &one, 0, 1));
    bench.step(step(1, &chain(&[('a', 50)]), 30, 1));
    assert_eq!(bench.ledger.artifact_count(), 2);
    assert_eq!(bench.head_artifact(session(2)).end().id, one.head());
    bench.step(step(1, &chain(&[('a', 70)]), 50, 1));
    assert_eq!(bench.ledger.artifact_count(), 2, "its own extent grows");
}

#[test]
fn a_fork_opens_a_session_at_a_prefix_of_another() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 100)]);
    bench.step(step(1, &one, 0, 1));
    let fork = |at: PrefixRef, child| Command::Fork(ForkSession { parent: session(1), child: session(child), at });
    let first = bench.run(fork(prefix_ref(&one, 64), 2));
    assert_eq!(first, Outcome::Advanced { movement: HeadMovement::First });
    assert_eq!(bench.run(fork(prefix_ref(&one, 64), 2)), Outcome::Advanced { movement: HeadMovement::Unchanged });
    assert_eq!(bench.session(session(2)).parent, Some(session(1)));
    assert_eq!(bench.head_artifact(session(1)).sessions.len(), 2);
    bench.step(step(2, &chain(&[('a', 64), ('b', 5)]), 64, 1));
    assert_eq!(bench.head_artifact(session(2)).from(), Blocks(64));
    let foreign = chain(&[('z', 10)]);
    assert_eq!(bench.run(fork(prefix_ref(&foreign, 10), 3)), Outcome::Refused(Refusal::UnknownPrefix));
}

#[test]
fn a_dropped_boundary_returns_the_artifact_it_was_merged_into() {
    let mut bench = LedgerFixture::new();
    for n in 1..=20 {
        bench.step(step(1, &chain(&[('a', n * 5)]), (n - 1) * 5, 1));
    }
    let extent = bench.head_artifact(session(1)).id;
    let all = chain(&[('a', 100)]);
    let hinted = |blocks| PrefixRef { extent: Some(extent), ..prefix_ref(&all, blocks) };
    let at = |p: PrefixRef| Command::Fork(ForkSession { parent: session(1), child: session(2), at: p });
    assert_eq!(bench.run(at(hinted(20))), Outcome::Merged { extent, kept: None });
    let kept = PrefixPoint::on_chain(&all, Blocks(85));
    assert_eq!(bench.run(at(hinted(88))), Outcome::Merged { extent, kept });
    assert_eq!(bench.run(at(prefix_ref(&all, 20))), Outcome::Refused(Refusal::UnknownPrefix));
    assert_eq!(bench.run(at(prefix_ref(&all, 85))), Outcome::Advanced { movement: HeadMovement::First });
}

#[test]
fn a_fork_at_a_dropped_boundary_attaches_at_the_deepest_retained_point() {
    let mut bench = LedgerFixture::new();
    for n in 1..=40 {
        bench.step(step(1, &chain(&[('a', n * 10)]), (n - 1) * 10, 1));
    }
    let branch = chain(&[('a', 215), ('b', 30)]);
    assert_eq!(bench.locate(None, &branch).known_blocks(), Blocks(192));
    bench.step(step(2, &branch, 192, 1));
    let extent = bench.head_artifact(session(2));
    assert_eq!((extent.from(), extent.end().blocks), (Blocks(192), Blocks(245)));
}

#[test]
fn closing_a_session_unreferences_artifacts_that_expire_when_idle() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 64), ('b', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('a', 64), ('c', 10)]), 0, 1));
    assert_eq!(bench.run(Command::CloseSession(session(2))), Outcome::Done);
    assert_eq!(bench.run(Command::CloseSession(session(2))), Outcome::Done);
    assert_eq!(bench.ledger.artifact_count(), 2, "kept for whoever comes back");
    bench.advance_time(Micros(bench.ledger.limits().artifact_idle.0 + 1_000_000));
    assert_eq!(bench.ledger.artifact_count(), 1);
    assert!(bench.head_artifact(session(1)).children.is_empty());
    bench.run(Command::CloseSession(session(1)));
    assert_eq!(bench.ledger.session_count(), 0);
}

#[test]
fn a_full_ledger_evicts_the_coldest_unreferenced_artifacts_then_refuses() {
    let mut bench = LedgerFixture::empty(LedgerLimits { artifacts: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    bench.step(step(1, &chain(&[('a', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('b', 10)]), 0, 1));
    assert!(!bench.step(step(3, &chain(&[('c', 10)]), 0, 1)).sealed);
    bench.run(Command::CloseSession(session(1)));
    assert!(bench.step(step(3, &chain(&[('c', 10)]), 0, 1)).sealed);
    assert_eq!(bench.locate(None, &chain(&[('a', 10)])).sealed, None);
}

#[test]
fn a_full_session_table_closes_the_longest_idle_session() {
    let mut bench = LedgerFixture::empty(LedgerLimits { sessions: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    for (id, letter) in [(1, 'a'), (2, 'b')] {
        bench.step(step(id, &chain(&[(letter, 10)]), 0, 1));
    }
    bench.step(step(1, &chain(&[('a', 20)]), 10, 1));
    bench.step(step(3, &chain(&[('c', 10)]), 0, 1));
    assert!(bench.ledger.session(session(2)).is_none());
    assert!(bench.ledger.session(session(1)).is_some());
}

#[test]
fn tenants_with_equal_text_share_no_artifacts() {
    let mut bench = LedgerFixture::new();
    let (text, other) = (chain(&[('a', 100)]), TenantId(Arc::from("other")));
    bench.step(step(1, &text, 0, 1));
    let theirs = Scope::of(&other, KvFormatDigest(0));
    let query = LocateQuery { scope: theirs, session: None, chain: &text, shared_prefix: Blocks(0) };
    assert_eq!(bench.ledger.locate(query), LocateResult { session_match: SessionMatch::New, sealed: None });
    bench.step(StepCommit { tenant: &other, session: session(2), ..step(2, &text, 0, 2) });
    assert_eq!(bench.ledger.artifact_count(), 2);
    assert_ne!(bench.head_artifact(session(1)).id, bench.head_artifact(session(2)).id);
    // Naming another tenant's session does not give access either.
    let outcome = bench.step(StepCommit { tenant: &other, ..step(1, &chain(&[('a', 120)]), 100, 2) });
    assert_eq!(outcome.movement, None);
    assert_eq!(bench.session(session(1)).head().unwrap().point.id, text.head());
}

#[test]
fn kv_of_another_format_is_another_artifact() {
    let mut bench = LedgerFixture::new();
    let text = chain(&[('a', 100)]);
    bench.step(step(1, &text, 0, 1));
    let fp8 = KvBlockSpec { format: KvFormatDigest(8), ..shape() };
    bench.step(StepCommit { shape: fp8, ..step(2, &text, 0, 2) });
    assert_eq!(bench.ledger.artifact_count(), 2);
}

#[test]
fn malformed_segments_are_refused_and_change_nothing() {
    let mut bench = LedgerFixture::new();
    let text = chain(&[('a', 200)]);
    let origin = ChainDescriptor { tenant: tenant(), model: ModelId::from("tiny"), root: text.root, shape: shape() };
    let good = ChainSegment::of(&text, Blocks(0), Blocks(200)).unwrap();
    let mut gap = good.clone();
    gap.points.retain(|point| point.blocks != Blocks(64));
    let foreign_root = ChainSegment { base: PrefixPoint { blocks: Blocks(0), id: PrefixId(1) }, ..good.clone() };
    let hash = bench.ledger.records.artifacts.clone();
    for run in [gap, foreign_root, ChainSegment { points: Vec::new(), ..good }] {
        let seal = SealBlocks { session: None, origin: origin.clone(), run, extent: None, owner: owner(1) };
        assert_eq!(bench.run(Command::Seal(seal)), Outcome::Refused(Refusal::InvalidBlockRange));
    }
    assert_eq!(bench.ledger.records.artifacts, hash);
}

#[test]
fn an_artifact_with_children_is_not_merged() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.step(step(1, &chain(&[('a', 50)]), 30, 1));
    bench.step(step(2, &chain(&[('a', 30), ('b', 10)]), 30, 1));
    let first = bench.head_artifact(session(1)).id;
    for n in 6..20 {
        bench.step(step(1, &chain(&[('a', n * 10)]), (n - 1) * 10, 1));
    }
    assert_eq!(bench.ledger.artifact_count(), 3);
    assert_eq!(bench.ledger.artifact(first).unwrap().end().blocks, Blocks(50));
    let branch = bench.head_artifact(session(2)).parent.unwrap();
    assert_eq!((branch.artifact, branch.at.blocks), (first, Blocks(30)));
}

#[test]
fn a_head_stays_findable_while_others_seal_beyond_it() {
    let mut bench = LedgerFixture::new();
    let all = chain(&[('a', 200)]);
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    let origin = bench.head_artifact(session(1)).origin;
    for n in 4..20 {
        let run = ChainSegment::of(&all, Blocks((n - 1) * 10), Blocks(n * 10)).unwrap();
        let seal =
            SealBlocks { session: Some(session(1)), origin: (*origin).clone(), run, extent: None, owner: owner(1) };
        assert!(matches!(bench.run(Command::Seal(seal)), Outcome::Sealed { .. }));
    }
    let located = bench.locate(None, &chain(&[('a', 35)]));
    assert!(
        matches!(located.session_match, SessionMatch::ExtendsHead { head, .. } if head.blocks == Blocks(30)),
        "{located:?}"
    );
}

/// Returns a seal with waypoints only, the longest chain that one command can describe.
fn seal_of_waypoints(points: usize, owner_of: u64) -> Command {
    let at = |n: u64| PrefixPoint {
        blocks: Blocks(n * WAYPOINT),
        id: PrefixId(if n == 0 { 9 } else { u128::from(n) << 64 }),
    };
    let origin = ChainDescriptor { tenant: tenant(), model: ModelId::from("tiny"), root: PrefixId(9), shape: shape() };
    let run = ChainSegment { base: at(0), points: (1..=points as u64).map(at).collect() };
    Command::Seal(SealBlocks { session: None, origin, run, extent: None, owner: owner(owner_of) })
}

#[test]
fn a_segment_of_max_points_is_sealed_and_a_longer_one_is_refused() {
    let mut bench = LedgerFixture::new();
    let Outcome::Sealed { artifact, end, stored, .. } = bench.run(seal_of_waypoints(MAX_POINTS, 1)) else {
        panic!("not sealed")
    };
    assert_eq!((end.blocks.0, stored), (MAX_POINTS as u64 * WAYPOINT, SealResult::New));
    assert_eq!(bench.ledger.artifact(artifact).unwrap().boundaries.len(), MAX_POINTS);
    let again = bench.run(seal_of_waypoints(MAX_POINTS, 1));
    assert!(matches!(again, Outcome::Sealed { stored: SealResult::Known, .. }), "{again:?}");
    assert_eq!(bench.run(seal_of_waypoints(MAX_POINTS + 1, 1)), Outcome::Refused(Refusal::InvalidBlockRange));
    assert_eq!(bench.ledger.artifact_count(), 1);
}

#[test]
fn a_segment_attaches_at_any_retained_waypoint() {
    let mut bench = LedgerFixture::new();
    for (points, stored) in
        [(3, SealResult::New), (64, SealResult::Joined), (65, SealResult::Joined), (2, SealResult::Known)]
    {
        let outcome = bench.run(seal_of_waypoints(points, 1));
        assert!(matches!(outcome, Outcome::Sealed { stored: how, .. } if how == stored), "{points}: {outcome:?}");
    }
    let other = bench.run(seal_of_waypoints(80, 2));
    let Outcome::Sealed { artifact, stored: SealResult::New, .. } = other else { panic!("{other:?}") };
    let child = bench.ledger.artifact(artifact).unwrap();
    assert_eq!((child.from().0, child.boundaries.len()), (65 * WAYPOINT, 15));
}
