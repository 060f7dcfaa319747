//! Tests of scheduling and timing.

use super::*;

#[test]
fn lone_request_takes_prefill_plus_one_step_per_token() {
    let mut harness = EngineHarness::new(small_profile());
    let id = harness.submit(request(&prompt(1, 20), 4));
    harness.finish(id);
    // 20 tokens at 10,000 per second, then one decode step each.
    let times: Vec<u64> = harness.times[&id].iter().map(|at| at.0).collect();
    assert_eq!(times, [2_000, 3_000, 4_000, 5_000]);
    let finish = &harness.finishes[&id];
    assert_eq!((finish.arrived, finish.first_token), (Micros(0), Micros(2_000)));
    assert_eq!((finish.prompt, finish.cached, finish.generated, finish.created), (20, 0, 4, 20));
}

#[test]
fn cached_prefix_costs_only_its_last_block() {
    let mut harness = EngineHarness::new(small_profile());
    harness.answer(request(&prompt(1, 20), 1));
    let began = harness.now;
    let id = harness.submit(request(&prompt(1, 20), 1));
    let finish = harness.finish(id);
    // All five blocks are cached, but something must be computed: four tokens.
    assert_eq!((finish.cached, finish.created), (16, 4));
    assert_eq!(finish.first_token - began, Micros(400));
}

#[test]
fn long_prefill_is_chunked_and_others_keep_decoding() {
    let mut harness = EngineHarness::new(small_profile());
    let short = harness.submit(request(&prompt(1, 8), 12));
    harness.advance(Micros(800));
    let long = harness.submit(request(&prompt(2, 100), 1));
    harness.finish(short);
    harness.finish(long);
    let during = harness.times[&short].iter().filter(|at| **at < harness.finishes[&long].first_token).count();
    assert!(during >= 3, "the short one went on while the long one was computed, {during} tokens");
    let gaps: Vec<u64> = harness.times[&short].windows(2).map(|pair| (pair[1] - pair[0]).0).collect();
    assert_eq!(gaps.iter().max(), Some(&4_100), "a step is one decode and at most 31 tokens of prefill: {gaps:?}");
}

#[test]
fn batch_size_slows_every_request_by_the_profile() {
    let mut harness = EngineHarness::new(small_profile());
    let ids: Vec<EngineRequestId> = (0..4).map(|seed| harness.submit(request(&prompt(seed, 4), 6))).collect();
    harness.finish(ids[3]);
    let gap = harness.times[&ids[0]][2] - harness.times[&ids[0]][1];
    assert_eq!(gap, Micros(1_300));
}

#[test]
fn batching_does_not_change_answers() {
    let mut harness = EngineHarness::new(small_profile());
    let ids: Vec<EngineRequestId> = (0..9).map(|seed| harness.submit(request(&prompt(seed, 5 + seed), 15))).collect();
    for (seed, id) in (0u32..).zip(&ids) {
        harness.finish(*id);
        assert_eq!(harness.texts[id], answer_of_fresh_engine(&prompt(seed, 5 + seed), 15), "request {seed}");
    }
}

#[test]
fn batch_is_bounded_and_the_rest_queue_in_order() {
    let mut harness = EngineHarness::new(small_profile());
    let ids: Vec<EngineRequestId> = (0..6).map(|seed| harness.submit(request(&prompt(seed, 4), 5))).collect();
    harness.advance(Micros(1));
    assert_eq!((harness.engine.stats().running, harness.engine.stats().waiting), (4, 2));
    harness.finish(ids[5]);
    assert!(harness.finishes[&ids[4]].first_token <= harness.finishes[&ids[5]].first_token);
    assert!(harness.finishes[&ids[5]].first_token > harness.finishes[&ids[3]].first_token);
}

#[test]
fn request_is_not_computed_before_its_arrival() {
    let mut harness = EngineHarness::new(small_profile());
    let first = harness.submit(request(&prompt(1, 10), 2));
    let later = harness.engine.submit(Micros(50_000), request(&prompt(2, 10), 1)).unwrap();
    harness.finish(first);
    assert!(harness.now < Micros(5_000));
    assert_eq!(harness.engine.next_event(), None, "nothing is under way");
    harness.advance(Micros(49_999));
    assert_eq!(harness.finishes.len(), 1);
    harness.advance(Micros(60_000));
    assert_eq!(harness.finishes[&later].first_token, Micros(51_000), "it began when it came");
}

#[test]
fn single_late_advance_equals_many_small_ones() {
    let ask = |harness: &mut EngineHarness| -> Vec<EngineRequestId> {
        (0..5).map(|seed| harness.submit(request(&prompt(seed, 30), 7))).collect()
    };
    let (mut patient, mut eager) = (EngineHarness::new(small_profile()), EngineHarness::new(small_profile()));
    let (ids, same) = (ask(&mut patient), ask(&mut eager));
    patient.advance(Micros(1_000_000));
    (0..1_000_000).step_by(333).for_each(|at| eager.advance(Micros(at)));
    eager.advance(Micros(1_000_000));
    assert_eq!(ids, same);
    assert_eq!(patient.times, eager.times);
    assert_eq!(patient.texts, eager.texts);
    assert_eq!(patient.events, eager.events);
}

#[test]
fn cancelled_request_frees_its_slot_and_memory() {
    let mut harness = EngineHarness::new(small_profile());
    let ids: Vec<EngineRequestId> = (0..5).map(|seed| harness.submit(request(&prompt(seed, 8), 50))).collect();
    harness.advance(Micros(10_000));
    let before = harness.texts[&ids[0]].len();
    harness.engine.cancel(harness.now, ids[0]);
    harness.engine.cancel(harness.now, ids[0]);
    harness.finish(ids[4]);
    assert_eq!(reason(&harness.finishes[&ids[0]]), FinishReason::Abort);
    assert_eq!(harness.texts[&ids[0]].len(), before, "it says nothing more");
    assert_eq!(harness.engine.stats().finishes.abort, 1);
    (1..5).for_each(|at| drop(harness.finish(ids[at])));
    assert_eq!(harness.engine.stats().blocks_used, 0);
}

#[test]
fn dead_engine_fails_running_requests_and_rejects_new_ones() {
    let mut harness = EngineHarness::new(small_profile());
    let ids: Vec<EngineRequestId> = (0..3).map(|seed| harness.submit(request(&prompt(seed, 8), 50))).collect();
    harness.advance(Micros(5_000));
    harness.engine.crash(harness.now);
    harness.advance(Micros(6_000));
    assert!(ids.iter().all(|id| harness.finishes[id].reason == FinishReason::Error));
    assert_eq!(harness.engine.submit(harness.now, request(&[11], 1)), Err(crate::RequestRejection::Dead));
    assert_eq!(harness.engine.next_event(), None);
}
