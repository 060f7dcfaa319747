use super::*;
use crate::kv_event::KvCacheSpecKind;
use crate::tests::{chain, chain_from, removed, root, rules, stored};
use vocabulary::{BlockHash, Tier};

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// Returns the changes of a store or a removal.
fn changes(act: impl FnOnce(&mut Vec<ResidencyChange>)) -> Vec<ResidencyChange> {
    let mut out = Vec::new();
    act(&mut out);
    out
}

fn held(blocks: &[BlockHash]) -> Vec<ResidencyChange> {
    blocks.iter().map(|hash| ResidencyChange::Added(*hash, Tier::Hbm)).collect()
}

fn gone(blocks: &[BlockHash]) -> Vec<ResidencyChange> {
    // Last one first.
    blocks.iter().rev().map(|hash| ResidencyChange::Removed(*hash, Tier::Hbm)).collect()
}

#[test]
fn blocks_are_placed_on_the_prompts_hash_chain() {
    let mut source = SourceBlocks::new(rules(4));
    let prompt = chain(4, &tokens(0..12));
    assert_eq!(changes(|out| source.store(&stored(&[70, 71], None, &tokens(0..8)), out)), held(&prompt[..2]));
    assert_eq!(changes(|out| source.store(&stored(&[72], Some(71), &tokens(8..12)), out)), held(&prompt[2..]));
}

#[test]
fn engine_block_maps_to_several_chain_blocks() {
    let mut source = SourceBlocks::new(rules(2));
    let prompt = chain(2, &tokens(0..8));
    let event = stored(&[70, 71], None, &tokens(0..8));
    assert_eq!(changes(|out| source.store(&event, out)), held(&prompt));
    assert_eq!(changes(|out| source.remove(&removed(&[71]), out)), gone(&prompt[2..]));
}

#[test]
fn indivisible_block_sizes_are_refused() {
    let mut source = SourceBlocks::new(rules(3));
    assert_eq!(changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out)), []);
    let nothing = BlockStored { block_size: 0, ..stored(&[70], None, &[]) };
    assert_eq!(changes(|out| source.store(&nothing, out)), []);
    assert_eq!(source.counts().indivisible, 2);
}

#[test]
fn two_stores_need_two_removals() {
    let mut source = SourceBlocks::new(rules(4));
    let (event, blocks) = (stored(&[70], None, &tokens(0..4)), chain(4, &tokens(0..4)));
    assert_eq!(changes(|out| source.store(&event, out)), held(&blocks));
    assert_eq!(changes(|out| source.store(&event, out)), []);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), []);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    assert_eq!(changes(|out| source.remove(&removed(&[70, 99]), out)), []);
    assert_eq!((source.counts().unknown_removals, source.len()), (2, 0));
}

#[test]
fn both_removal_semantics_are_supported() {
    let event = stored(&[70], None, &tokens(0..4));
    let blocks = chain(4, &tokens(0..4));
    let mut source = SourceBlocks::new(BlockMappingRules { removal: RemovalSemantics::LastCopy, ..rules(4) });
    let mut out = Vec::new();
    source.store(&event, &mut out);
    source.store(&event, &mut out);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    let mut source = SourceBlocks::new(rules(4));
    for _ in 0..3 {
        source.store(&event, &mut out);
    }
    let left = |count| BlockRemoved { remaining: vec![count], ..removed(&[70]) };
    assert_eq!(changes(|out| source.remove(&left(2), out)), []);
    assert_eq!(changes(|out| source.remove(&left(0), out)), gone(&blocks));
}

#[test]
fn tiers_and_cache_groups_are_counted_separately() {
    let mut source = SourceBlocks::new(rules(4));
    let blocks = chain(4, &tokens(0..4));
    let event = stored(&[70], None, &tokens(0..4));
    let mut out = Vec::new();
    source.store(&event, &mut out);
    // The host tier does not repeat the tokens; the block was already placed when it was stored in device memory.
    let host = BlockStored { tier: Tier::Host, tokens: Vec::new(), ..event.clone() };
    assert_eq!(changes(|out| source.store(&host, out)), [ResidencyChange::Added(blocks[0], Tier::Host)]);
    let window = BlockStored { group: 1, kind: KvCacheSpecKind::Window, ..event };
    assert_eq!(changes(|out| source.store(&window, out)), [], "a window is no prefix");
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    assert_eq!(source.len(), 1, "the host tier has it still");
}

