//! Which crate may use which.

use std::collections::BTreeMap;

use tests::rules::{Crates, sources};

/// ARCHITECTURE.md's table of crates. Nothing is transitive: every allowed dependency is listed.
const ALLOWED_DEPENDENCIES: [(&str, &[&str]); 17] = [
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
    ("proxy", &["vocabulary", "ownership", "planner", "residency", "workers-shim", "prefix", "simulator"]),
    ("operator", &["vocabulary", "ownership", "planner", "workers-shim", "proxy"]),
    ("ctl", &["vocabulary", "ownership"]),
    ("lab", &["vocabulary", "planner", "simulator", "workers-shim", "prefix", "proxy", "ctl"]),
    ("router", &["vocabulary", "ownership", "planner", "residency", "workers-shim", "proxy", "operator", "ctl", "lab"]),
    ("tests", &["vocabulary", "ledger", "ownership", "planner", "residency", "engine-model", "workers-shim", "prefix"]),
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
        let may = allowed.get(name.as_str()).unwrap_or_else(|| panic!("{name} has no line in ALLOWED_DEPENDENCIES"));
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

#[test]
fn stages_of_the_pipeline_are_named_by_the_proxy_and_the_composing_crate_only() {
    let outside = ["router/operator/", "router/ctl/", "router/lab/"];
    let sources = sources().unwrap();
    let outside: Vec<_> =
        sources.iter().filter(|source| outside.iter().any(|folder| source.path.starts_with(folder))).collect();
    assert!(outside.len() > 50, "only {} files were read", outside.len());
    let named: Vec<&str> = outside
        .iter()
        .filter(|source| source.text.contains("proxy::pipeline"))
        .map(|source| source.path.as_str())
        .collect();
    assert_eq!(named, Vec::<&str>::new());
}
