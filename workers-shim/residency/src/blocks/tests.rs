use super::*;
use crate::event::SpecKind;
use crate::tests::root;
use vocabulary::RootKeys;

const HBM: Place = Place { tier: Tier::Hbm, group: 0, kind: SpecKind::Full };

/// Some blocks, and what they changed.
struct Kept {
    blocks: Blocks,
    out: Vec<Change>,
}

impl Kept {
    fn nothing() -> Self {
        Self { blocks: Blocks::default(), out: Vec::new() }
    }

    /// A block in device memory that ends at `end`.
    fn hold(&mut self, name: u64, before: Option<u64>, end: u128) {
        let before = before.and_then(|before| self.blocks.find(EngineHash(before)));
        let placing = Placing { name: EngineHash(name), before, end: PrefixId(end), inner: &[] };
        let at = self.blocks.place(placing);
        self.blocks.add(at, HBM, &mut self.out);
    }

    fn drop(&mut self, name: u64) {
        let known = self.blocks.change(EngineHash(name), (Tier::Hbm, 0), |count| count - 1, &mut self.out);
        assert_eq!(known, Some(true));
    }

    /// A chain of as many blocks, named and ending like their number.
    fn chain(blocks: u64) -> Self {
        let mut kept = Self::nothing();
        (1..=blocks).for_each(|n| kept.hold(n, n.checked_sub(1).filter(|n| *n > 0), u128::from(n)));
        kept
    }
}

#[test]
fn a_hole_opens_and_closes_from_either_side() {
    let mut kept = Kept::chain(3);
    assert_eq!((kept.blocks.shape(), kept.blocks.worst_shape()), (Shape::Whole, Shape::Whole));
    kept.drop(2);
    assert_eq!(kept.blocks.shape(), Shape::Holed, "3 hangs in the air");
    kept.hold(2, Some(1), 2);
    let shapes = [kept.blocks.shape(), kept.blocks.worst_shape(), kept.blocks.worst_shape()];
    assert_eq!(shapes, [Shape::Whole, Shape::Holed, Shape::Whole]);
    kept.drop(2);
    kept.drop(3);
    assert_eq!(kept.blocks.shape(), Shape::Whole);
    kept.drop(1);
    assert!(kept.blocks.forgot_all());
}

#[test]
fn a_stump_is_found_by_its_place_in_the_chain_and_not_by_its_name() {
    let mut kept = Kept::chain(3);
    kept.drop(2);
    kept.hold(20, Some(1), 2);
    assert_eq!(kept.blocks.shape(), Shape::Whole, "another name, the same place");
    kept.drop(20);
    kept.hold(2, Some(1), 99);
    assert_eq!(kept.blocks.shape(), Shape::Holed, "the same name, another place");
    [2, 3, 1].into_iter().for_each(|name| kept.drop(name));
    assert!(kept.blocks.forgot_all());
}

#[test]
fn there_are_never_more_stumps_than_blocks() {
    let mut kept = Kept::chain(500);
    for name in 1..500 {
        kept.drop(name);
        assert!(kept.blocks.stumps.len() <= 1);
    }
    assert_eq!((kept.blocks.len(), kept.blocks.shape()), (1, Shape::Holed));
    kept.drop(500);
    assert!(kept.blocks.forgot_all());
}

#[test]
fn siblings_are_counted_and_places_taken_again() {
    let mut kept = Kept::chain(1);
    (2..1000).for_each(|name| kept.hold(name, Some(1), u128::from(name)));
    kept.drop(1);
    assert_eq!(kept.blocks.shape(), Shape::Holed);
    let places = kept.blocks.nodes.len();
    (2..500).for_each(|name| kept.drop(name));
    (2..500).for_each(|name| kept.hold(name, None, u128::from(name)));
    assert_eq!(kept.blocks.nodes.len(), places);
    (2..1000).for_each(|name| kept.drop(name));
    assert!(kept.blocks.forgot_all());
}

#[test]
fn what_is_left_of_many_lies_together_and_goes_on_as_before() {
    let mut kept = Kept::chain(10_000);
    // A branch of many children on a block that stays, and a stump in the middle.
    (0..400).for_each(|n| kept.hold(20_000 + n, Some(50), u128::from(20_000 + n)));
    (100..=10_000).rev().for_each(|name| kept.drop(name));
    kept.drop(30);
    (0..300).for_each(|n| kept.drop(20_000 + n));
    let Blocks { nodes, free, names, .. } = &kept.blocks;
    assert_eq!(names.len(), 98 + 100);
    assert!(nodes.capacity() < 2000 && free.capacity() < 2000, "{} {}", nodes.capacity(), free.capacity());
    assert_eq!(kept.blocks.shape(), Shape::Holed);
    kept.hold(30, Some(29), 30);
    assert_eq!(kept.blocks.shape(), Shape::Whole, "31 hangs on 30 again");
    assert!((1..100).all(
        |name| kept.blocks.find(EngineHash(name)).map(|at| kept.blocks.end(at)) == Some(PrefixId(u128::from(name)))
    ));
    let befores: Vec<_> = kept.blocks.placed().map(|(name, placed)| (name.0, placed.before)).collect();
    let before = |name: u64| if name < 20_000 { name - 1 } else { 50 };
    assert!(befores.iter().all(|(name, end)| *end == Some(before(*name)).filter(|end| *end > 0).map(BlockHash)));
    kept.out.clear();
    let rest: Vec<u64> = befores.iter().map(|(name, _)| *name).collect();
    rest.iter().for_each(|name| kept.drop(*name));
    assert_eq!((kept.out.len(), rest.len()), (199, 199));
    assert!(kept.blocks.forgot_all());
}

#[test]
fn blocks_are_taken_over_in_any_order_and_none_that_hangs_on_itself() {
    let mut placed: Vec<(EngineHash, Placed)> = Kept::chain(6).blocks.placed().collect();
    placed.reverse();
    let (mut blocks, mut ends, mut out) = (Blocks::default(), Ends::default(), Vec::new());
    for (name, block) in placed {
        assert!(blocks.adopt(name, block, &mut ends, &mut out));
    }
    assert_eq!((blocks.len(), blocks.shape(), out.len()), (6, Shape::Whole, 6));
    let end = root(RootKeys::default());
    let own = || Placed { before: Some(end.block_hash()), end, inner: vec![], copies: Copies::default() };
    assert!(!blocks.adopt(EngineHash(9), own(), &mut ends, &mut out));
    let again = Placed { before: None, ..own() };
    assert!(!blocks.adopt(EngineHash(3), again, &mut ends, &mut out), "the name is taken");
}

#[test]
fn a_block_costs_24_bytes() {
    assert_eq!(size_of::<Node>(), 24);
}
