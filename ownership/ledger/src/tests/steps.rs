use super::*;

#[test]
fn a_first_step_opens_claims_seals_and_advances() {
    let mut bench = LedgerFixture::new();
    let chain = chain(&[('a', 100)]);
    let outcome = bench.step(step(1, &chain, 0, 1));
    assert!(outcome.sealed && outcome.granted.is_some() && !outcome.restart_from_root);
    assert_eq!(outcome.movement, Some(HeadMovement::First));
    let session = bench.session(session(1));
    assert_eq!((session.owner, Some(session.epoch)), (Some(owner(1)), outcome.granted));
    let extent = bench.head_artifact(session.id);
    assert_eq!((extent.from(), extent.end().id, extent.bytes()), (Blocks(0), chain.head(), Bytes(10_000)));
}

#[test]
fn steps_merge_into_one_artifact_with_waypoints_and_newest_boundaries() {
    let mut bench = LedgerFixture::new();
    let mut base = 0;
    for n in 1..=40 {
        let chain = chain(&[('a', n * 10)]);
        let outcome = bench.step(step(1, &chain, base, 1));
        let movement = if n == 1 { HeadMovement::First } else { HeadMovement::FastForward };
        assert_eq!((outcome.sealed, outcome.movement), (true, Some(movement)));
        base = n * 10;
    }
    assert_eq!(bench.ledger.artifact_count(), 1);
    let kept: Vec<u64> = bench.head_artifact(session(1)).boundaries.iter().map(|b| b.point.blocks.0).collect();
    assert_eq!(kept, [64, 128, 192, 256, 320, 340, 350, 360, 370, 380, 384, 390, 400]);
}

#[test]
fn a_repeated_commit_changes_nothing() {
    let mut bench = LedgerFixture::new();
    let chain = chain(&[('a', 100)]);
    let first = bench.step(step(1, &chain, 0, 1));
    let (epoch, extents) = (bench.session(session(1)).epoch, bench.ledger.artifact_count());
    let again = bench.step(step(1, &chain, 0, 1));
    assert_eq!(again.movement, Some(HeadMovement::Unchanged));
    assert_eq!(again.granted, first.granted);
    assert_eq!((bench.session(session(1)).epoch, bench.ledger.artifact_count()), (epoch, extents));
}

#[test]
fn a_step_planned_on_a_stale_view_does_not_fork() {
    let mut bench = LedgerFixture::new();
    let (one, two, three) = (chain(&[('a', 30)]), chain(&[('a', 50)]), chain(&[('a', 90)]));
    bench.step(step(1, &one, 0, 1));
    bench.step(step(1, &two, 30, 1));
    // The router of the third step has not seen the second one, but its chain contains it.
    let outcome = bench.step(step(1, &three, 30, 1));
    assert_eq!(outcome.movement, Some(HeadMovement::FastForward));
    assert_eq!((bench.session(session(1)).heads.len(), bench.ledger.artifact_count()), (1, 1));
}

#[test]
fn diverging_steps_become_two_heads_that_advance_independently() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.step(step(1, &chain(&[('a', 30), ('b', 10)]), 30, 1));
    let outcome = bench.step(step(1, &chain(&[('a', 30), ('c', 10)]), 30, 2));
    assert_eq!(outcome.movement, Some(HeadMovement::Diverged));
    assert_eq!(bench.session(session(1)).heads.len(), 2);
    let outcome = bench.step(step(1, &chain(&[('a', 30), ('b', 20)]), 40, 1));
    assert_eq!(outcome.movement, Some(HeadMovement::FastForward));
    assert_eq!(bench.session(session(1)).heads.len(), 2);
}

#[test]
fn a_commit_of_an_ancestor_of_a_head_changes_nothing() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 30)]), 0, 1));
    bench.step(step(1, &chain(&[('a', 60)]), 30, 1));
    let outcome = bench.step(step(1, &chain(&[('a', 30)]), 0, 2));
    assert_eq!(outcome.movement, Some(HeadMovement::Unchanged));
    assert_eq!(bench.session(session(1)).head().unwrap().point.blocks, Blocks(60));
}

#[test]
fn a_rewritten_history_replaces_the_head_it_was_planned_on() {
    let mut bench = LedgerFixture::new();
    let old = chain(&[('a', 200)]);
    bench.step(step(1, &old, 0, 1));
    let new = chain(&[('a', 150), ('b', 20)]);
    let located = bench.locate(Some(session(1)), &new);
    assert_eq!(located.replaced_head(), Some(old.head()));
    assert_eq!(located.known_blocks(), Blocks(128));
    let outcome =
        bench.step(StepCommit { replaced_head: located.replaced_head(), ..step(1, &new, located.known_blocks().0, 1) });
    assert_eq!(outcome.movement, Some(HeadMovement::Replaced));
    let session = bench.session(session(1));
    assert_eq!(session.heads.len(), 1);
    assert_eq!(session.head().unwrap().point.id, new.head());
}

