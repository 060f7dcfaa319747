//! Tests of the disk below the host tier.

use super::*;
use crate::runs::run_pool::RunPool;
use crate::runs::{DiskTraffic, RestoreChoice, RestoreTime};

fn put(pool: &mut RunPool, runs: &RunTree, path: &[RunId]) {
    let missing: Vec<RunId> = path.iter().copied().filter(|run| !pool.has(*run)).collect();
    let present: Vec<RunId> = path.iter().copied().filter(|run| pool.has(*run)).collect();
    pool.pin(runs, &present);
    assert!(pool.reserve(runs, missing.iter().map(|run| runs.tokens(*run)).sum()));
    missing.iter().for_each(|run| _ = pool.fill(runs, *run));
    pool.unpin(runs, &present);
    pool.touch(path);
}

/// Restores a path from slower tiers.
fn restore(pool: &mut RunPool, runs: &RunTree, path: &[RunId]) -> RestoreTime {
    let from = pool.matched(runs, path);
    let [_, to] = pool.matched_in_lower_tiers(runs, path, from);
    let below = pool.lower_tier_hit(runs, path, (from, &loaded(to)));
    pool.lower.restore(runs, &below)
}

fn loaded(until: Tokens) -> RestoreChoice {
    RestoreChoice { loaded_until: until, windows: Tokens::ZERO, compute_from: until }
}

fn restored(host: f64, disk: f64) -> RestoreTime {
    RestoreTime { host, disk }
}

#[test]
fn host_tier_eviction_moves_runs_to_disk_and_restores_them() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[100, 100, 100]), chain(&mut runs, &[300]));
    let mut pool = RunPool::new(with_disk(300, 200, 500), runs.len());
    put(&mut pool, &runs, &a);
    put(&mut pool, &runs, &b);
    // Evicted from its end, so the end is the oldest in the host tier.
    assert_eq!(pool.matched_in_lower_tiers(&runs, &a, Tokens::ZERO), [Tokens(200), Tokens(300)]);
    assert_eq!(pool.lower.used(), [Tokens(200), Tokens(100)]);
    let DiskTraffic { written, read, .. } = pool.lower.disk_use();
    assert_eq!((written, read), (Tokens(100), Tokens::ZERO));
    pool.lower.advance_clock(Seconds(10.0));
    assert_eq!(restore(&mut pool, &runs, &a), restored(200.0 / 10_000.0, 100.0 / 1_000.0));
    let DiskTraffic { read, useful, .. } = pool.lower.disk_use();
    assert_eq!((read, useful), (Tokens(100), Tokens(100)));
}

#[test]
fn disk_tier_works_without_a_host_tier() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[100, 200]), chain(&mut runs, &[300]));
    let mut pool = RunPool::new(with_disk(300, 0, 500), runs.len());
    put(&mut pool, &runs, &a);
    put(&mut pool, &runs, &b);
    assert_eq!(pool.matched_in_lower_tiers(&runs, &a, Tokens::ZERO), [Tokens::ZERO, Tokens(300)]);
}

#[test]
fn disk_writes_a_run_once_and_counts_repeated_reads_as_useful_once() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[300]), chain(&mut runs, &[300]));
    let mut pool = RunPool::new(with_disk(300, 0, 1_000), runs.len());
    for round in 0..4 {
        pool.lower.advance_clock(Seconds(100.0 * f64::from(round)));
        for path in [&a, &b] {
            restore(&mut pool, &runs, path);
            put(&mut pool, &runs, path);
        }
    }
    let DiskTraffic { written, read, useful, dropped } = pool.lower.disk_use();
    assert_eq!((written, read, useful, dropped), (Tokens(600), Tokens(1_800), Tokens(600), Tokens::ZERO));
}

#[test]
fn disk_reads_are_serial_and_writes_use_idle_time() {
    let mut runs = RunTree::default();
    let paths: Vec<_> = [300, 300, 300, 300].map(|tokens| chain(&mut runs, &[tokens])).into();
    let mut pool = RunPool::new(with_disk(300, 0, 10_000), runs.len());
    paths[..2].iter().for_each(|path| put(&mut pool, &runs, path));
    assert_near(restore(&mut pool, &runs, &paths[0]).disk, 0.3);
    pool.lower.advance_clock(Seconds(0.1));
    assert_near(restore(&mut pool, &runs, &paths[0]).disk, 0.2 + 0.3);
    // Two reads and a write end at 1.2 s: a write queued then is in time, later ones are not.
    pool.lower.advance_clock(Seconds(0.3));
    paths[2..].iter().for_each(|path| put(&mut pool, &runs, path));
    let DiskTraffic { written, dropped, .. } = pool.lower.disk_use();
    assert_eq!((written, dropped), (Tokens(600), Tokens(300)));
}

#[test]
fn overloaded_disk_drops_writes() {
    let mut runs = RunTree::default();
    let paths: Vec<_> = (0..6).map(|_| chain(&mut runs, &[300])).collect();
    let mut pool = RunPool::new(with_disk(300, 0, 10_000), runs.len());
    paths.iter().for_each(|path| put(&mut pool, &runs, path));
    // Two writes take 1.2 s, so a third would start too late.
    let DiskTraffic { written, dropped, .. } = pool.lower.disk_use();
    assert_eq!((written, dropped), (Tokens(600), Tokens(900)));
    assert_eq!(pool.lower.used(), [Tokens::ZERO, Tokens(600)]);
    assert_eq!(pool.matched_in_lower_tiers(&runs, &paths[2], Tokens::ZERO)[1], Tokens::ZERO);
}