#[test]
fn salts_and_adapters_start_other_chains() {
    let text = |text: &str| ExtraKey::Text(text.into());
    let prompt = tokens(0..8);
    let plain = stored(&[70, 71], None, &prompt);
    let salted = BlockStored { extra: vec![vec![text("s")], vec![]], ..plain.clone() };
    let sglang = BlockStored { salt: Some("s".into()), ..plain.clone() };
    let adapted = BlockStored {
        adapter: Some("lora".into()),
        extra: vec![vec![text("lora"), text("s")], vec![text("lora")]],
        ..plain.clone()
    };
    let place = |event: &BlockStored| changes(|out| SourceBlocks::new(rules(4)).store(event, out));
    let under = |keys| held(&chain_from(root(keys), 4, &prompt));
    assert_eq!(place(&plain), under(RequestNamespace::default()));
    assert_eq!(place(&salted), under(RequestNamespace { salt: Some("s"), ..RequestNamespace::default() }));
    assert_eq!(place(&sglang), place(&salted));
    assert_eq!(place(&adapted), under(RequestNamespace { salt: Some("s"), adapter: Some("lora"), content: None }));
}

#[test]
fn block_with_unpredictable_keys_is_never_matched_as_text() {
    let prompt = tokens(0..12);
    let image = BlockStored {
        extra: vec![vec![], vec![ExtraKey::Raw(vec![1, 2].into())], vec![]],
        ..stored(&[70, 71, 72], None, &prompt)
    };
    let placed = changes(|out| SourceBlocks::new(rules(4)).store(&image, out));
    let text = held(&chain(4, &prompt));
    assert_eq!(placed[0], text[0]);
    assert!(placed[1] != text[1] && placed[2] != text[2], "from the image on it is another chain");
    let many =
        BlockStored { extra: vec![vec![ExtraKey::Text("a".into()), ExtraKey::Text("b".into())]], ..image.clone() };
    let other = BlockStored { extra: vec![vec![ExtraKey::Text("ab".into()), ExtraKey::Text("".into())]], ..image };
    let first = |event: &BlockStored| changes(|out| SourceBlocks::new(rules(4)).store(event, out))[0];
    assert_ne!(first(&many), first(&other), "lists of keys that read alike are different");
}

#[test]
fn orphans_wait_for_their_parents() {
    let mut source = SourceBlocks::new(rules(4));
    let prompt = chain(4, &tokens(0..16));
    assert_eq!(changes(|out| source.store(&stored(&[73], Some(72), &tokens(12..16)), out)), []);
    assert_eq!(changes(|out| source.store(&stored(&[71, 72], Some(70), &tokens(4..12)), out)), []);
    assert_eq!((source.orphans(), source.counts().orphans), (3, 3));
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    assert_eq!((placed, source.orphans()), (held(&prompt), 0));
}

#[test]
fn orphan_without_tokens_is_placed_once_tokens_and_parent_are_known() {
    let mut source = SourceBlocks::new(rules(4));
    let untold = BlockStored { tier: Tier::Host, ..stored(&[71], Some(70), &[]) };
    assert_eq!(changes(|out| source.store(&untold, out)), []);
    assert_eq!(changes(|out| source.store(&stored(&[71], Some(70), &tokens(4..8)), out)), []);
    let prompt = chain(4, &tokens(0..8));
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    let expected = [(prompt[0], Tier::Hbm), (prompt[1], Tier::Hbm), (prompt[1], Tier::Host)];
    assert_eq!(placed, expected.map(|(hash, tier)| ResidencyChange::Added(hash, tier)));
    assert_eq!((source.orphans(), source.counts().orphans), (0, 1));
}

#[test]
fn orphan_can_be_removed_and_keeps_its_count() {
    let mut source = SourceBlocks::new(rules(4));
    let (child, other) = (stored(&[71], Some(70), &tokens(4..8)), stored(&[72], Some(70), &tokens(8..12)));
    let mut out = Vec::new();
    source.store(&child, &mut out);
    source.store(&child, &mut out);
    source.store(&other, &mut out);
    source.remove(&removed(&[71, 72]), &mut out);
    assert_eq!((source.orphans(), source.counts().unknown_removals), (1, 0));
    source.store(&stored(&[70], None, &tokens(0..4)), &mut out);
    let prompt = chain(4, &tokens(0..8));
    assert_eq!(out, held(&prompt));
    assert_eq!(changes(|out| source.remove(&removed(&[71]), out)), gone(&prompt[1..]));
}

#[test]
fn block_without_tokens_waits_for_them() {
    let mut source = SourceBlocks::new(rules(4));
    let host = BlockStored { tier: Tier::Host, ..stored(&[70], None, &[]) };
    assert_eq!(changes(|out| source.store(&host, out)), []);
    let block = chain(4, &tokens(0..4))[0];
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    assert_eq!(placed, [ResidencyChange::Added(block, Tier::Hbm), ResidencyChange::Added(block, Tier::Host)]);
}

#[test]
fn limits_are_enforced_and_counted() {
    let mut source = SourceBlocks::new(BlockMappingRules { max_blocks: 1, max_orphans: 1, ..rules(4) });
    let mut out = Vec::new();
    source.store(&stored(&[70, 71], None, &tokens(0..8)), &mut out);
    source.store(&stored(&[80], Some(79), &tokens(0..4)), &mut out);
    source.store(&stored(&[90], Some(89), &tokens(0..4)), &mut out);
    assert_eq!((source.len(), source.orphans(), source.counts().over_limit), (1, 1, 2));
}