#[test]
fn a_rewrite_of_a_moved_head_becomes_a_second_head() {
    let mut bench = LedgerFixture::new();
    let old = chain(&[('a', 100)]);
    bench.step(step(1, &old, 0, 1));
    bench.step(step(1, &chain(&[('a', 120)]), 100, 1));
    let new = chain(&[('a', 90), ('b', 20)]);
    let outcome = bench.step(StepCommit { replaced_head: Some(old.head()), ..step(1, &new, 64, 1) });
    assert_eq!(outcome.movement, Some(HeadMovement::Diverged));
    assert_eq!(bench.session(session(1)).heads.len(), 2);
}

#[test]
fn the_coldest_head_is_dropped_at_the_bound() {
    let mut bench = LedgerFixture::empty(LedgerLimits { heads: 2, ..LedgerLimits::default() });
    bench.run(register(1, 1));
    for letter in ['b', 'c', 'd'] {
        bench.step(step(1, &chain(&[('a', 10), (letter, 5)]), 0, 1));
    }
    let heads: Vec<PrefixId> = bench.session(session(1)).heads.iter().map(|head| head.point.id).collect();
    assert_eq!(heads, [chain(&[('a', 10), ('c', 5)]).head(), chain(&[('a', 10), ('d', 5)]).head()]);
}

#[test]
fn a_step_that_sealed_no_blocks_has_no_commit() {
    let chain = chain(&[('a', 5)]);
    assert_eq!(Command::commit_step(StepCommit { sealed: Blocks(0), ..step(1, &chain, 0, 1) }), None);
    assert_eq!(Command::commit_step(StepCommit { sealed: Blocks(6), ..step(1, &chain, 0, 1) }), None);
    // A commit without new blocks still confirms head and owner.
    assert!(Command::commit_step(step(1, &chain, 5, 1)).is_some());
}

#[test]
fn an_unknown_base_requests_a_restart_from_the_root_that_succeeds() {
    let mut bench = LedgerFixture::new();
    let chain = chain(&[('a', 300)]);
    let outcome = bench.step(step(1, &chain, 250, 1));
    assert!(outcome.restart_from_root && !outcome.sealed);
    let outcome = bench.step(step(1, &chain, 0, 1));
    assert!(outcome.sealed && !outcome.restart_from_root);
}

#[test]
fn a_commit_of_a_stale_incarnation_is_refused_without_a_restart() {
    let mut bench = LedgerFixture::new();
    let (one, two) = (chain(&[('a', 30)]), chain(&[('a', 60)]));
    bench.step(step(1, &one, 0, 1));
    bench.run(register(1, 2));
    let outcome = bench.step(step(1, &two, 30, 1));
    assert!(!outcome.sealed && !outcome.restart_from_root);
    assert_eq!(bench.session(session(1)).head().unwrap().point.id, one.head());
}

#[test]
fn an_intent_lasts_until_its_step_commits_or_it_expires() {
    let mut bench = LedgerFixture::new();
    let (one, two) = (chain(&[('a', 30)]), chain(&[('a', 60)]));
    bench.step(step(1, &one, 0, 1));
    let intent = |router, step| {
        Command::Intent(SetIntent { session: session(1), base: one.head(), router: NodeId(router), step })
    };
    let seen = |fixture: &LedgerFixture| fixture.ledger.intents(session(1)).map(|i| i.router.0).collect::<Vec<_>>();
    bench.run(intent(1, Some((owner(1), Micros(30_000_000)))));
    bench.run(intent(2, Some((owner(2), Micros(5_000_000)))));
    bench.run(intent(2, Some((owner(3), Micros(5_000_000)))));
    assert_eq!(seen(&bench), [1, 2]);
    assert_eq!(bench.session(session(1)).owner, Some(owner(1)), "an intent owns nothing");
    bench.step(step(1, &two, 30, 1));
    assert_eq!(seen(&bench), [2], "the seal replaces it");
    bench.advance_time(Micros(6_000_000));
    assert_eq!(seen(&bench), Vec::<u64>::new());
    let root = SetIntent { session: session(1), base: one.root, router: NodeId(1), step: Some((owner(1), TTL)) };
    bench.run(Command::Intent(root));
    bench.step(step(1, &chain(&[('a', 70)]), 60, 1));
    assert_eq!(seen(&bench), Vec::<u64>::new(), "a step announced without a base is over too");
    bench.run(intent(3, Some((owner(1), Micros(30_000_000)))));
    bench.run(intent(3, None));
    assert_eq!(seen(&bench), Vec::<u64>::new(), "withdrawn");
}
