//! Costs of building and testing are written down, so that a change shows what it adds.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde::Deserialize;
use tests::rules::root;

#[derive(Deserialize)]
struct GateBudget {
    packages: usize,
    binary_megabytes: u64,
    suites_binary_megabytes: u64,
    gate_seconds: u64,
    suites: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct CargoLock {
    package: Vec<toml::Table>,
}

#[test]
fn the_lock_file_has_the_budgeted_number_of_packages() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let budget: GateBudget = toml::from_str(&read("tests/budget.toml")).unwrap();
    let lock: CargoLock = toml::from_str(&read("Cargo.lock")).unwrap();
    assert_eq!(
        lock.package.len(),
        budget.packages,
        "say in the commit what the packages are for, and write the new count"
    );
    assert_eq!((budget.binary_megabytes, budget.gate_seconds), (60, 1500), "these bounds are decided, not measured");
}

#[test]
fn the_budget_has_a_time_for_every_gate_suite_and_no_other() {
    let budget: GateBudget =
        toml::from_str(&std::fs::read_to_string(root().join("tests/budget.toml")).unwrap()).unwrap();
    let list = Command::new(root().join("test")).arg("--list").output().unwrap();
    assert!(list.status.success(), "{}", String::from_utf8_lossy(&list.stderr));
    let list = String::from_utf8(list.stdout).unwrap();
    let gate = list.lines().filter(|line| !line.contains(" deep: ")).filter_map(|line| line.split_whitespace().next());
    let preparation = ["apt", "tools", "engines-install", "build"];
    let run: BTreeSet<&str> = gate.chain(preparation).collect();
    let written: BTreeSet<&str> = budget.suites.keys().map(String::as_str).collect();
    assert_eq!(written, run, "on the left what tests/budget.toml names, on the right what ./test runs");
}

/// The suites' binary is hardly optimized and keeps its symbols; `./test --deep release` holds the one that ships to its bound.
#[test]
fn the_suites_binary_size_is_within_the_budget() {
    let budget: GateBudget =
        toml::from_str(&std::fs::read_to_string(root().join("tests/budget.toml")).unwrap()).unwrap();
    // Nothing has built the binary if a package is tested alone.
    let Ok(binary) = std::fs::metadata(root().join("target/ci/ownerserve")) else { return };
    let megabytes = binary.len() / 1_000_000;
    let allowed = budget.suites_binary_megabytes;
    assert!(megabytes < allowed, "{megabytes} MB, {allowed} are allowed");
}