#[test]
fn disk_hit_is_slower_than_host_hit_and_faster_than_recompute() {
    let third = |sizes: MemorySizes| {
        let mut runs = RunTree::default();
        let (a, b) = (chain(&mut runs, &[900]), chain(&mut runs, &[400]));
        let mut bench = RunEngineHarness::new(runs, TIMING, sizes);
        bench.submit(run_request(1, &a, 900, 1));
        bench.run_until(10.0);
        bench.submit(run_request(2, &b, 400, 1));
        bench.run_until(20.0);
        bench.submit(run_request(3, &a, 950, 1));
        bench.run_until(40.0);
        (bench.started(3)[2], bench.first_token(3) - 20.0)
    };
    let [host, disk, none] = [sizes(1_000, 1_000), with_disk(1_000, 0, 1_000), sizes(1_000, 0)].map(third);
    assert_eq!((host.0, disk.0, none.0), (900, 900, 0));
    assert_near(disk.1 - host.1, 0.9 - 0.09);
    assert!(none.1 > disk.1, "{none:?} {disk:?}");
}

#[test]
fn random_operations_keep_every_tiers_accounting_consistent() {
    let mut runs = RunTree::default();
    let paths: Vec<Vec<RunId>> = (1..14).map(|n| chain(&mut runs, &[n, 2 * n, 7])).collect();
    let (mut chance, mut pool) = (PromptRng::new(5), RunPool::new(with_disk(120, 90, 150), runs.len()));
    let mut before = DiskTraffic::default();
    for round in 0..20_000 {
        pool.lower.advance_clock(Seconds(f64::from(round) * 0.02));
        let path = &paths[chance.below(paths.len() as u64) as usize];
        let path = &path[..=chance.below(path.len() as u64) as usize];
        restore(&mut pool, &runs, path);
        put(&mut pool, &runs, path);
        let lies = |there: &dyn Fn(RunId) -> bool| -> Tokens {
            paths.iter().flatten().filter(|run| there(**run)).map(|run| runs.tokens(*run)).sum()
        };
        let expected = [lies(&|run| pool.lower.on_host(run)), lies(&|run| pool.lower.on_disk(run))];
        assert_eq!((pool.used(), pool.lower.used()), (lies(&|run| pool.has(run)), expected));
        assert!(pool.used() <= Tokens(120) && expected[0] <= Tokens(90) && expected[1] <= Tokens(150));
        let now = pool.lower.disk_use();
        assert!(now.written >= before.written && now.read >= before.read && now.useful <= now.read);
        before = now;
    }
    assert!(before.dropped > Tokens::ZERO && before.read > Tokens(10_000), "{before:?}");
}

#[test]
fn path_is_restored_from_all_tiers_up_to_the_first_hole() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[100, 100, 100, 100]), chain(&mut runs, &[300]));
    let mut pool = RunPool::new(with_disk(400, 100, 100), runs.len());
    put(&mut pool, &runs, &a);
    put(&mut pool, &runs, &b);
    // The last two runs of the path moved through the host tier, and the disk kept one of them.
    assert_eq!((pool.matched(&runs, &a), pool.lower.used()), (Tokens(100), [Tokens(100), Tokens(100)]));
    assert_eq!(pool.matched_in_lower_tiers(&runs, &a, Tokens(100)), [Tokens(200), Tokens(300)]);
    let below = pool.lower_tier_hit(&runs, &a, (Tokens(100), &loaded(Tokens(300))));
    assert_eq!((below.host, below.disk), (Tokens(100), vec![(a[2], Tokens(100))]));
}

#[test]
fn each_tier_queues_concurrent_loads_separately() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[200, 200]), chain(&mut runs, &[400]));
    let mut pool = RunPool::new(with_disk(400, 200, 1_000), runs.len());
    put(&mut pool, &runs, &a);
    put(&mut pool, &runs, &b);
    let first = restore(&mut pool, &runs, &a);
    assert_eq!(first, restored(0.02, 0.2));
    let second = restore(&mut pool, &runs, &a);
    assert_near(second.host, 0.04);
    // It starts 0.04 s later, when the first read needs another 0.18 s.
    assert_near(second.disk, 0.18 + 0.2);
    pool.lower.advance_clock(Seconds(10.0));
    assert_eq!(restore(&mut pool, &runs, &a), first);
}

#[test]
fn worker_without_lower_tiers_discards_evicted_runs() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[100, 200]), chain(&mut runs, &[300]));
    let mut pool = RunPool::new(with_disk(300, 200, 500).device_only(), runs.len());
    put(&mut pool, &runs, &a);
    put(&mut pool, &runs, &b);
    assert_eq!(pool.matched_in_lower_tiers(&runs, &a, Tokens::ZERO), [Tokens::ZERO; 2]);
    assert_eq!((pool.lower.disk_use(), pool.lower.used()), (DiskTraffic::default(), [Tokens::ZERO; 2]));
    assert_eq!(restore(&mut pool, &runs, &a), RestoreTime::default());
}
