//! Tests of models whose layers do not all keep every token: sizes of runs, and restoring.

use std::sync::{Arc, Mutex};

use super::*;
use crate::runs::run_pool::RunPool;
use crate::runs::{KvSize, OffloadedPrefix, RestoreChoice, RestoreRule};

/// Sets half a token's KV size in device memory, one token's in slower tiers, and windows of 30.
fn with_kv_sizes(runs: RunTree) -> RunTree {
    runs.with_kv_sizes(Tokens(30), |from, to| KvSize { device: Tokens((to - from).0 / 2), lower: to - from })
}

/// Loads all but the last `short` tokens, with windows of size `windows`; records its inputs.
#[derive(Debug)]
struct RecordingRestoreRule {
    short: u64,
    windows: u64,
    received: Mutex<Vec<OffloadedPrefix>>,
}

impl RecordingRestoreRule {
    fn of(short: u64, windows: u64) -> Arc<Self> {
        Arc::new(Self { short, windows, received: Mutex::default() })
    }
}

impl RestoreRule for RecordingRestoreRule {
    fn choose(&self, stored: &OffloadedPrefix) -> RestoreChoice {
        self.received.lock().unwrap().push(*stored);
        let loaded = stored.cached_until.max(stored.stored_until - Tokens(self.short));
        let windows = if loaded > stored.cached_until { Tokens(self.windows) } else { Tokens::ZERO };
        RestoreChoice { loaded_until: loaded, windows, compute_from: loaded }
    }
}

/// A prompt of 900 tokens that another one evicts at 10 s and that is requested again at 20 s.
fn rerequest_evicted_prompt(sizes: MemorySizes, rule: &Arc<RecordingRestoreRule>) -> RunEngineHarness {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[900]), chain(&mut runs, &[400]));
    let mut bench = RunEngineHarness::new(runs, TIMING, sizes);
    bench.engine = RunEngine::new(TIMING, sizes, 2).with_restore_rule(rule.clone());
    bench.submit(run_request(1, &a, 900, 1));
    bench.run_until(10.0);
    bench.submit(run_request(2, &b, 400, 1));
    bench.run_until(20.0);
    bench.submit(run_request(3, &a, 950, 1));
    bench.run_until(60.0);
    bench
}

#[test]
fn run_size_follows_the_models_kv_layout() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[100, 60]);
    assert_eq!(
        (runs.device_size(path[1]), runs.lower_tier_size(path[1]), runs.window_size()),
        (Tokens(60), Tokens(60), Tokens::ZERO)
    );
    let runs = with_kv_sizes(runs);
    assert_eq!(
        (runs.device_size(path[1]), runs.lower_tier_size(path[1]), runs.window_size()),
        (Tokens(30), Tokens(60), Tokens(30))
    );
    assert_eq!((runs.tokens(path[1]), runs.depth(path[1])), (Tokens(60), Tokens(160)), "it has as many tokens");
}

#[test]
fn each_tier_charges_its_own_run_size() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[100, 60]), chain(&mut runs, &[120]));
    let runs = with_kv_sizes(runs);
    let mut pool = RunPool::new(with_disk(100, 70, 500), runs.len());
    assert!(pool.reserve(&runs, Tokens(80)));
    a.iter().for_each(|run| assert!(pool.fill(&runs, *run)));
    pool.touch(&a);
    assert_eq!(pool.used(), Tokens(80));
    assert!(pool.reserve(&runs, Tokens(60)));
    b.iter().for_each(|run| assert!(pool.fill(&runs, *run)));
    // The end of the first path freed 30 tokens, its start 50; the host tier has room for the end, or not even for
    // that.
    assert_eq!((pool.used(), pool.evicted()), (Tokens(60), Tokens(80)));
    assert_eq!(pool.lower.used(), [Tokens::ZERO, Tokens(160)]);
}

#[test]
fn running_sequence_also_holds_its_window_kv() {
    let mut runs = RunTree::default();
    let path = chain(&mut runs, &[600]);
    let mut bench = RunEngineHarness::new(with_kv_sizes(runs), TIMING, sizes(1_000, 0));
    bench.submit(run_request(1, &path, 610, 50));
    bench.run_until(1.0);
    assert_eq!(bench.engine.memory_in_use(), Tokens(300 + 10 + 50 + 30));
    bench.run_until(50.0);
    assert_eq!((bench.engine.memory_in_use(), bench.engine.memory_used()), (Tokens::ZERO, Tokens(300)));
}

#[test]
fn runs_that_the_restore_rule_skips_are_recomputed() {
    let rule = RecordingRestoreRule::of(200, 100);
    let bench = rerequest_evicted_prompt(sizes(1_000, 1_000), &rule);
    assert_eq!(bench.started(3), [0, 0, 700, 250]);
    assert_near(bench.first_token(3) - 20.0, 0.08 + TIMING.prefill_time(Tokens(250), Tokens(700)));
    let nothing = RecordingRestoreRule::of(900, 100);
    let bench = rerequest_evicted_prompt(with_disk(1_000, 0, 1_000), &nothing);
    assert_eq!((bench.started(3), bench.engine.disk_use().read), ([0, 0, 0, 950], Tokens::ZERO));
}

#[test]
fn partial_run_restore_reads_its_window_kv() {
    let bench = rerequest_evicted_prompt(with_disk(1_000, 0, 2_000), &RecordingRestoreRule::of(200, 100));
    let usage = bench.engine.disk_use();
    assert_eq!((usage.read, usage.useful), (Tokens(800), Tokens(800)));
    assert_near(bench.first_token(3) - 20.0, 0.8 + TIMING.prefill_time(Tokens(250), Tokens(700)));
}

#[test]
fn restore_rule_receives_load_times() {
    for (sizes, token) in [(sizes(1_000, 1_000), 1e-4), (with_disk(1_000, 0, 1_000), 1e-3)] {
        let rule = RecordingRestoreRule::of(0, 0);
        rerequest_evicted_prompt(sizes, &rule);
        let told = rule.received.lock().unwrap();
        let last = told.last().unwrap();
        assert_eq!((last.cached_until, last.stored_until, last.wait_seconds), (Tokens::ZERO, Tokens(900), 0.0));
        assert_near(last.seconds_per_token, token);
    }
}
