use vocabulary::ArtifactId;

use super::*;

#[test]
fn an_empty_ledger_knows_nothing() {
    let bench = Bench::new();
    let located = bench.locate(Some(session(1)), &chain(&[('a', 10)]));
    assert_eq!(located, Located { lineage: Lineage::New, sealed: None });
    assert_eq!((located.known(), located.session()), (Blocks(0), None));
}

#[test]
fn a_prompt_without_a_session_finds_the_one_whose_head_it_extends() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 137)]);
    bench.step(step(1, &one, 0, 1));
    let located = bench.locate(None, &chain(&[('a', 137), ('b', 30)]));
    let head = Point::on(&one, Blocks(137)).unwrap();
    assert_eq!(located.lineage, Lineage::Continues { session: session(1), head });
    let sealed = located.sealed.unwrap();
    assert_eq!((sealed.at, sealed.standing), (head, Standing::Owned(owner(1))));
    assert_eq!(sealed.artifact, bench.extent(session(1)).id);
}

#[test]
fn of_several_heads_the_deepest_that_prefixes_the_prompt_is_taken() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 70), ('b', 10)]), 0, 1));
    bench.step(step(1, &chain(&[('a', 70), ('c', 10)]), 0, 1));
    for letter in ['b', 'c'] {
        let located = bench.locate(Some(session(1)), &chain(&[('a', 70), (letter, 10), ('d', 3)]));
        let head = chain(&[('a', 70), (letter, 10)]);
        let head = Point::on(&head, Blocks(80)).unwrap();
        assert_eq!(located.lineage, Lineage::Continues { session: session(1), head });
    }
}

#[test]
fn leaving_a_path_in_the_middle_is_a_fork_of_the_session_it_belongs_to() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 200)]);
    bench.step(step(1, &one, 0, 1));
    let prompt = chain(&[('a', 150), ('b', 30)]);
    let (head, at) = (Point::on(&one, Blocks(200)).unwrap(), Point::on(&one, Blocks(128)).unwrap());
    let leaves = Lineage::Leaves { session: session(1), head, at };
    assert_eq!(bench.locate(None, &prompt).lineage, leaves);
    assert_eq!(bench.locate(Some(session(1)), &prompt).lineage, leaves);
    let query = Query { scope: scope(), session: None, chain: &prompt, preamble: Blocks(150) };
    assert_eq!(bench.ledger.locate(query).lineage, Lineage::Shares { at }, "a preamble alone is no fork");
    assert_eq!(bench.locate(Some(session(7)), &prompt).lineage, Lineage::Shares { at });
}

#[test]
fn sharing_what_several_sessions_share_is_a_new_session() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('p', 64), ('a', 10)]), 0, 1));
    bench.step(step(2, &chain(&[('p', 64), ('b', 10)]), 0, 1));
    let located = bench.locate(None, &chain(&[('p', 64), ('c', 10)]));
    assert!(matches!(located.lineage, Lineage::Shares { at } if at.blocks == Blocks(64)));
    assert_eq!(located.session(), None);
}

/// A step of a session that was forked from another one.
fn forked(id: u128, parent: u128, chain: &Chain) -> StepCommit<'_> {
    StepCommit { parent: Some(session(parent)), ..step(id, chain, 128, 1) }
}

fn left(located: &Located) -> Option<(SessionId, u64)> {
    match located.lineage {
        Lineage::Leaves { session, at, .. } => Some((session, at.blocks.0)),
        _ => None,
    }
}

#[test]
fn every_prompt_that_leaves_a_path_at_one_point_is_a_fork_of_the_session_that_was_there_first() {
    let mut bench = Bench::new();
    bench.step(step(9, &chain(&[('a', 200)]), 0, 1));
    for (number, letter) in ('b'..='h').enumerate() {
        let text = chain(&[('a', 128), (letter, 30)]);
        assert_eq!(left(&bench.locate(None, &text)), Some((session(9), 128)), "fork {number}");
        bench.step(forked(number as u128, 9, &text));
    }
    let deeper = chain(&[('a', 128), ('b', 30), ('z', 70)]);
    bench.step(StepCommit { base: Blocks(158), ..step(0, &deeper, 0, 1) });
    for (id, letter) in [(20, 'i'), (21, 'j')] {
        let text = chain(&[('a', 128), ('b', 30), ('z', 34), (letter, 30)]);
        assert_eq!(left(&bench.locate(None, &text)), Some((session(0), 192)), "the nearest path is the fork's own");
        bench.step(StepCommit { base: Blocks(192), ..forked(id, 0, &text) });
    }
}

#[test]
fn forks_stay_a_family_when_the_session_that_they_left_is_closed() {
    let mut bench = Bench::new();
    bench.step(step(9, &chain(&[('a', 200)]), 0, 1));
    for (id, letter) in [(3, 'b'), (2, 'c')] {
        bench.step(forked(id, 9, &chain(&[('a', 128), (letter, 30)])));
    }
    assert_eq!(bench.run(Command::CloseSession(session(9))), Outcome::Done);
    let located = bench.locate(None, &chain(&[('a', 128), ('d', 30)]));
    assert_eq!(left(&located), Some((session(3), 128)), "the eldest that is left; what is closed ends no search");
}

