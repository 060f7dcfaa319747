//! Which crate may use which.

use std::collections::BTreeMap;

use tests::rules::Crates;

/// ARCHITECTURE.md's table of crates. Nothing is transitive: every allowed dependency is listed.
const ALLOWED_DEPENDENCIES: [(&str, &[&str]); 13] = [
    ("vocabulary", &[]),
    ("ledger", &["vocabulary"]),
    ("consensus", &["ledger", "vocabulary"]),
    ("simulation", &["consensus", "ledger", "vocabulary"]),
    ("ownership", &["consensus", "ledger", "vocabulary"]),
    ("planner", &["vocabulary"]),
    ("simulator", &["planner", "ledger", "engine-model", "vocabulary"]),
    ("residency", &["vocabulary"]),
    ("engine-model", &["vocabulary"]),
    ("workers-shim", &["residency", "engine-model", "vocabulary"]),
    ("prefix", &["vocabulary"]),
    (
        "router",
        &[
            "vocabulary",
            "ledger",
            "ownership",
            "planner",
            "simulator",
            "residency",
            "engine-model",
            "workers-shim",
            "prefix",
        ],
    ),
    (
        "tests",
        &[
            "vocabulary",
            "ledger",
            "ownership",
            "planner",
            "residency",
            "engine-model",
            "workers-shim",
            "prefix",
            "router",
        ],
    ),
];

const PURE: [&str; 7] = ["vocabulary", "ledger", "planner", "simulator", "residency", "engine-model", "prefix"];
const EFFECTFUL: [&str; 8] =
    ["tokio", "hyper", "reqwest", "axum", "openraft", "futures", "parking_lot", "tracing-subscriber"];

#[test]
fn every_crate_uses_only_its_allowed_crates() {
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED_DEPENDENCIES.into_iter().collect();
    let crates = Crates::read().unwrap();
    let mut wrong = Vec::new();
    for (name, dependencies) in &crates.workspace {
        let may = allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} has no line in MAY_USE"));
        let own = dependencies.iter().filter(|dependency| dependency.path.is_some());
        wrong.extend(
            own.filter(|used| !may.contains(&used.name.as_str())).map(|used| format!("{name} -> {}", used.name)),
        );
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_crate_of_the_table_exists() {
    let crates = Crates::read().unwrap();
    let mut named: Vec<&str> = ALLOWED_DEPENDENCIES.iter().map(|(name, _)| *name).collect();
    let mut there: Vec<&str> = crates.workspace.iter().map(|(name, _)| name.as_str()).collect();
    named.sort_unstable();
    there.sort_unstable();
    assert_eq!(named, there);
}

#[test]
fn pure_crates_depend_on_nothing_that_performs_io() {
    let crates = Crates::read().unwrap();
    let pure = crates.workspace.iter().filter(|(name, _)| PURE.contains(&name.as_str()));
    let mut wrong = Vec::new();
    for (name, dependencies) in pure {
        let shipped = dependencies.iter().filter(|dependency| dependency.kind.is_none());
        let effectful = shipped.filter(|dependency| EFFECTFUL.contains(&dependency.name.as_str()));
        wrong.extend(effectful.map(|dependency| format!("{name} -> {}", dependency.name)));
    }
    assert_eq!(wrong, Vec::<String>::new());
}
