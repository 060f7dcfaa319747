//! Models whose layers do not all keep every token: what runs take, and what comes back.

use std::sync::{Arc, Mutex};

use super::*;
use crate::runs::pool::RunPool;
use crate::runs::{RestoreRule, Room, Stored, Way};

/// Half a token's worth in device memory, twice that in slower tiers, and windows of 30.
fn weighed(runs: Runs) -> Runs {
    runs.weighed(Tokens(30), |from, to| Room { device: Tokens((to - from).0 / 2), lower: to - from })
}

/// Loads all but the last so many tokens, with windows of so many; remembers what it was told.
#[derive(Debug)]
struct Rule {
    short: u64,
    windows: u64,
    told: Mutex<Vec<Stored>>,
}

impl Rule {
    fn of(short: u64, windows: u64) -> Arc<Self> {
        Arc::new(Self { short, windows, told: Mutex::default() })
    }
}

impl RestoreRule for Rule {
    fn way(&self, stored: &Stored) -> Way {
        self.told.lock().unwrap().push(*stored);
        let loaded = stored.held.max(stored.until - Tokens(self.short));
        let windows = if loaded > stored.held { Tokens(self.windows) } else { Tokens::ZERO };
        Way { loaded, windows, start: loaded }
    }
}

/// A prompt of 900 tokens that another one has pushed out of memory at 10 s and that is asked for again at 20 s.
fn again(sizes: Sizes, rule: &Arc<Rule>) -> Bench {
    let mut runs = Runs::default();
    let (a, b) = (chain(&mut runs, &[900]), chain(&mut runs, &[400]));
    let mut bench = Bench::new(runs, TIMING, sizes);
    bench.engine = RunEngine::new(TIMING, sizes, 2).restoring(rule.clone());
    bench.submit(asked(1, &a, 900, 1));
    bench.until(10.0);
    bench.submit(asked(2, &b, 400, 1));
    bench.until(20.0);
    bench.submit(asked(3, &a, 950, 1));
    bench.until(60.0);
    bench
}

#[test]
fn a_run_takes_what_its_model_keeps_of_it() {
    let mut runs = Runs::default();
    let path = chain(&mut runs, &[100, 60]);
    assert_eq!((runs.room(path[1]), runs.stored(path[1]), runs.windows()), (Tokens(60), Tokens(60), Tokens::ZERO));
    let runs = weighed(runs);
    assert_eq!((runs.room(path[1]), runs.stored(path[1]), runs.windows()), (Tokens(30), Tokens(60), Tokens(30)));
    assert_eq!((runs.tokens(path[1]), runs.depth(path[1])), (Tokens(60), Tokens(160)), "it has as many tokens");
}

#[test]
fn every_tier_counts_what_it_holds_of_a_run() {
    let mut runs = Runs::default();
    let (a, b) = (chain(&mut runs, &[100, 60]), chain(&mut runs, &[120]));
    let runs = weighed(runs);
    let mut pool = RunPool::new(with_disk(100, 70, 500), runs.len());
    assert!(pool.reserve(&runs, Tokens(80)));
    a.iter().for_each(|run| assert!(pool.fill(&runs, *run)));
    pool.touch(&a);
    assert_eq!(pool.used(), Tokens(80));
    assert!(pool.reserve(&runs, Tokens(60)));
    b.iter().for_each(|run| assert!(pool.fill(&runs, *run)));
    // The end of the first path made 30 of room, its beginning 50; the host tier has room for the end, or not even that.
    assert_eq!((pool.used(), pool.evicted()), (Tokens(60), Tokens(80)));
    assert_eq!(pool.lower.used(), [Tokens::ZERO, Tokens(160)]);
}

#[test]
fn a_sequence_under_way_has_its_windows_besides() {
    let mut runs = Runs::default();
    let path = chain(&mut runs, &[600]);
    let mut bench = Bench::new(weighed(runs), TIMING, sizes(1_000, 0));
    bench.submit(asked(1, &path, 610, 50));
    bench.until(1.0);
    assert_eq!(bench.engine.memory_in_use(), Tokens(300 + 10 + 50 + 30));
    bench.until(50.0);
    assert_eq!((bench.engine.memory_in_use(), bench.engine.memory_taken()), (Tokens::ZERO, Tokens(300)));
}

#[test]
fn what_a_rule_does_not_load_is_computed() {
    let rule = Rule::of(200, 100);
    let bench = again(sizes(1_000, 1_000), &rule);
    assert_eq!(bench.started(3), [0, 0, 700, 250]);
    near(bench.first_token(3) - 20.0, 0.08 + TIMING.prefill(Tokens(250), Tokens(700)));
    let nothing = Rule::of(900, 100);
    let bench = again(with_disk(1_000, 0, 1_000), &nothing);
    assert_eq!((bench.started(3), bench.engine.disk_use().read), ([0, 0, 0, 950], Tokens::ZERO));
}

#[test]
fn a_part_of_a_run_is_read_with_its_windows() {
    let bench = again(with_disk(1_000, 0, 2_000), &Rule::of(200, 100));
    let usage = bench.engine.disk_use();
    assert_eq!((usage.read, usage.useful), (Tokens(800), Tokens(800)));
    near(bench.first_token(3) - 20.0, 0.8 + TIMING.prefill(Tokens(250), Tokens(700)));
}

#[test]
fn a_rule_is_told_what_loading_takes() {
    for (sizes, token) in [(sizes(1_000, 1_000), 1e-4), (with_disk(1_000, 0, 1_000), 1e-3)] {
        let rule = Rule::of(0, 0);
        again(sizes, &rule);
        let told = rule.told.lock().unwrap();
        let last = told.last().unwrap();
        assert_eq!((last.held, last.until, last.wait), (Tokens::ZERO, Tokens(900), 0.0));
        near(last.token, token);
    }
}
