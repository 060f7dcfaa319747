use std::sync::Arc;

use super::*;

#[test]
fn lone_request_matches_the_timing_formulas() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[400, 200]);
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(10_000, 0));
    bench.submit(run_request(1, &path, 650, 10));
    bench.run_until(100.0);
    assert_near(bench.first_token(1), 0.65 + 1e-6 * 650.0 * 325.0);
    assert_near(bench.finished(1) - bench.first_token(1), 10.0 * (0.01 + 1e-5 * 655.0));
    // The same again: the complete blocks are cached.
    bench.submit(run_request(2, &path, 650, 10));
    bench.run_until(200.0);
    assert_eq!(bench.started(2), [600, 0, 0, 50]);
    assert_near(bench.first_token(2) - 100.0, 0.05 + 1e-6 * 50.0 * 625.0);
    assert_eq!(bench.engine.memory_in_use(), Tokens::ZERO);
    assert_eq!(*bench.engine.load(), OutstandingRequests::default());
}

#[test]
fn prefill_and_decode_slow_each_other_down() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[1_000]), chain(&mut runs, &[2_000]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(100_000, 0));
    bench.submit(run_request(1, &a, 1_000, 100));
    bench.run_until(1.5);
    let alone = 2.0 + 1e-6 * 2_000.0 * 1_000.0;
    bench.submit(run_request(2, &b, 2_000, 1));
    bench.run_until(60.0);
    // Each chunk of 100 tokens takes a 20th of that, and waits for the attention of the batch over 1,050 tokens.
    let batch = 1e-5 * 1_050.0;
    assert_near(bench.first_token(2) - 1.5, alone * (1.0 + batch / (alone / 20.0)));
    let usage = bench.engine.usage();
    assert!(usage.stalled > 0.5 * (bench.first_token(2) - 1.5), "{usage:?}");
}

#[test]
fn requests_start_in_order_and_a_large_request_blocks_the_queue() {
    let mut runs = RunTree::default();
    let paths = [100, 500, 100].map(|tokens| chain(&mut runs, &[tokens]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(600, 0));
    for (ticket, path) in (1..).zip(&paths) {
        let tokens = bench.runs.end_depth(path).0;
        bench.submit(run_request(ticket, path, tokens, 50));
    }
    bench.run_until(0.2);
    assert_eq!((bench.engine.queued(), bench.engine.batch().0), (2, 1), "500 + 50 do not fit beside 150");
    bench.run_until(100.0);
    assert!(bench.finished(1) <= bench.first_token(2) && bench.first_token(2) < bench.first_token(3));
    assert_eq!(bench.engine.evicted(), Tokens(600), "each run made room for the next");
}

#[test]
fn path_is_evicted_from_its_end_and_restored_from_the_host_tier() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[300, 300, 300]), chain(&mut runs, &[400]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(1_000, 1_000));
    bench.submit(run_request(1, &a, 900, 1));
    bench.run_until(10.0);
    bench.submit(run_request(2, &b, 400, 1));
    bench.run_until(20.0);
    let held = bench.engine.cached_depths(&bench.runs, &a);
    assert_eq!(held, PromptTierDepths { device: Tokens(300), with_host: Tokens(900), with_disk: Tokens(900) });
    bench.submit(run_request(3, &a, 950, 1));
    bench.run_until(30.0);
    assert_eq!(bench.started(3), [300, 0, 600, 50]);
    assert_near(bench.first_token(3) - 20.0, 0.06 + 0.05 + 1e-6 * 50.0 * 925.0);
}

#[test]
fn transferred_runs_are_not_recomputed() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[100, 200, 300]);
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(10_000, 0));
    bench.submit(run_request(1, &path[..1], 100, 1));
    bench.run_until(5.0);
    let sent = RunRequest { fetched_runs: vec![path[1]], ready_at: Seconds(7.0), ..run_request(2, &path, 600, 1) };
    bench.submit(sent);
    bench.run_until(6.9);
    assert!(!bench.engine.is_prefilling(), "it waits for what is sent");
    bench.run_until(7.0);
    bench.run_until(50.0);
    assert_eq!(bench.started(2), [100, 200, 0, 300]);
    assert_eq!(bench.engine.cached_depths(&bench.runs, &path).device, Tokens(600));
}

#[test]
fn resent_answer_stays_cached() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[128, 64]);
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(10_000, 0));
    bench.submit(RunRequest { expected_history: Some(path.as_slice().into()), ..run_request(1, &path[..1], 140, 60) });
    bench.run_until(50.0);
    assert_eq!(bench.engine.cached_depths(&bench.runs, &path).device, Tokens(192));
    assert_eq!(bench.engine.memory_used(), Tokens(192));
}

