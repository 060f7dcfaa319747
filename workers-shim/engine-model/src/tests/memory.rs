//! Tests of blocks: caching, copies, eviction, preemption, and events.

use super::*;
use crate::StoredBlocks;

fn stored(event: &PrefixCacheChange) -> &StoredBlocks {
    match event {
        PrefixCacheChange::Stored(stored) => stored,
        other => panic!("{other:?}"),
    }
}

#[test]
fn full_blocks_of_prompt_and_answer_are_reported_in_order() {
    let mut harness = EngineHarness::new(small_profile());
    let ask = prompt(1, 10);
    let answer = harness.answer(request(&ask, 8));
    let events = harness.all_events();
    let (first, second, third) = (stored(&events[0]), stored(&events[1]), stored(&events[2]));
    assert_eq!((first.parent, first.hashes.len()), (None, 2));
    assert_eq!(first.tokens, ask[..8]);
    assert_eq!(second.parent, Some(first.hashes[1]));
    assert_eq!(second.tokens, [&ask[8..], &answer[..2]].concat());
    assert_eq!(third.tokens, answer[2..6], "the last token's KV is never computed");
    assert_eq!(events.len(), 3);
}

#[test]
fn repeated_prompt_stores_its_last_block_twice() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 12), 1));
    harness.answer(request(&prompt(1, 12), 1));
    let again = stored(&harness.events[1][0]).clone();
    assert_eq!((again.hashes.len(), again.tokens.len()), (1, 4));
    let copies = harness.copies();
    assert_eq!(copies[&again.hashes[0]], 2);
    assert_eq!(copies.len(), 3);
}

#[test]
fn every_evicted_copy_is_reported() {
    let mut harness = EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() });
    harness.answer(request(&prompt(1, 12), 1));
    harness.answer(request(&prompt(1, 12), 1));
    harness.answer(request(&prompt(2, 199), 1));
    let copies = harness.copies();
    let expected = 49;
    assert_eq!(copies.values().sum::<i32>(), expected, "only the long prompt is left: 49 whole blocks");
    assert!(copies.values().all(|count| *count == 1));
}

#[test]
fn eviction_starts_at_the_ends_of_the_oldest_prompts() {
    let mut harness =
        EngineHarness::new(EngineProfile { num_gpu_blocks: 50, max_num_batched_tokens: 100, ..small_profile() });
    harness.answer(request(&prompt(1, 80), 1));
    harness.answer(request(&prompt(2, 80), 1));
    let old = stored(&harness.events[0][0]).hashes.clone();
    harness.answer(request(&prompt(3, 60), 1));
    let removed: Vec<u64> = harness
        .all_events()
        .iter()
        .filter_map(|e| if let PrefixCacheChange::Removed(h) = e { Some(*h) } else { None })
        .collect();
    assert!(!removed.is_empty() && removed.len() < old.len());
    let expected: Vec<u64> = old.iter().rev().take(removed.len()).copied().collect();
    assert_eq!(removed, expected, "leaf first");
    let id = harness.submit(request(&prompt(1, 80), 1));
    let kept = (old.len() - removed.len()) as u32 * 4;
    assert_eq!(harness.finish(id).cached, kept, "its beginning is still there");
}

#[test]
fn copy_counting_listener_matches_the_cache() {
    let mut harness = EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() });
    for round in 0..40 {
        harness.answer(request(&prompt(round % 7, 20 + round), 1 + round % 9));
    }
    let copies = harness.copies();
    assert!(copies.values().all(|count| *count > 0), "never fewer than none");
    let id = harness.submit(request(&prompt(39 % 7, 59), 1));
    assert!(harness.finish(id).cached > 0 && copies.values().sum::<i32>() <= 50);
}

#[test]
fn preemption_takes_the_newest_request_and_keeps_answers_correct() {
    let mut harness = EngineHarness::new(EngineProfile { num_gpu_blocks: 50, ..small_profile() });
    let ids: Vec<EngineRequestId> = (0..4).map(|seed| harness.submit(request(&prompt(seed, 40), 60))).collect();
    for (seed, id) in (0u32..).zip(&ids) {
        harness.finish(*id);
        assert_eq!(harness.texts[id], answer_of_fresh_engine(&prompt(seed, 40), 60), "request {seed}");
    }
    assert!(harness.engine.stats().preemptions > 0, "four times 100 tokens do not fit into 200");
    assert_eq!(harness.finishes[&ids[0]].cached, 0);
    assert_eq!(harness.engine.stats().blocks_used, 0);
}

