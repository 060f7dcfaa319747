use vocabulary::ArtifactId;

use super::*;

#[test]
fn locate_on_an_empty_ledger_finds_nothing() {
    let bench = LedgerFixture::new();
    let located = bench.locate(Some(session(1)), &chain(&[('a', 10)]));
    assert_eq!(located, LocateResult { session_match: SessionMatch::New, sealed: None });
    assert_eq!((located.known_blocks(), located.session()), (Blocks(0), None));
}

#[test]
fn a_prompt_without_a_session_finds_the_session_whose_head_it_extends() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 137)]);
    bench.step(step(1, &one, 0, 1));
    let located = bench.locate(None, &chain(&[('a', 137), ('b', 30)]));
    let head = PrefixPoint::on_chain(&one, Blocks(137)).unwrap();
    assert_eq!(located.session_match, SessionMatch::ExtendsHead { session: session(1), head });
    let sealed = located.sealed.unwrap();
    assert_eq!((sealed.point, sealed.status), (head, OwnershipStatus::Owned(owner(1))));
    assert_eq!(sealed.artifact, bench.head_artifact(session(1)).id);
}

#[test]
fn the_deepest_head_that_prefixes_the_prompt_is_chosen() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 70), ('b', 10)]), 0, 1));
    bench.step(step(1, &chain(&[('a', 70), ('c', 10)]), 0, 1));
    for letter in ['b', 'c'] {
        let located = bench.locate(Some(session(1)), &chain(&[('a', 70), (letter, 10), ('d', 3)]));
        let head = chain(&[('a', 70), (letter, 10)]);
        let head = PrefixPoint::on_chain(&head, Blocks(80)).unwrap();
        assert_eq!(located.session_match, SessionMatch::ExtendsHead { session: session(1), head });
    }
}

#[test]
fn a_prompt_that_leaves_a_session_path_midway_is_a_fork() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 200)]);
    bench.step(step(1, &one, 0, 1));
    let prompt = chain(&[('a', 150), ('b', 30)]);
    let (head, at) =
        (PrefixPoint::on_chain(&one, Blocks(200)).unwrap(), PrefixPoint::on_chain(&one, Blocks(128)).unwrap());
    let leaves = SessionMatch::ForksFrom { session: session(1), head, fork_point: at };
    assert_eq!(bench.locate(None, &prompt).session_match, leaves);
    assert_eq!(bench.locate(Some(session(1)), &prompt).session_match, leaves);
    let query = LocateQuery { scope: scope(), session: None, chain: &prompt, shared_prefix: Blocks(150) };
    assert_eq!(
        bench.ledger.locate(query).session_match,
        SessionMatch::SharesPrefix { at },
        "a preamble alone is no fork"
    );
    assert_eq!(bench.locate(Some(session(7)), &prompt).session_match, SessionMatch::SharesPrefix { at });
}

#[test]
fn a_prompt_that_shares_a_multi_session_prefix_is_a_new_session() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('p', 64), ('a', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('p', 64), ('b', 10)]), 0, 1));
    let located = bench.locate(None, &chain(&[('p', 64), ('c', 10)]));
    assert!(matches!(located.session_match, SessionMatch::SharesPrefix { at } if at.blocks == Blocks(64)));
    assert_eq!(located.session(), None);
}

/// A step of a session that was forked from another one.
fn fork_step(id: u128, parent: u128, chain: &PrefixChain) -> StepCommit<'_> {
    StepCommit { parent: Some(session(parent)), ..step(id, chain, 128, 1) }
}

fn fork_point(located: &LocateResult) -> Option<(SessionId, u64)> {
    match located.session_match {
        SessionMatch::ForksFrom { session, fork_point: at, .. } => Some((session, at.blocks.0)),
        _ => None,
    }
}

#[test]
fn every_prompt_leaving_at_one_point_forks_the_first_session_there() {
    let mut bench = LedgerFixture::new();
    bench.step(step(9, &chain(&[('a', 200)]), 0, 1));
    for (number, letter) in ('b'..='h').enumerate() {
        let text = chain(&[('a', 128), (letter, 30)]);
        assert_eq!(fork_point(&bench.locate(None, &text)), Some((session(9), 128)), "fork {number}");
        bench.step(fork_step(number as u128, 9, &text));
    }
    let deeper = chain(&[('a', 128), ('b', 30), ('z', 70)]);
    bench.step(StepCommit { base: Blocks(158), ..step(0, &deeper, 0, 1) });
    for (id, letter) in [(20, 'i'), (21, 'j')] {
        let text = chain(&[('a', 128), ('b', 30), ('z', 34), (letter, 30)]);
        assert_eq!(
            fork_point(&bench.locate(None, &text)),
            Some((session(0), 192)),
            "the nearest path is the fork's own"
        );
        bench.step(StepCommit { base: Blocks(192), ..fork_step(id, 0, &text) });
    }
}

#[test]
fn forks_stay_related_after_their_parent_session_closes() {
    let mut bench = LedgerFixture::new();
    bench.step(step(9, &chain(&[('a', 200)]), 0, 1));
    for (id, letter) in [(3, 'b'), (2, 'c')] {
        bench.step(fork_step(id, 9, &chain(&[('a', 128), (letter, 30)])));
    }
    assert_eq!(bench.run(Command::CloseSession(session(9))), Outcome::Done);
    let located = bench.locate(None, &chain(&[('a', 128), ('d', 30)]));
    assert_eq!(fork_point(&located), Some((session(3), 128)), "the eldest that is left; what is closed ends no search");
}

