//! The number of packages is written down, so that a change shows what it adds.

use serde::Deserialize;
use tests::rules::root;

#[derive(Deserialize)]
struct Budget {
    packages: usize,
    binary_megabytes: u64,
    gate_seconds: u64,
    suites: std::collections::BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<toml::Table>,
}

#[test]
fn the_lock_file_has_as_many_packages_as_the_budget_says() {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).unwrap();
    let budget: Budget = toml::from_str(&read("tests/budget.toml")).unwrap();
    let lock: Lock = toml::from_str(&read("Cargo.lock")).unwrap();
    assert_eq!(
        lock.package.len(),
        budget.packages,
        "say in the commit what the packages are for, and write the new count"
    );
    assert_eq!((budget.binary_megabytes, budget.gate_seconds), (60, 1500), "these bounds are decided, not measured");
}

#[test]
fn every_suite_of_the_gate_has_a_time_in_the_budget() {
    let budget: Budget = toml::from_str(&std::fs::read_to_string(root().join("tests/budget.toml")).unwrap()).unwrap();
    let list = std::process::Command::new(root().join("test")).arg("--list").output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let gate = list.lines().filter(|line| !line.contains(" deep: ")).filter_map(|line| line.split_whitespace().next());
    let missing: Vec<&str> = gate.filter(|suite| !budget.suites.contains_key(*suite)).collect();
    assert_eq!(missing, Vec::<&str>::new(), "suites of ./test without a line in tests/budget.toml");
}