#[test]
fn remote_decode_takes_the_kv_along() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[300]);
    let (mut from, mut to) = (
        RunEngineHarness::new(runs.clone(), TIMING, sizes(1_000, 0)),
        RunEngineHarness::new(runs.clone(), TIMING, sizes(1_000, 0)),
    );
    from.submit(RunRequest { decode_location: DecodeLocation::Remote, ..run_request(1, &path, 310, 20) });
    from.run_until(5.0);
    let (_, RunRequestEvent::Prefilled(prefilled)) = from.events.pop().unwrap() else { panic!("it is computed") };
    assert_eq!(from.engine.memory_in_use(), Tokens(330), "kept until it has left");
    to.engine.expect_arrival();
    to.engine.expect_answer(Tokens(310));
    to.engine.receive_prefilled(&runs, prefilled.prompt.clone()).unwrap();
    from.engine.release_prefilled(&runs, &prefilled);
    to.run_until(9.0);
    to.finished(1);
    let left = [&from, &to].map(|bench| (bench.engine.memory_in_use().0, bench.engine.memory_used().0));
    assert_eq!(left, [(0, 300), (0, 300)]);
    // A worker without room returns the prompt unchanged.
    let mut full = RunEngineHarness::new(runs.clone(), TIMING, sizes(320, 0));
    assert_eq!(full.engine.receive_prefilled(&runs, prefilled.prompt.clone()), Err(prefilled.prompt));
    assert_eq!(full.engine.memory_used(), Tokens::ZERO);
}

#[test]
fn shared_cache_does_not_disturb_other_requests() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[1_000]), chain(&mut runs, &[1_000]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(0, 0));
    bench.shared = Some(IdealSharedCache::new(Some(Tokens(1_500)), bench.runs.len()));
    bench.submit(run_request(1, &a, 1_000, 1_000));
    bench.run_until(2.0);
    bench.submit(run_request(2, &b, 1_000, 1));
    bench.run_until(60.0);
    assert_near(bench.first_token(2) - 2.0, 1.0 + 1e-6 * 1_000.0 * 500.0);
    assert_eq!(bench.engine.usage().stalled, 0.0);
    bench.submit(run_request(3, &a, 1_000, 1));
    assert_eq!(bench.started(3)[3], 1_000, "the second prompt has pushed the first one out");
}

#[test]
fn run_tree_tracks_depth_and_parents() {
    let mut runs = RunTree::default();
    assert!(runs.is_empty());
    let path: Arc<[RunId]> = chain(&mut runs, &[5, 6]).into();
    let fork = runs.add(Some(path[0]), 9);
    assert_eq!((runs.end_depth(&path), runs.depth(fork), runs.parent(fork)), (Tokens(11), Tokens(14), Some(path[0])));
    assert_eq!((runs.end_depth(&[]), runs.len(), runs.tokens(fork)), (Tokens(0), 3, Tokens(9)));
}

#[test]
fn engine_progresses_at_late_clock_times() {
    // Ten years, the maximum time in traces; the clock's resolution there is 60 ns.
    for begin in [1.7e7, 3.2e8] {
        let mut runs = RunTree::default();
        let paths: Vec<_> = (0..200).map(|n| chain(&mut runs, &[300 + 17 * n])).collect();
        let mut bench = RunEngineHarness::new(runs, TIMING, sizes(100_000, 0));
        bench.run_until(begin);
        for (ticket, path) in (0..).zip(&paths) {
            bench.submit(run_request(ticket, path, bench.runs.end_depth(path).0, 3 + u64::from(ticket)));
        }
        bench.run_until(begin + 10_000.0);
        let mut last = begin;
        for ticket in 0..200 {
            let (first, whole) = (bench.first_token(ticket), bench.finished(ticket));
            assert!(last < first && first < whole, "{ticket}: {last} {first} {whole}");
            last = first;
        }
        assert_eq!(*bench.engine.load(), OutstandingRequests::default());
    }
}

#[test]
fn prefill_left_is_the_active_remainder_plus_the_queue_at_current_pace() {
    let mut runs = RunTree::default();
    let paths = [1_000, 2_000, 3_000].map(|tokens| chain(&mut runs, &[tokens]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes(100_000, 0));
    bench.submit(run_request(1, &paths[0], 1_000, 1_000));
    bench.run_until(2.0);
    assert!(!bench.engine.is_prefilling(), "it has begun to answer");
    assert_near(bench.engine.prefill_left(bench.now), 0.0);
    let left = |bench: &RunEngineHarness, now: f64| bench.engine.prefill_left(Seconds(now));
    bench.submit(run_request(2, &paths[1], 2_000, 1));
    assert!(bench.engine.is_prefilling());
    let all = left(&bench, 2.0);
    // An answer is generated at the same time.
    assert!(all > 2.0 + 1e-6 * 2_000.0 * 1_000.0, "{all}");
    assert_near(left(&bench, 2.5), all - 0.5);
    bench.submit(RunRequest { expected_work: 7.0, ..run_request(3, &paths[2], 3_000, 1) });
    let slower = all / (2.0 + 1e-6 * 2_000.0 * 1_000.0);
    assert_near(left(&bench, 2.5), all - 0.5 + 7.0 * slower);
    bench.run_until(2.0 + all / 2.0);
    let (now, half) = (bench.now.0, left(&bench, bench.now.0));
    assert!((half - all / 2.0 - 7.0 * slower).abs() < 0.01 * all, "half of it is left: {half}");
    assert!(left(&bench, now + 1e3) >= 7.0, "nobody has begun with the next one");
}