#[test]
fn a_session_that_moved_often_is_found_behind_all_its_extents() {
    let mut bench = Bench::new();
    for end in 1..=200 {
        bench.step(step(9, &chain(&[('a', 64 + end)]), if end == 1 { 0 } else { 63 + end }, 1 + end % 2));
    }
    bench.step(StepCommit { base: Blocks(64), ..forked(2, 9, &chain(&[('a', 64), ('b', 30)])) });
    assert!(bench.ledger.artifacts_after(None).count() > 100, "its extents were not joined");
    assert_eq!(left(&bench.locate(None, &chain(&[('a', 64), ('c', 30)]))), Some((session(9), 64)));
}

#[test]
fn what_more_sessions_share_than_are_looked_at_is_what_everybody_begins_with() {
    let mut bench = Bench::new();
    bench.step(step(999, &chain(&[('p', 64), ('a', 10)]), 0, 1));
    let text = |id: u128| chain(&[('p', 64), (char::from_u32(0x200 + id as u32).unwrap(), 10)]);
    for id in 0..63 {
        bench.step(StepCommit { base: Blocks(64), ..forked(id, 999, &text(id)) });
    }
    assert_eq!(left(&bench.locate(None, &text(500))), Some((session(999), 64)));
    bench.step(StepCommit { base: Blocks(64), ..forked(63, 999, &text(63)) });
    assert!(matches!(bench.locate(None, &text(500)).lineage, Lineage::Shares { at } if at.blocks == Blocks(64)));
}

#[test]
fn another_branch_of_a_named_session_does_not_replace_its_head() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('p', 64), ('a', 200)]), 0, 1));
    let located = bench.locate(Some(session(1)), &chain(&[('p', 64), ('b', 200)]));
    assert!(matches!(located.lineage, Lineage::Leaves { at, .. } if at.blocks == Blocks(64)));
    assert_eq!(located.rewrites(), None);
}

#[test]
fn nothing_in_common_with_a_named_session_leaves_it_at_the_root() {
    let mut bench = Bench::new();
    bench.step(step(1, &chain(&[('a', 100)]), 0, 1));
    let located = bench.locate(Some(session(1)), &chain(&[('z', 100)]));
    let root = Point { blocks: Blocks(0), id: PrefixId(9) };
    assert!(matches!(located.lineage, Lineage::Leaves { at, .. } if at == root));
    assert_eq!(located.sealed, None);
}

#[test]
fn every_depth_is_found_by_halving() {
    let mut bench = Bench::new();
    for end in [1, 2, 63, 64, 65, 127, 128, 129, 1_000] {
        let letter = char::from_u32(0x100 + end as u32).unwrap();
        let text = chain(&[(letter, end)]);
        bench.step(step(u128::from(end), &text, 0, 1));
        for more in [0, 1, 62, 63, 64, 200] {
            let prompt = chain(&[(letter, end), ('z', more)]);
            assert_eq!(bench.locate(None, &prompt).known(), Blocks(end), "{end} blocks and {more} more");
        }
        let before = chain(&[(letter, end - 1)]);
        assert_eq!(bench.locate(None, &before).known(), Blocks((end - 1) / 64 * 64));
    }
}

#[test]
fn a_step_is_its_named_sessions_or_the_one_that_its_chain_goes_on_from_or_a_fresh_one() {
    let mut bench = Bench::new();
    let one = chain(&[('a', 200)]);
    bench.step(step(1, &one, 0, 1));
    let (old, fresh) = (session(1), session(9));
    let head = Point::on(&one, Blocks(200)).unwrap();
    let whose = |prompt: &[(char, u64)], named| bench.locate(named, &chain(prompt)).whose(named, fresh);
    let goes_on = [('a', 200), ('b', 30)];
    let continues = Whose { session: old, parent: None, head: Some((head, Blocks(200))), rewrites: None };
    assert_eq!([whose(&goes_on, Some(old)), whose(&goes_on, None)], [continues; 2]);
    let leaves = [('a', 150), ('b', 30)];
    let left = Some((head, Blocks(128)));
    let rewritten = Whose { session: old, parent: None, head: left, rewrites: Some(head.id) };
    assert_eq!(whose(&leaves, Some(old)), rewritten);
    assert_eq!(whose(&leaves, None), Whose { session: fresh, parent: Some(old), head: left, rewrites: None });
    let unknown = Whose { session: fresh, parent: None, head: None, rewrites: None };
    assert_eq!(whose(&[('z', 10)], None), unknown);
    assert_eq!(whose(&leaves, Some(session(7))), Whose { session: session(7), ..unknown });
}

#[test]
fn who_owns_a_shared_prefix_holds_it_for_a_session_that_is_not_theirs() {
    let sealed = |standing, replicas: &[u64]| {
        let at = Point { blocks: Blocks(4), id: PrefixId(4) };
        let replicas = replicas.iter().copied().map(owner).collect();
        Sealed { artifact: ArtifactId(1), at, standing, epoch: Epoch::default(), replicas, group: None }
    };
    let shared = sealed(Standing::Owned(owner(1)), &[2]);
    assert_eq!(shared.holders(None), [owner(1), owner(2)]);
    assert_eq!(shared.holders(Some(owner(1))), [owner(2)]);
    assert_eq!(shared.holders(Some(owner(2))), [owner(1)]);
    assert_eq!(sealed(Standing::Copied(owner(2)), &[2, 3]).holders(None), [owner(2), owner(3)]);
    assert_eq!(sealed(Standing::Unowned, &[]).holders(Some(owner(1))), []);
}
