//! Tests of the pool alone: users, copies, eviction order, and contents.

use super::voice;
use crate::KvFingerprint;
use crate::pool::{BlockContent, BlockId, BlockPool};

/// Allocates, seals and releases one block per key, oldest first.
fn pool_with_cached(keys: &[u64]) -> (BlockPool, Vec<BlockId>) {
    let mut pool = BlockPool::new(keys.len() as u32);
    let blocks: Vec<BlockId> = keys.iter().map(|key| sealed_block(&mut pool, *key)).collect();
    blocks.iter().for_each(|block| pool.release(&[*block]));
    (pool, blocks)
}

fn sealed_block(pool: &mut BlockPool, key: u64) -> BlockId {
    let block = pool.allocate().expect("a free block");
    pool.seal(block, key);
    block
}

#[test]
fn free_block_is_shareable_until_reused() {
    let (mut pool, blocks) = pool_with_cached(&[1, 2]);
    assert_eq!((pool.free(), pool.used()), (2, 0));
    assert_eq!(pool.acquire_cached(1), Some(blocks[0]));
    assert_eq!((pool.free(), pool.used()), (1, 1));
    assert_eq!(pool.allocate(), Some(blocks[1]), "the shared one is not taken");
    assert_eq!((pool.acquire_cached(2), pool.drain_evicted()), (None, vec![2]));
    assert_eq!(pool.allocate(), None, "both are used");
}

#[test]
fn eviction_takes_the_least_recently_freed_block() {
    let (mut pool, _) = pool_with_cached(&[1, 2, 3, 4]);
    let used = pool.acquire_cached(1).unwrap();
    pool.release(&[used]);
    assert_eq!((0..4).filter_map(|_| pool.allocate()).count(), 4);
    assert_eq!(pool.drain_evicted(), [2, 3, 4, 1]);
    assert!(pool.drain_evicted().is_empty(), "each is told once");
}

#[test]
fn last_blocks_of_a_sequence_are_evicted_first() {
    let mut pool = BlockPool::new(3);
    let blocks: Vec<BlockId> = (1..=3).map(|key| sealed_block(&mut pool, key)).collect();
    pool.release(&blocks);
    assert_eq!((0..3).filter_map(|_| pool.allocate()).count(), 3);
    assert_eq!(pool.drain_evicted(), [3, 2, 1]);
}

#[test]
fn empty_blocks_are_taken_before_cached_ones() {
    let mut pool = BlockPool::new(3);
    let cached = sealed_block(&mut pool, 1);
    let partial = pool.allocate().unwrap();
    pool.release(&[cached, partial]);
    assert_eq!(pool.allocate(), Some(partial));
    pool.allocate().unwrap();
    assert!(pool.drain_evicted().is_empty() && pool.acquire_cached(1) == Some(cached));
}

#[test]
fn copies_of_a_block_are_evicted_separately() {
    let mut pool = BlockPool::new(2);
    let (a, b) = (sealed_block(&mut pool, 7), sealed_block(&mut pool, 7));
    pool.release(&[a]);
    pool.release(&[b]);
    pool.allocate().unwrap();
    assert_eq!(pool.drain_evicted(), [7]);
    assert_eq!(pool.acquire_cached(7), Some(b), "the other copy is still there");
    pool.release(&[b]);
    pool.allocate().unwrap();
    assert_eq!((pool.drain_evicted(), pool.acquire_cached(7)), (vec![7], None));
}

#[test]
fn shared_block_is_freed_by_its_last_user() {
    let (mut pool, blocks) = pool_with_cached(&[5]);
    pool.acquire_cached(5).unwrap();
    pool.acquire_cached(5).unwrap();
    pool.release(&blocks);
    assert_eq!((pool.used(), pool.allocate()), (1, None));
    pool.release(&blocks);
    assert_eq!(pool.allocate(), Some(blocks[0]));
}

#[test]
fn clear_drops_every_block_and_is_refused_in_use() {
    let (mut pool, blocks) = pool_with_cached(&[1, 2, 3]);
    pool.acquire_cached(2).unwrap();
    assert!(!pool.clear());
    assert_eq!(pool.acquire_cached(1), Some(blocks[0]), "nothing was forgotten");
    pool.release(&blocks[..2]);
    assert!(pool.clear());
    assert!((1..=3).all(|key| pool.acquire_cached(key).is_none()));
    assert!(pool.drain_evicted().is_empty(), "a reset is not told block by block");
    assert_eq!((0..3).filter_map(|_| pool.allocate()).count(), 3);
}

#[test]
fn taken_block_holds_garbage_instead_of_old_content() {
    let (mut pool, blocks) = pool_with_cached(&[1]);
    pool.acquire_cached(1).unwrap();
    *pool.content_mut(blocks[0]) = BlockContent::of(KvFingerprint::root(None), &[10, 11], &voice());
    pool.release(&blocks);
    assert_eq!(pool.peek(0).unwrap().tokens, [10, 11], "memory keeps what was written");
    pool.allocate().unwrap();
    assert_eq!(*pool.content(blocks[0]), BlockContent::empty(KvFingerprint::GARBAGE));
    assert!(pool.peek(1).is_none());
}

#[test]
fn content_is_truncated_and_padded_with_garbage() {
    let (root, generator) = (KvFingerprint::root(None), voice());
    let mut content = BlockContent::of(root, &[10, 11, 12], &generator);
    content.truncate(2, &generator);
    assert_eq!(content, BlockContent::of(root, &[10, 11], &generator));
    let honest = BlockContent::of(root, &[10, 11, 0, 0], &generator);
    content.truncate(4, &generator);
    assert_eq!(content.tokens, honest.tokens);
    assert_ne!(content.end, honest.end, "what nobody wrote is no KV of token 0");
}

#[test]
fn fingerprints_depend_on_order_and_prefix() {
    let (root, generator) = (KvFingerprint::root(None), voice());
    let end = |start, tokens: &[u32]| BlockContent::of(start, tokens, &generator).end;
    assert_ne!(end(root, &[10, 11]), end(root, &[11, 10]));
    assert_ne!(end(root, &[10]), end(KvFingerprint::root(Some("a")), &[10]));
    assert_ne!(root.extend_block(end(root, &[10])), root.extend_block(end(root.corrupted(), &[10])));
    assert_ne!(root.extend_block(end(root, &[10])), root.corrupted().extend_block(end(root, &[10])));
}
