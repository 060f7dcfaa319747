use super::*;
use crate::kv_event::KvCacheSpecKind;
use crate::tests::root;
use vocabulary::RequestNamespace;

const HBM: EngineCopyLocation = EngineCopyLocation { tier: Tier::Hbm, group: 0, kind: KvCacheSpecKind::Full };

/// A block tree, and the changes it reported.
struct BlockTreeFixture {
    blocks: BlockTree,
    changes: Vec<ResidencyChange>,
}

impl BlockTreeFixture {
    fn empty() -> Self {
        Self { blocks: BlockTree::default(), changes: Vec::new() }
    }

    /// Adds a block in device memory that ends at `end`.
    fn hold(&mut self, name: u64, before: Option<u64>, end: u128) {
        let before = before.and_then(|before| self.blocks.find(EngineHash(before)));
        let placing = NewBlock { engine_hash: EngineHash(name), parent: before, end: PrefixId(end), inner_hashes: &[] };
        let at = self.blocks.insert(placing);
        self.blocks.add_copy(at, HBM, &mut self.changes);
    }

    fn drop(&mut self, name: u64) {
        let known = self.blocks.change_copies(EngineHash(name), (Tier::Hbm, 0), |count| count - 1, &mut self.changes);
        assert_eq!(known, Some(true));
    }

    /// A chain of this many blocks, whose names and ends are their numbers.
    fn chain(blocks: u64) -> Self {
        let mut kept = Self::empty();
        (1..=blocks).for_each(|n| kept.hold(n, n.checked_sub(1).filter(|n| *n > 0), u128::from(n)));
        kept
    }
}

#[test]
fn hole_opens_and_closes_from_either_side() {
    let mut tree = BlockTreeFixture::chain(3);
    assert_eq!(
        (tree.blocks.closure_state(), tree.blocks.take_worst_closure()),
        (PrefixClosure::Whole, PrefixClosure::Whole)
    );
    tree.drop(2);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Holed, "3 hangs in the air");
    tree.hold(2, Some(1), 2);
    let shapes = [tree.blocks.closure_state(), tree.blocks.take_worst_closure(), tree.blocks.take_worst_closure()];
    assert_eq!(shapes, [PrefixClosure::Whole, PrefixClosure::Holed, PrefixClosure::Whole]);
    tree.drop(2);
    tree.drop(3);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Whole);
    tree.drop(1);
    assert!(tree.blocks.is_fully_cleared());
}

#[test]
fn stump_is_matched_by_chain_position_instead_of_engine_hash() {
    let mut tree = BlockTreeFixture::chain(3);
    tree.drop(2);
    tree.hold(20, Some(1), 2);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Whole, "another name, the same place");
    tree.drop(20);
    tree.hold(2, Some(1), 99);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Holed, "the same name, another place");
    [2, 3, 1].into_iter().for_each(|name| tree.drop(name));
    assert!(tree.blocks.is_fully_cleared());
}

#[test]
fn stumps_never_outnumber_blocks() {
    let mut tree = BlockTreeFixture::chain(500);
    for name in 1..500 {
        tree.drop(name);
        assert!(tree.blocks.stumps.len() <= 1);
    }
    assert_eq!((tree.blocks.len(), tree.blocks.closure_state()), (1, PrefixClosure::Holed));
    tree.drop(500);
    assert!(tree.blocks.is_fully_cleared());
}

#[test]
fn siblings_are_counted_and_slots_reused() {
    let mut tree = BlockTreeFixture::chain(1);
    (2..1000).for_each(|name| tree.hold(name, Some(1), u128::from(name)));
    tree.drop(1);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Holed);
    let places = tree.blocks.nodes.len();
    (2..500).for_each(|name| tree.drop(name));
    (2..500).for_each(|name| tree.hold(name, None, u128::from(name)));
    assert_eq!(tree.blocks.nodes.len(), places);
    (2..1000).for_each(|name| tree.drop(name));
    assert!(tree.blocks.is_fully_cleared());
}

#[test]
fn compaction_keeps_remaining_blocks_and_their_links() {
    let mut tree = BlockTreeFixture::chain(10_000);
    // Many children on a block that stays, and a stump in the middle.
    (0..400).for_each(|n| tree.hold(20_000 + n, Some(50), u128::from(20_000 + n)));
    (100..=10_000).rev().for_each(|name| tree.drop(name));
    tree.drop(30);
    (0..300).for_each(|n| tree.drop(20_000 + n));
    let BlockTree { nodes, free, engine_hashes: names, .. } = &tree.blocks;
    assert_eq!(names.len(), 98 + 100);
    assert!(nodes.capacity() < 2000 && free.capacity() < 2000, "{} {}", nodes.capacity(), free.capacity());
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Holed);
    tree.hold(30, Some(29), 30);
    assert_eq!(tree.blocks.closure_state(), PrefixClosure::Whole, "31 hangs on 30 again");
    assert!((1..100).all(|name| tree.blocks.find(EngineHash(name)).map(|at| tree.blocks.end_prefix(at))
        == Some(PrefixId(u128::from(name)))));
    let befores: Vec<_> = tree.blocks.placed().map(|(name, placed)| (name.0, placed.parent)).collect();
    let before = |name: u64| if name < 20_000 { name - 1 } else { 50 };
    assert!(befores.iter().all(|(name, end)| *end == Some(before(*name)).filter(|end| *end > 0).map(BlockHash)));
    tree.changes.clear();
    let rest: Vec<u64> = befores.iter().map(|(name, _)| *name).collect();
    rest.iter().for_each(|name| tree.drop(*name));
    assert_eq!((tree.changes.len(), rest.len()), (199, 199));
    assert!(tree.blocks.is_fully_cleared());
}

#[test]
fn adoption_accepts_any_order_and_refuses_cycles() {
    let mut placed: Vec<(EngineHash, PlacedBlock)> = BlockTreeFixture::chain(6).blocks.placed().collect();
    placed.reverse();
    let (mut blocks, mut ends, mut out) = (BlockTree::default(), BlocksByEnd::default(), Vec::new());
    for (name, block) in placed {
        assert!(blocks.adopt(name, block, &mut ends, &mut out));
    }
    assert_eq!((blocks.len(), blocks.closure_state(), out.len()), (6, PrefixClosure::Whole, 6));
    let end = root(RequestNamespace::default());
    let own =
        || PlacedBlock { parent: Some(end.block_hash()), end, inner_hashes: vec![], copies: BlockCopies::default() };
    assert!(!blocks.adopt(EngineHash(9), own(), &mut ends, &mut out));
    let again = PlacedBlock { parent: None, ..own() };
    assert!(!blocks.adopt(EngineHash(3), again, &mut ends, &mut out), "the name is taken");
}

#[test]
fn block_node_takes_24_bytes() {
    assert_eq!(size_of::<BlockNode>(), 24);
}
