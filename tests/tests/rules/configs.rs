//! Every configuration file has a format that a test reads, and parses.

use tests::rules::{root, tracked};

/// Endings of the files whose content other tests read.
const READ_BY_OTHER_TESTS: [&str; 6] = [".jinja", ".json.gz", ".jsonl.gz", ".py", "LICENSE", "NOTICE"];

fn configs() -> Vec<String> {
    let mut files = tracked().unwrap();
    files.retain(|path| path.starts_with("configs/") && !path.ends_with(".md"));
    files
}

#[test]
fn every_config_file_has_a_parsed_format() {
    let kinds = [".toml", ".json"];
    let known = |path: &String| kinds.iter().chain(&READ_BY_OTHER_TESTS).any(|end| path.ends_with(end));
    let unknown: Vec<String> = configs().into_iter().filter(|path| !known(path)).collect();
    assert_eq!(unknown, Vec::<String>::new());
}

#[test]
fn toml_and_json_configs_parse() {
    let mut wrong = Vec::new();
    for path in tracked().unwrap() {
        let text = || std::fs::read_to_string(root().join(&path)).unwrap();
        let error = match path.rsplit('.').next() {
            Some("toml") => toml::from_str::<toml::Table>(&text()).err().map(|error| error.to_string()),
            Some("json") => serde_json::from_str::<serde_json::Value>(&text()).err().map(|error| error.to_string()),
            _ => None,
        };
        wrong.extend(error.map(|error| format!("{path}: {error}")));
    }
    assert_eq!(wrong, Vec::<String>::new());
}
