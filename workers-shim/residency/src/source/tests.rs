use super::*;
use crate::event::SpecKind;
use crate::tests::{chain, chain_from, removed, root, rules, stored};
use vocabulary::{BlockHash, Tier};

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

/// What a store, or a removal, changes.
fn changes(act: impl FnOnce(&mut Vec<Change>)) -> Vec<Change> {
    let mut out = Vec::new();
    act(&mut out);
    out
}

fn held(blocks: &[BlockHash]) -> Vec<Change> {
    blocks.iter().map(|hash| Change::Held(*hash, Tier::Hbm)).collect()
}

fn gone(blocks: &[BlockHash]) -> Vec<Change> {
    // Last one first.
    blocks.iter().rev().map(|hash| Change::Gone(*hash, Tier::Hbm)).collect()
}

#[test]
fn blocks_lie_where_the_prompts_chain_says() {
    let mut source = Source::new(rules(4));
    let prompt = chain(4, &tokens(0..12));
    assert_eq!(changes(|out| source.store(&stored(&[70, 71], None, &tokens(0..8)), out)), held(&prompt[..2]));
    assert_eq!(changes(|out| source.store(&stored(&[72], Some(71), &tokens(8..12)), out)), held(&prompt[2..]));
}

#[test]
fn an_engine_block_is_several_chain_blocks() {
    let mut source = Source::new(rules(2));
    let prompt = chain(2, &tokens(0..8));
    let event = stored(&[70, 71], None, &tokens(0..8));
    assert_eq!(changes(|out| source.store(&event, out)), held(&prompt));
    assert_eq!(changes(|out| source.remove(&removed(&[71]), out)), gone(&prompt[2..]));
}

#[test]
fn chain_blocks_that_do_not_divide_the_engines_are_refused() {
    let mut source = Source::new(rules(3));
    assert_eq!(changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out)), []);
    let nothing = Stored { block_size: 0, ..stored(&[70], None, &[]) };
    assert_eq!(changes(|out| source.store(&nothing, out)), []);
    assert_eq!(source.counts().indivisible, 2);
}

#[test]
fn two_stores_take_two_removals() {
    let mut source = Source::new(rules(4));
    let (event, blocks) = (stored(&[70], None, &tokens(0..4)), chain(4, &tokens(0..4)));
    assert_eq!(changes(|out| source.store(&event, out)), held(&blocks));
    assert_eq!(changes(|out| source.store(&event, out)), []);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), []);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    assert_eq!(changes(|out| source.remove(&removed(&[70, 99]), out)), []);
    assert_eq!((source.counts().unknown_removals, source.len()), (2, 0));
}

#[test]
fn engines_that_remove_by_block_or_that_count_are_believed() {
    let event = stored(&[70], None, &tokens(0..4));
    let blocks = chain(4, &tokens(0..4));
    let mut source = Source::new(SourceRules { removal: Removal::LastCopy, ..rules(4) });
    let mut out = Vec::new();
    source.store(&event, &mut out);
    source.store(&event, &mut out);
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    let mut source = Source::new(rules(4));
    for _ in 0..3 {
        source.store(&event, &mut out);
    }
    let left = |count| Removed { remaining: vec![count], ..removed(&[70]) };
    assert_eq!(changes(|out| source.remove(&left(2), out)), []);
    assert_eq!(changes(|out| source.remove(&left(0), out)), gone(&blocks));
}

#[test]
fn tiers_and_groups_are_counted_apart() {
    let mut source = Source::new(rules(4));
    let blocks = chain(4, &tokens(0..4));
    let event = stored(&[70], None, &tokens(0..4));
    let mut out = Vec::new();
    source.store(&event, &mut out);
    // The host tier does not repeat the tokens; the place is known from the device's store.
    let host = Stored { tier: Tier::Host, tokens: Vec::new(), ..event.clone() };
    assert_eq!(changes(|out| source.store(&host, out)), [Change::Held(blocks[0], Tier::Host)]);
    let window = Stored { group: 1, kind: SpecKind::Window, ..event };
    assert_eq!(changes(|out| source.store(&window, out)), [], "a window is no prefix");
    assert_eq!(changes(|out| source.remove(&removed(&[70]), out)), gone(&blocks));
    assert_eq!(source.len(), 1, "the host tier has it still");
}

#[test]
fn salts_and_adapters_are_other_chains() {
    let text = |text: &str| ExtraKey::Text(text.into());
    let prompt = tokens(0..8);
    let plain = stored(&[70, 71], None, &prompt);
    let salted = Stored { extra: vec![vec![text("s")], vec![]], ..plain.clone() };
    let sglang = Stored { salt: Some("s".into()), ..plain.clone() };
    let adapted = Stored {
        adapter: Some("lora".into()),
        extra: vec![vec![text("lora"), text("s")], vec![text("lora")]],
        ..plain.clone()
    };
    let place = |event: &Stored| changes(|out| Source::new(rules(4)).store(event, out));
    let under = |keys| held(&chain_from(root(keys), 4, &prompt));
    assert_eq!(place(&plain), under(RootKeys::default()));
    assert_eq!(place(&salted), under(RootKeys { salt: Some("s"), ..RootKeys::default() }));
    assert_eq!(place(&sglang), place(&salted));
    assert_eq!(place(&adapted), under(RootKeys { salt: Some("s"), adapter: Some("lora"), content: None }));
}

