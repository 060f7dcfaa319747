//! The pool by itself: users, copies, order of eviction, and contents.

use super::voice;
use crate::Fingerprint;
use crate::pool::{BlockId, Content, Pool};

/// Take, seal and give back one block a key, oldest first.
fn filled(keys: &[u64]) -> (Pool, Vec<BlockId>) {
    let mut pool = Pool::new(keys.len() as u32);
    let blocks: Vec<BlockId> = keys.iter().map(|key| sealed(&mut pool, *key)).collect();
    blocks.iter().for_each(|block| pool.give_back(&[*block]));
    (pool, blocks)
}

fn sealed(pool: &mut Pool, key: u64) -> BlockId {
    let block = pool.take().expect("a free block");
    pool.seal(block, key);
    block
}

#[test]
fn a_free_block_is_still_found_until_it_is_taken() {
    let (mut pool, blocks) = filled(&[1, 2]);
    assert_eq!((pool.free(), pool.used()), (2, 0));
    assert_eq!(pool.share(1), Some(blocks[0]));
    assert_eq!((pool.free(), pool.used()), (1, 1));
    assert_eq!(pool.take(), Some(blocks[1]), "the shared one is not taken");
    assert_eq!((pool.share(2), pool.drain_evicted()), (None, vec![2]));
    assert_eq!(pool.take(), None, "both are used");
}

#[test]
fn the_least_recently_freed_goes_first_and_use_refreshes() {
    let (mut pool, _) = filled(&[1, 2, 3, 4]);
    let used = pool.share(1).unwrap();
    pool.give_back(&[used]);
    assert_eq!((0..4).filter_map(|_| pool.take()).count(), 4);
    assert_eq!(pool.drain_evicted(), [2, 3, 4, 1]);
    assert!(pool.drain_evicted().is_empty(), "each is told once");
}

#[test]
fn the_last_blocks_of_a_sequence_go_before_its_first() {
    let mut pool = Pool::new(3);
    let blocks: Vec<BlockId> = (1..=3).map(|key| sealed(&mut pool, key)).collect();
    pool.give_back(&blocks);
    assert_eq!((0..3).filter_map(|_| pool.take()).count(), 3);
    assert_eq!(pool.drain_evicted(), [3, 2, 1]);
}

#[test]
fn empty_blocks_are_taken_before_cached_ones() {
    let mut pool = Pool::new(3);
    let cached = sealed(&mut pool, 1);
    let partial = pool.take().unwrap();
    pool.give_back(&[cached, partial]);
    assert_eq!(pool.take(), Some(partial));
    pool.take().unwrap();
    assert!(pool.drain_evicted().is_empty() && pool.share(1) == Some(cached));
}

#[test]
fn copies_of_a_block_live_and_die_one_by_one() {
    let mut pool = Pool::new(2);
    let (a, b) = (sealed(&mut pool, 7), sealed(&mut pool, 7));
    pool.give_back(&[a]);
    pool.give_back(&[b]);
    pool.take().unwrap();
    assert_eq!(pool.drain_evicted(), [7]);
    assert_eq!(pool.share(7), Some(b), "the other copy is still there");
    pool.give_back(&[b]);
    pool.take().unwrap();
    assert_eq!((pool.drain_evicted(), pool.share(7)), (vec![7], None));
}

#[test]
fn a_shared_block_is_free_only_when_its_last_user_is_gone() {
    let (mut pool, blocks) = filled(&[5]);
    pool.share(5).unwrap();
    pool.share(5).unwrap();
    pool.give_back(&blocks);
    assert_eq!((pool.used(), pool.take()), (1, None));
    pool.give_back(&blocks);
    assert_eq!(pool.take(), Some(blocks[0]));
}

#[test]
fn clearing_forgets_all_and_is_refused_in_use() {
    let (mut pool, blocks) = filled(&[1, 2, 3]);
    pool.share(2).unwrap();
    assert!(!pool.clear());
    assert_eq!(pool.share(1), Some(blocks[0]), "nothing was forgotten");
    pool.give_back(&blocks[..2]);
    assert!(pool.clear());
    assert!((1..=3).all(|key| pool.share(key).is_none()));
    assert!(pool.drain_evicted().is_empty(), "a reset is not told block by block");
    assert_eq!((0..3).filter_map(|_| pool.take()).count(), 3);
}

#[test]
fn a_taken_block_holds_garbage_and_not_what_it_held() {
    let (mut pool, blocks) = filled(&[1]);
    pool.share(1).unwrap();
    *pool.content_mut(blocks[0]) = Content::of(Fingerprint::root(None), &[10, 11], &voice());
    pool.give_back(&blocks);
    assert_eq!(pool.peek(0).unwrap().tokens, [10, 11], "memory keeps what was written");
    pool.take().unwrap();
    assert_eq!(*pool.content(blocks[0]), Content::on(Fingerprint::GARBAGE));
    assert!(pool.peek(1).is_none());
}

#[test]
fn content_is_cut_to_what_was_written_and_padded_with_garbage() {
    let (root, voice) = (Fingerprint::root(None), voice());
    let mut content = Content::of(root, &[10, 11, 12], &voice);
    content.cut(2, &voice);
    assert_eq!(content, Content::of(root, &[10, 11], &voice));
    let honest = Content::of(root, &[10, 11, 0, 0], &voice);
    content.cut(4, &voice);
    assert_eq!(content.tokens, honest.tokens);
    assert_ne!(content.end, honest.end, "what nobody wrote is no KV of token 0");
}

#[test]
fn fingerprints_depend_on_order_and_on_what_lies_before() {
    let (root, voice) = (Fingerprint::root(None), voice());
    let end = |start, tokens: &[u32]| Content::of(start, tokens, &voice).end;
    assert_ne!(end(root, &[10, 11]), end(root, &[11, 10]));
    assert_ne!(end(root, &[10]), end(Fingerprint::root(Some("a")), &[10]));
    assert_ne!(root.attend(end(root, &[10])), root.attend(end(root.spoiled(), &[10])));
    assert_ne!(root.attend(end(root, &[10])), root.spoiled().attend(end(root, &[10])));
}