#[test]
fn requests_with_a_common_prefix_share_blocks() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 40), 1));
    let a = harness.submit(request(&prompt(1, 44), 30));
    let b = harness.submit(request(&prompt(1, 44), 30));
    harness.advance(harness.now + Micros(5_000));
    // Ten shared blocks, and a few of each request's own.
    assert!(harness.engine.stats().blocks_used <= 16, "{}", harness.engine.stats().blocks_used);
    harness.finish(a);
    harness.finish(b);
    assert_eq!(harness.texts[&a], harness.texts[&b]);
}

#[test]
fn salts_and_adapters_separate_blocks() {
    let mut harness = EngineHarness::new(small_profile());
    let mut salted = |salt: Option<&str>, adapter: Option<&str>| {
        let mut request = request(&prompt(1, 12), 1);
        request.keys = CacheKeys { salt: salt.map(Arc::from), adapter: adapter.map(Arc::from) };
        let id = harness.submit(request);
        harness.finish(id).cached
    };
    assert_eq!([salted(None, None), salted(Some("a"), None), salted(None, Some("l"))], [0, 0, 0]);
    assert_eq!([salted(None, None), salted(Some("a"), None), salted(None, Some("l"))], [8, 8, 8]);
    let events = harness.all_events();
    assert_eq!(stored(&events[1]).salt.as_deref(), Some("a"), "told with the first block");
    assert_eq!(stored(&events[2]).adapter.as_deref(), Some("l"));
    assert_eq!(stored(&events[4]).salt, None, "a later block does not tell it");
}

#[test]
fn block_hashes_differ_between_engines() {
    let names = |root| {
        let engine = Engine::new(Arc::new(small_profile()), voice(), root).unwrap();
        let mut harness = EngineHarness { engine, ..EngineHarness::new(small_profile()) };
        harness.answer(request(&prompt(1, 12), 1));
        stored(&harness.events[0][0]).hashes.clone()
    };
    assert_eq!(names(1), names(1));
    assert_ne!(names(1), names(2));
}

#[test]
fn reset_clears_the_cache_and_is_reported_with_the_next_step() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 12), 1));
    assert!(harness.engine.reset_prefix_cache());
    harness.advance(harness.now + Micros(1_000));
    assert_eq!(harness.events.len(), 1, "not yet");
    let id = harness.submit(request(&prompt(1, 12), 1));
    assert_eq!(harness.finish(id).cached, 0);
    assert_eq!(harness.events[1][0], PrefixCacheChange::Cleared);
    assert_eq!(harness.copies().len(), 3);
}

#[test]
fn reset_is_refused_while_blocks_are_in_use() {
    let mut harness = EngineHarness::new(small_profile());
    let id = harness.submit(request(&prompt(1, 12), 5));
    harness.advance(Micros(1));
    assert!(!harness.engine.reset_prefix_cache());
    harness.finish(id);
    assert!(harness.engine.reset_prefix_cache());
}

#[test]
fn prompt_tokens_are_counted_by_source() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 22), 3));
    harness.answer(request(&prompt(1, 22), 3));
    let stats = harness.engine.stats();
    assert_eq!((stats.prompt.computed, stats.prompt.cached, stats.prompt.external), (24, 20, 0));
    assert_eq!((stats.generated, stats.finishes.length), (6, 2));
}

#[test]
fn full_report_repeats_blocks_without_adding_copies() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 14), 1));
    let mut ask = request(&prompt(1, 14), 1);
    ask.kv_report = KvEventMode::Full;
    harness.answer(ask);
    assert_eq!(harness.events[1], harness.events[0], "told again");
    harness.answer(request(&prompt(2, 199), 1));
    harness.answer(request(&prompt(3, 199), 1));
    let first = stored(&harness.events[0][0]).hashes[0];
    assert_eq!(harness.copies().get(&first), Some(&1), "a listener that counts is misled: that is the trap");
    let id = harness.submit(request(&prompt(1, 14), 1));
    assert_eq!(harness.finish(id).cached, 0);
}

#[test]
fn request_that_ignores_the_cache_still_populates_it() {
    let mut harness = EngineHarness::new(small_profile());
    let mut cached = |seed: u32, reading: CacheReadPolicy| {
        let id = harness.submit(EngineRequest { cache_reads: reading, ..request(&prompt(seed, 22), 3) });
        harness.finish(id).cached
    };
    assert_eq!(
        [cached(1, CacheReadPolicy::Cached), cached(1, CacheReadPolicy::Ignored), cached(1, CacheReadPolicy::Cached)],
        [0, 0, 20]
    );
    assert_eq!(
        [cached(2, CacheReadPolicy::Ignored), cached(2, CacheReadPolicy::Cached)],
        [0, 20],
        "it is stored as ever"
    );
    assert_eq!(harness.texts.values().collect::<BTreeSet<_>>().len(), 2, "the answer to a prompt is one");
}