#[test]
fn a_block_with_unforeseeable_keys_is_never_taken_for_text() {
    let prompt = tokens(0..12);
    let image = Stored {
        extra: vec![vec![], vec![ExtraKey::Raw(vec![1, 2].into())], vec![]],
        ..stored(&[70, 71, 72], None, &prompt)
    };
    let placed = changes(|out| Source::new(rules(4)).store(&image, out));
    let text = held(&chain(4, &prompt));
    assert_eq!(placed[0], text[0]);
    assert!(placed[1] != text[1] && placed[2] != text[2], "from the image on it is another chain");
    let many = Stored { extra: vec![vec![ExtraKey::Text("a".into()), ExtraKey::Text("b".into())]], ..image.clone() };
    let other = Stored { extra: vec![vec![ExtraKey::Text("ab".into()), ExtraKey::Text("".into())]], ..image };
    let first = |event: &Stored| changes(|out| Source::new(rules(4)).store(event, out))[0];
    assert_ne!(first(&many), first(&other), "lists of keys that read alike are different");
}

#[test]
fn children_wait_for_their_parents() {
    let mut source = Source::new(rules(4));
    let prompt = chain(4, &tokens(0..16));
    assert_eq!(changes(|out| source.store(&stored(&[73], Some(72), &tokens(12..16)), out)), []);
    assert_eq!(changes(|out| source.store(&stored(&[71, 72], Some(70), &tokens(4..12)), out)), []);
    assert_eq!((source.orphans(), source.counts().orphans), (3, 3));
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    assert_eq!((placed, source.orphans()), (held(&prompt), 0));
}

#[test]
fn a_block_that_was_first_told_without_tokens_is_placed_once_tokens_and_parent_are_known() {
    let mut source = Source::new(rules(4));
    let untold = Stored { tier: Tier::Host, ..stored(&[71], Some(70), &[]) };
    assert_eq!(changes(|out| source.store(&untold, out)), []);
    assert_eq!(changes(|out| source.store(&stored(&[71], Some(70), &tokens(4..8)), out)), []);
    let prompt = chain(4, &tokens(0..8));
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    let expected = [(prompt[0], Tier::Hbm), (prompt[1], Tier::Hbm), (prompt[1], Tier::Host)];
    assert_eq!(placed, expected.map(|(hash, tier)| Change::Held(hash, tier)));
    assert_eq!((source.orphans(), source.counts().orphans), (0, 1));
}

#[test]
fn a_waiting_child_can_be_removed_and_keeps_its_count() {
    let mut source = Source::new(rules(4));
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
fn a_block_without_tokens_waits_for_them() {
    let mut source = Source::new(rules(4));
    let host = Stored { tier: Tier::Host, ..stored(&[70], None, &[]) };
    assert_eq!(changes(|out| source.store(&host, out)), []);
    let block = chain(4, &tokens(0..4))[0];
    let placed = changes(|out| source.store(&stored(&[70], None, &tokens(0..4)), out));
    assert_eq!(placed, [Change::Held(block, Tier::Hbm), Change::Held(block, Tier::Host)]);
}

#[test]
fn bounds_are_kept_and_counted() {
    let mut source = Source::new(SourceRules { most_blocks: 1, most_orphans: 1, ..rules(4) });
    let mut out = Vec::new();
    source.store(&stored(&[70, 71], None, &tokens(0..8)), &mut out);
    source.store(&stored(&[80], Some(79), &tokens(0..4)), &mut out);
    source.store(&stored(&[90], Some(89), &tokens(0..4)), &mut out);
    assert_eq!((source.len(), source.orphans(), source.counts().over_limit), (1, 1, 2));
}

#[test]
fn clearing_says_what_is_gone() {
    let mut source = Source::new(rules(4));
    let mut out = Vec::new();
    source.store(&stored(&[70, 71], None, &tokens(0..8)), &mut out);
    source.store(&stored(&[80], Some(79), &tokens(0..4)), &mut out);
    let mut cleared: Vec<Change> = source.clear().collect();
    cleared.sort_by_key(|change| format!("{change:?}"));
    let mut expected = gone(&chain(4, &tokens(0..8)));
    expected.sort_by_key(|change| format!("{change:?}"));
    assert_eq!((cleared, source.len(), source.orphans()), (expected, 0, 0));
}

#[test]
fn the_shape_tells_whether_anything_hangs_in_the_air() {
    let mut source = Source::new(rules(2));
    let mut out = Vec::new();
    source.store(&stored(&[70, 71, 72], None, &tokens(0..12)), &mut out);
    source.remove(&removed(&[72, 71]), &mut out);
    assert_eq!((source.shape(), source.worst_shape()), (Shape::Whole, Shape::Whole), "leaves went first");
    source.store(&stored(&[71, 72], Some(70), &tokens(4..12)), &mut out);
    source.remove(&removed(&[71, 72]), &mut out);
    assert_eq!((source.shape(), source.worst_shape()), (Shape::Whole, Shape::Holed), "for a moment 72 had no parent");
    source.store(&stored(&[71], Some(70), &tokens(4..8)), &mut out);
    source.remove(&removed(&[70]), &mut out);
    assert_eq!(source.shape(), Shape::Holed);
    assert_eq!(source.clear().count(), 2);
    assert_eq!(source.shape(), Shape::Whole);
}