#[test]
fn a_session_with_many_artifacts_is_found_as_the_fork_parent() {
    let mut bench = LedgerFixture::new();
    for end in 1..=200 {
        bench.step(step(9, &chain(&[('a', 64 + end)]), if end == 1 { 0 } else { 63 + end }, 1 + end % 2));
    }
    bench.step(StepCommit { base: Blocks(64), ..fork_step(2, 9, &chain(&[('a', 64), ('b', 30)])) });
    assert!(bench.ledger.artifacts_after(None).count() > 100, "its extents were not joined");
    assert_eq!(fork_point(&bench.locate(None, &chain(&[('a', 64), ('c', 30)]))), Some((session(9), 64)));
}

#[test]
fn a_prefix_of_more_than_max_sessions_counts_as_shared() {
    let mut bench = LedgerFixture::new();
    bench.step(step(999, &chain(&[('p', 64), ('a', 10)]), 0, 1));
    let text = |id: u128| chain(&[('p', 64), (char::from_u32(0x200 + id as u32).unwrap(), 10)]);
    for id in 0..63 {
        bench.step(StepCommit { base: Blocks(64), ..fork_step(id, 999, &text(id)) });
    }
    assert_eq!(fork_point(&bench.locate(None, &text(500))), Some((session(999), 64)));
    bench.step(StepCommit { base: Blocks(64), ..fork_step(63, 999, &text(63)) });
    assert!(
        matches!(bench.locate(None, &text(500)).session_match, SessionMatch::SharesPrefix { at } if at.blocks == Blocks(64))
    );
}

#[test]
fn another_branch_of_a_named_session_does_not_replace_its_head() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('p', 64), ('a', 200)]), 0, 1));
    let located = bench.locate(Some(session(1)), &chain(&[('p', 64), ('b', 200)]));
    assert!(
        matches!(located.session_match, SessionMatch::ForksFrom { fork_point, .. } if fork_point.blocks == Blocks(64))
    );
    assert_eq!(located.replaced_head(), None);
}

#[test]
fn a_named_session_without_a_common_prefix_forks_at_the_root() {
    let mut bench = LedgerFixture::new();
    bench.step(step(1, &chain(&[('a', 100)]), 0, 1));
    let located = bench.locate(Some(session(1)), &chain(&[('z', 100)]));
    let root = PrefixPoint { blocks: Blocks(0), id: PrefixId(9) };
    assert!(matches!(located.session_match, SessionMatch::ForksFrom { fork_point, .. } if fork_point == root));
    assert_eq!(located.sealed, None);
}

#[test]
fn locate_finds_prefixes_of_every_depth() {
    let mut bench = LedgerFixture::new();
    for end in [1, 2, 63, 64, 65, 127, 128, 129, 1_000] {
        let letter = char::from_u32(0x100 + end as u32).unwrap();
        let text = chain(&[(letter, end)]);
        bench.step(step(u128::from(end), &text, 0, 1));
        for more in [0, 1, 62, 63, 64, 200] {
            let prompt = chain(&[(letter, end), ('z', more)]);
            assert_eq!(bench.locate(None, &prompt).known_blocks(), Blocks(end), "{end} blocks and {more} more");
        }
        let before = chain(&[(letter, end - 1)]);
        assert_eq!(bench.locate(None, &before).known_blocks(), Blocks((end - 1) / 64 * 64));
    }
}

#[test]
fn a_step_resolves_to_its_named_session_its_chain_or_a_new_session() {
    let mut bench = LedgerFixture::new();
    let one = chain(&[('a', 200)]);
    bench.step(step(1, &one, 0, 1));
    let (old, fresh) = (session(1), session(9));
    let head = PrefixPoint::on_chain(&one, Blocks(200)).unwrap();
    let whose = |prompt: &[(char, u64)], named| bench.locate(named, &chain(prompt)).resolve_session(named, fresh);
    let goes_on = [('a', 200), ('b', 30)];
    let continues =
        ResolvedSession { session: old, parent: None, head: Some((head, Blocks(200))), replaced_head: None };
    assert_eq!([whose(&goes_on, Some(old)), whose(&goes_on, None)], [continues; 2]);
    let leaves = [('a', 150), ('b', 30)];
    let left = Some((head, Blocks(128)));
    let rewritten = ResolvedSession { session: old, parent: None, head: left, replaced_head: Some(head.id) };
    assert_eq!(whose(&leaves, Some(old)), rewritten);
    assert_eq!(
        whose(&leaves, None),
        ResolvedSession { session: fresh, parent: Some(old), head: left, replaced_head: None }
    );
    let unknown = ResolvedSession { session: fresh, parent: None, head: None, replaced_head: None };
    assert_eq!(whose(&[('z', 10)], None), unknown);
    assert_eq!(whose(&leaves, Some(session(7))), ResolvedSession { session: session(7), ..unknown });
}

#[test]
fn holders_of_a_shared_prefix_include_its_owner_and_replicas() {
    let sealed = |standing, replicas: &[u64]| {
        let at = PrefixPoint { blocks: Blocks(4), id: PrefixId(4) };
        let replicas = replicas.iter().copied().map(owner).collect();
        SealedPrefixMatch {
            artifact: ArtifactId(1),
            point: at,
            status: standing,
            epoch: Epoch::default(),
            replicas,
            group: None,
        }
    };
    let shared = sealed(OwnershipStatus::Owned(owner(1)), &[2]);
    assert_eq!(shared.holders(None), [owner(1), owner(2)]);
    assert_eq!(shared.holders(Some(owner(1))), [owner(2)]);
    assert_eq!(shared.holders(Some(owner(2))), [owner(1)]);
    assert_eq!(sealed(OwnershipStatus::Replicated(owner(2)), &[2, 3]).holders(None), [owner(2), owner(3)]);
    assert_eq!(sealed(OwnershipStatus::Unowned, &[]).holders(Some(owner(1))), []);
}
