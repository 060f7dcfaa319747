//! One name, one meaning: GLOSSARY's rule for the names of types.

use std::collections::BTreeMap;

use tests::rules::{sources, type_names};

/// Names that every crate or command may use for its own part.
const SHARED: [&str; 5] = ["Error", "Settings", "Metrics", "Options", "Args"];

/// Words in -ed or -ing that name a thing: states of a request by GLOSSARY, and nouns of English.
const NOUNS: [&str; 4] = ["Dispatched", "Finding", "Planning", "Streaming"];

/// Participles without a regular ending, and pronouns, that have been names of types here.
const NOT_NOUNS: [&str; 16] = [
    "Done", "Drawn", "Found", "Gone", "Heard", "Held", "Kept", "Known", "Left", "Lost", "Said", "Seen", "Sent", "Told",
    "Who", "Written",
];

#[test]
fn a_type_name_is_used_once_in_the_workspace() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for source in sources().unwrap() {
        for name in type_names(&source).unwrap() {
            places.entry(name).or_default().push(source.path.clone());
        }
    }
    assert!(places.len() > 1_000, "only {} types were read", places.len());
    places.retain(|name, files| files.len() > 1 && !SHARED.contains(&name.as_str()));
    assert_eq!(places, BTreeMap::new());
}

#[test]
fn a_type_is_named_by_a_noun() {
    let mut participles = Vec::new();
    for source in sources().unwrap() {
        let names = type_names(&source).unwrap().into_iter().filter(|name| is_participle(name));
        participles.extend(names.map(|name| format!("{}: {name}", source.path)));
    }
    assert_eq!(participles, Vec::<String>::new());
}

fn is_participle(name: &str) -> bool {
    let is_one_word = !name[1..].contains(char::is_uppercase);
    is_one_word
        && !NOUNS.contains(&name)
        && (name.ends_with("ed") || name.ends_with("ing") || NOT_NOUNS.contains(&name))
}
