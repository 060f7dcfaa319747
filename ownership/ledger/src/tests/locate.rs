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
