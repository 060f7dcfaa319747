//! Style rules that a program can check.

use tests::rules::{measure, root, sources, tracked};

/// Crates that decide and never act; `prefix` may read the model files it is given.
const PURE_CRATES: [&str; 5] =
    ["ownership/vocabulary/", "ownership/ledger/", "planner/", "workers-shim/residency/", "workers-shim/engine-model/"];
/// Split, so that this file does not match itself.
const LEFTOVER_MARKERS: [&str; 4] =
    [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X:"), concat!("db", "g!(")];
const MAX_FILE_BYTES: u64 = 4 << 20;

fn text_files() -> Vec<(String, String)> {
    let readable = tracked().unwrap().into_iter().filter(|path| !path.ends_with(".gz") && !path.ends_with("LICENSE"));
    readable.filter_map(|path| std::fs::read_to_string(root().join(&path)).ok().map(|text| (path, text))).collect()
}

#[test]
fn every_rust_file_opens_with_a_module_doc() {
    let sources = sources().unwrap();
    assert!(sources.len() > 20, "the sources were not found");
    let bare: Vec<&str> = sources
        .iter()
        .filter(|source| !source.is_test() && !source.text.starts_with("//! "))
        .map(|source| source.path.as_str())
        .collect();
    assert_eq!(bare, Vec::<&str>::new());
}

#[test]
fn no_todo_or_leftover_marker_remains() {
    let code = |path: &str| [".rs", ".py", ".toml", ".md", ".sh"].iter().any(|end| path.ends_with(end));
    let mut found = Vec::new();
    for (path, text) in text_files().into_iter().filter(|(path, _)| code(path)) {
        let lines =
            text.lines().enumerate().filter(|(_, line)| LEFTOVER_MARKERS.iter().any(|word| line.contains(word)));
        found.extend(lines.map(|(at, line)| format!("{path}:{}: {}", at + 1, line.trim())));
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn every_allow_and_ignore_gives_a_reason() {
    let mut found = Vec::new();
    for source in sources().unwrap() {
        let unexplained = measure(&source).unwrap().unexplained_attributes;
        found.extend(unexplained.into_iter().map(|place| format!("{}: {place}", source.path)));
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn pure_crates_touch_no_clock_file_socket_or_thread() {
    let mut found = Vec::new();
    for source in sources().unwrap() {
        let shipped = !source.path.contains("/examples/") && !source.path.contains("/benches/");
        if shipped && PURE_CRATES.iter().any(|room| source.path.starts_with(room)) {
            let effects = measure(&source).unwrap().effects;
            found.extend(effects.into_iter().map(|effect| format!("{}: {effect}", source.path)));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn lines_have_no_trailing_whitespace() {
    let mut found = Vec::new();
    for (path, text) in text_files() {
        let is_input = path.starts_with("configs/models/") || path.starts_with("tests/fuzz/corpus/");
        if is_input || path.ends_with(".lock") {
            continue;
        }
        let spaces = text.lines().position(|line| line.ends_with([' ', '\t', '\r']));
        found.extend(spaces.map(|at| format!("{path}:{}: space at the end", at + 1)));
        if !text.is_empty() && !text.ends_with('\n') {
            found.push(format!("{path}: no newline at the end"));
        }
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn no_large_file_is_committed() {
    let size = |path: &String| std::fs::metadata(root().join(path)).unwrap().len();
    let large: Vec<String> = tracked().unwrap().into_iter().filter(|path| size(path) > MAX_FILE_BYTES).collect();
    assert_eq!(large, Vec::<String>::new());
}

#[test]
fn paths_in_architecture_exist() {
    let text = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let quoted: Vec<&str> = text.split('`').skip(1).step_by(2).filter(|code| code.contains('/')).collect();
    let is_path =
        |code: &&&str| code.split('/').next().is_some_and(|first| !first.is_empty() && root().join(first).is_dir());
    let paths: Vec<&&str> = quoted.iter().filter(is_path).collect();
    assert!(paths.len() > 20, "only {} paths were found", paths.len());
    let gone: Vec<_> = paths.into_iter().filter(|path| !path.contains("NAME") && !root().join(path).exists()).collect();
    assert_eq!(gone, Vec::<&&str>::new());
}