#[test]
fn an_orphan_leaves_its_siblings_waiting_for_their_parent() {
    let mut source = SourceBlocks::new(rules(4));
    let mut out = Vec::new();
    for (hash, first) in [(71, 4), (72, 8), (73, 12), (74, 16)] {
        source.store(&stored(&[hash], Some(70), &tokens(first..first + 4)), &mut out);
    }
    source.remove(&removed(&[72, 71]), &mut out);
    assert_eq!((out.len(), source.orphans()), (0, 2));
    source.store(&stored(&[70], None, &tokens(0..4)), &mut out);
    assert_eq!((source.len(), source.orphans(), source.orphans.memory()), (3, 0, 0));
}

/// An event that stores one block of all these tokens.
fn one_block(hash: &[u64], parent: Option<u64>, tokens: &[u32]) -> BlockStored {
    BlockStored { block_size: tokens.len() as u32, ..stored(hash, parent, tokens) }
}

#[test]
fn orphans_take_no_more_memory_than_they_may_however_long_their_blocks_are() {
    let mut source = SourceBlocks::new(BlockMappingRules { max_orphan_memory: 1_000, ..rules(4) });
    let mut out = Vec::new();
    for parent in [79, 89, 99] {
        source.store(&one_block(&[parent + 1], Some(parent), &tokens(0..400)), &mut out);
    }
    assert_eq!((source.orphans(), source.counts().over_limit), (1, 2));
    source.remove(&removed(&[80]), &mut out);
    source.store(&one_block(&[90], Some(89), &tokens(0..400)), &mut out);
    assert_eq!((source.orphans(), source.counts().over_limit), (1, 2), "there is room again");
}

#[test]
fn wide_engine_blocks_take_no_more_room_than_blocks_may() {
    let mut source = SourceBlocks::new(BlockMappingRules { max_blocks: 100, ..rules(4) });
    let mut out = Vec::new();
    source.store(&one_block(&[70], None, &tokens(0..800)), &mut out);
    assert_eq!((source.len(), source.counts().over_limit, out.len()), (0, 1, 0));
    source.store(&one_block(&[71], None, &tokens(0..160)), &mut out);
    assert_eq!((source.len(), out.len()), (1, 40));
    source.store(&one_block(&[72], None, &tokens(4..164)), &mut out);
    source.store(&one_block(&[73], None, &tokens(8..168)), &mut out);
    assert_eq!((source.len(), source.counts().over_limit), (2, 2), "40 hashes in each of two rows");
    source.store(&one_block(&[74], None, &tokens(0..65_540)), &mut out);
    assert_eq!((source.len(), source.counts().indivisible), (2, 1));
}

#[test]
fn ranks_of_a_worker_share_what_it_may_hold() {
    let of = |ranks| {
        let rules = rules(16).among_ranks(ranks);
        (rules.max_blocks, rules.max_orphan_memory)
    };
    assert_eq!(of(0), of(1));
    assert_eq!(of(1), (4 << 20, 16 << 20));
    assert_eq!(of(8), of(1), "a node of eight has all that one has, each");
    assert_eq!(of(1024), (32 << 10, 128 << 10));
}

#[test]
fn clear_reports_removed_blocks() {
    let mut source = SourceBlocks::new(rules(4));
    let mut out = Vec::new();
    source.store(&stored(&[70, 71], None, &tokens(0..8)), &mut out);
    source.store(&stored(&[80], Some(79), &tokens(0..4)), &mut out);
    let mut cleared: Vec<ResidencyChange> = source.clear().collect();
    cleared.sort_by_key(|change| format!("{change:?}"));
    let mut expected = gone(&chain(4, &tokens(0..8)));
    expected.sort_by_key(|change| format!("{change:?}"));
    assert_eq!((cleared, source.len(), source.orphans()), (expected, 0, 0));
}

#[test]
fn closure_reports_whether_any_block_lacks_its_parent() {
    let mut source = SourceBlocks::new(rules(2));
    let mut out = Vec::new();
    source.store(&stored(&[70, 71, 72], None, &tokens(0..12)), &mut out);
    source.remove(&removed(&[72, 71]), &mut out);
    assert_eq!(
        (source.closure_state(), source.take_worst_closure()),
        (PrefixClosure::Whole, PrefixClosure::Whole),
        "leaves went first"
    );
    source.store(&stored(&[71, 72], Some(70), &tokens(4..12)), &mut out);
    source.remove(&removed(&[71, 72]), &mut out);
    assert_eq!(
        (source.closure_state(), source.take_worst_closure()),
        (PrefixClosure::Whole, PrefixClosure::Holed),
        "for a moment 72 had no parent"
    );
    source.store(&stored(&[71], Some(70), &tokens(4..8)), &mut out);
    source.remove(&removed(&[70]), &mut out);
    assert_eq!(source.closure_state(), PrefixClosure::Holed);
    assert_eq!(source.clear().count(), 2);
    assert_eq!(source.closure_state(), PrefixClosure::Whole);
}
