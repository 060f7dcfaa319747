//! Checks licenses, sources and banned crates of the whole dependency tree against `deny.toml`, without an external
//! tool.

use serde::Deserialize;
use tests::rules::{Crates, ExternalCrate, root};

#[derive(Deserialize)]
struct DenyConfig {
    licenses: Licenses,
    bans: CrateBans,
}

#[derive(Deserialize)]
struct Licenses {
    allow: Vec<String>,
}

#[derive(Deserialize)]
struct CrateBans {
    deny: Vec<BannedCrate>,
}

#[derive(Deserialize)]
struct BannedCrate {
    name: String,
}

fn deny() -> DenyConfig {
    toml::from_str(&std::fs::read_to_string(root().join("deny.toml")).unwrap()).unwrap()
}

/// Returns whether `allow` satisfies an expression of names, `AND`, `OR`, `WITH` and parentheses; the old `/` means
/// `OR`.
fn permitted(expression: &str, allow: &[String]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let allowed = either(&words, &mut at, allow);
    allowed && at == words.len()
}

fn either(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut allowed = both(words, at, allow);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        allowed |= both(words, at, allow);
    }
    allowed
}

fn both(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let mut allowed = one(words, at, allow);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        allowed &= one(words, at, allow);
    }
    allowed
}

fn one(words: &[&str], at: &mut usize, allow: &[String]) -> bool {
    let Some(word) = words.get(*at) else { return false };
    *at += 1;
    if *word == "(" {
        let allowed = either(words, at, allow);
        *at += 1;
        return allowed;
    }
    let mut name = word.trim_end_matches('+').to_owned();
    if words.get(*at) == Some(&"WITH") {
        name = format!("{name} WITH {}", words.get(*at + 1).unwrap_or(&""));
        *at += 2;
    }
    allow.contains(&name)
}

fn refused_crates(refuse: impl Fn(&ExternalCrate) -> bool) -> Vec<String> {
    let crates = Crates::read().unwrap();
    let refused = crates.external.iter().filter(|external| refuse(external));
    refused.map(|external| format!("{} {} {:?}", external.name, external.version, external.license)).collect()
}

#[test]
fn license_expressions_are_read_with_their_precedence() {
    let allow = ["MIT".to_owned(), "Unicode-3.0".to_owned(), "Apache-2.0 WITH LLVM-exception".to_owned()];
    for fine in
        ["MIT", "MIT/Apache-2.0", "(GPL-3.0 OR MIT) AND Unicode-3.0", "Apache-2.0 WITH LLVM-exception OR GPL-2.0"]
    {
        assert!(permitted(fine, &allow), "{fine}");
    }
    for not in ["", "GPL-3.0", "MIT AND GPL-3.0", "GPL-3.0 OR MIT AND GPL-2.0", "Apache-2.0", "MIT)"] {
        assert!(!permitted(not, &allow), "{not}");
    }
}

#[test]
fn every_dependency_has_an_allowed_license() {
    let allow = deny().licenses.allow;
    let wrong =
        refused_crates(|external| !external.license.as_deref().is_some_and(|license| permitted(license, &allow)));
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn every_dependency_comes_from_the_registry() {
    let registry = "registry+https://github.com/rust-lang/crates.io-index";
    assert_eq!(refused_crates(|external| external.source.as_deref() != Some(registry)), Vec::<String>::new());
}

#[test]
fn no_banned_crate_is_in_the_tree() {
    let banned = deny().bans.deny;
    assert!(!banned.is_empty());
    let wrong = refused_crates(|external| banned.iter().any(|ban| ban.name == external.name));
    assert_eq!(wrong, Vec::<String>::new());
}
