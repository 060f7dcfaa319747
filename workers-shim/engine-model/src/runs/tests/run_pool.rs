use vocabulary::Tokens;

use super::{PromptRng, chain, sizes};
use crate::runs::run_pool::RunPool;
use crate::runs::{RunId, RunTree};

/// A pool in which these paths are cached, in this order.
fn pool_with(runs: &RunTree, device: u64, host: u64, paths: &[&[RunId]]) -> RunPool {
    let mut pool = RunPool::new(sizes(device, host), runs.len());
    for path in paths {
        put(&mut pool, runs, path);
    }
    pool
}

fn put(pool: &mut RunPool, runs: &RunTree, path: &[RunId]) {
    let missing: Vec<RunId> = path.iter().copied().filter(|run| !pool.has(*run)).collect();
    assert!(pool.reserve(runs, missing.iter().map(|run| runs.tokens(*run)).sum()));
    missing.iter().for_each(|run| assert!(pool.fill(runs, *run)));
    pool.touch(path);
}

#[test]
fn eviction_takes_the_least_recently_used_run_and_path_ends_first() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[10, 20, 30]), chain(&mut runs, &[40]));
    let mut pool = pool_with(&runs, 100, 0, &[&a, &b]);
    assert_eq!(pool.used(), Tokens(100));
    assert!(pool.reserve(&runs, Tokens(25)));
    assert_eq!((pool.matched(&runs, &a), pool.matched(&runs, &b)), (Tokens(30), Tokens(40)));
    assert_eq!((pool.evicted(), pool.used()), (Tokens(30), Tokens(95)), "runs go whole");
    pool.unreserve(Tokens(25));
    // Used again, the path is evicted later than the other.
    pool.touch(&a[..2]);
    assert!(pool.reserve(&runs, Tokens(60)));
    assert_eq!((pool.matched(&runs, &a), pool.matched(&runs, &b)), (Tokens(30), Tokens(0)));
}

#[test]
fn pinned_runs_stay_and_a_failed_reservation_evicts_nothing() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[60]), chain(&mut runs, &[40]));
    let mut pool = pool_with(&runs, 100, 0, &[&a, &b]);
    pool.pin(&runs, &a);
    assert!(!pool.reserve(&runs, Tokens(41)));
    assert_eq!((pool.evicted(), pool.matched(&runs, &b)), (Tokens(0), Tokens(40)));
    assert!(pool.reserve(&runs, Tokens(40)));
    assert_eq!((pool.matched(&runs, &a), pool.matched(&runs, &b)), (Tokens(60), Tokens(0)));
}

#[test]
fn run_stays_pinned_until_every_user_unpins_it() {
    let mut runs = RunTree::default();
    let a = chain(&mut runs, &[60]);
    let mut pool = pool_with(&runs, 100, 0, &[&a]);
    pool.pin(&runs, &a);
    pool.pin(&runs, &a);
    pool.unpin(&runs, &a);
    assert_eq!(pool.in_use(), Tokens(60));
    assert!(!pool.reserve(&runs, Tokens(100)), "somebody uses it");
    assert!(pool.has(a[0]));
    pool.unpin(&runs, &a);
    assert_eq!((pool.in_use(), pool.used()), (Tokens(0), Tokens(60)));
    assert!(pool.reserve(&runs, Tokens(100)));
    assert_eq!((pool.has(a[0]), pool.evicted()), (false, Tokens(60)));
}

#[test]
fn in_use_memory_is_pinned_plus_reserved() {
    let mut runs = RunTree::default();
    let a = chain(&mut runs, &[50]);
    let mut pool = pool_with(&runs, 100, 0, &[&a]);
    assert_eq!((pool.used(), pool.in_use()), (Tokens(50), Tokens(0)));
    assert!(pool.reserve(&runs, Tokens(30)));
    assert_eq!((pool.used(), pool.in_use()), (Tokens(80), Tokens(30)));
    pool.pin(&runs, &a);
    assert_eq!(pool.in_use(), Tokens(80));
}

#[test]
fn duplicate_run_is_stored_once() {
    let mut runs = RunTree::default();
    let a = chain(&mut runs, &[50]);
    let mut pool = pool_with(&runs, 200, 0, &[]);
    assert!(pool.reserve(&runs, Tokens(50)) && pool.reserve(&runs, Tokens(50)));
    assert!(pool.fill(&runs, a[0]));
    assert!(!pool.fill(&runs, a[0]));
    pool.unreserve(Tokens(50));
    assert_eq!((pool.used(), pool.in_use()), (Tokens(50), Tokens(0)));
}

#[test]
fn hole_ends_a_match_and_the_host_tier_fills_it() {
    let mut runs = RunTree::default();
    let (a, b) = (chain(&mut runs, &[10, 20, 30]), chain(&mut runs, &[70]));
    let pool = pool_with(&runs, 100, 60, &[&a, &b]);
    // Evicted from its end: 30, then 20 for what b needs.
    assert_eq!(pool.matched(&runs, &a), Tokens(30));
    assert_eq!(pool.matched_in_lower_tiers(&runs, &a, Tokens(30)), [Tokens(60); 2]);
    let mut none = pool_with(&runs, 100, 0, &[&a, &b]);
    assert_eq!(none.matched_in_lower_tiers(&runs, &a, Tokens(30)), [Tokens(30); 2]);
    put(&mut none, &runs, &a[..2]);
    assert_eq!(none.matched(&runs, &a), Tokens(30));
}

#[test]
fn host_tier_evicts_its_oldest_run() {
    let mut runs = RunTree::default();
    let paths = [50, 50, 50, 50].map(|tokens| chain(&mut runs, &[tokens]));
    let mut pool = pool_with(&runs, 50, 100, &[]);
    for path in &paths {
        put(&mut pool, &runs, path);
    }
    let held = |path: &Vec<RunId>| pool.matched_in_lower_tiers(&runs, path, pool.matched(&runs, path))[0].0;
    assert_eq!(paths.iter().map(held).collect::<Vec<_>>(), [0, 50, 50, 50]);
    assert_eq!(pool.evicted(), Tokens(150));
}

#[test]
fn random_operations_keep_the_pool_accounting_consistent() {
    let mut runs = RunTree::default();
    let paths: Vec<Vec<RunId>> = (1..12).map(|n| chain(&mut runs, &[n, 2 * n, 7])).collect();
    let (mut chance, mut pool) = (PromptRng::new(3), RunPool::new(sizes(120, 40), runs.len()));
    let (mut pinned, mut reserved): (Vec<usize>, Vec<u64>) = (Vec::new(), Vec::new());
    for _ in 0..20_000 {
        let path = chance.below(paths.len() as u64) as usize;
        match chance.below(6) {
            0 | 1 => {
                let missing: Vec<RunId> = paths[path].iter().copied().filter(|run| !pool.has(*run)).collect();
                if pool.reserve(&runs, missing.iter().map(|run| runs.tokens(*run)).sum()) {
                    // Reserving may have evicted a cached part of the path.
                    missing.iter().for_each(|run| assert!(pool.fill(&runs, *run)));
                }
            }
            2 if paths[path].iter().all(|run| pool.has(*run)) => {
                pool.pin(&runs, &paths[path]);
                pinned.push(path);
            }
            3 if !pinned.is_empty() => {
                let path = pinned.swap_remove(chance.below(pinned.len() as u64) as usize);
                assert!(paths[path].iter().all(|run| pool.has(*run)), "what is in use was evicted");
                pool.unpin(&runs, &paths[path]);
            }
            4 => {
                let tokens = chance.below(30);
                if pool.reserve(&runs, Tokens(tokens)) {
                    reserved.push(tokens);
                }
            }
            _ => pool.unreserve(Tokens(reserved.pop().unwrap_or_default())),
        }
        let cached: u64 = paths.iter().flatten().filter(|run| pool.has(**run)).map(|run| runs.tokens(*run).0).sum();
        assert_eq!(pool.used().0, cached + reserved.iter().sum::<u64>());
        assert!(pool.used() <= Tokens(120));
        let in_use = paths.iter().enumerate().filter(|(at, _)| pinned.contains(at));
        let in_use: u64 = in_use.map(|(_, path)| runs.end_depth(path).0).sum();
        assert_eq!(pool.in_use().0, in_use + reserved.iter().sum::<u64>());
    }
}
