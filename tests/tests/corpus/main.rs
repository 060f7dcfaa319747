//! What fuzzing starts from, and what it found: the same functions that libFuzzer calls, without libFuzzer.

#[path = "../../fuzz/targets/mod.rs"]
pub mod targets;

use std::fs;
use std::path::Path;

fn replay(name: &str, target: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() >= 8, "{}: {} files", folder.display(), paths.len());
    for path in paths {
        let bytes = fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| target(&bytes));
        assert!(outcome.is_ok(), "{}", path.display());
    }
}

#[test]
fn events_of_the_corpus_are_read_or_refused() {
    replay("events", targets::events);
}

#[test]
fn bodies_of_the_corpus_are_spliced_or_refused() {
    replay("bodies", targets::bodies);
}

#[test]
fn answers_of_the_corpus_say_the_same_in_chunks_of_any_size() {
    replay("answers", targets::answers);
}

#[test]
fn connections_of_the_corpus_are_read_or_refused() {
    replay("nodes", targets::nodes::connections);
}

#[test]
fn prompts_of_the_corpus_are_the_same_step_by_step_and_as_a_whole() {
    replay("prompts", targets::text::prompts);
}

#[test]
fn templates_of_the_corpus_are_rendered_within_bounds_or_refused() {
    replay("templates", targets::text::templates);
}

#[test]
fn frames_of_the_corpus_are_the_same_in_pieces_of_any_size_or_refused() {
    replay("zmtp", targets::peers::zmtp);
}

#[test]
fn values_of_the_corpus_are_read_or_refused() {
    replay("values", targets::peers::values);
}

#[test]
fn requests_of_the_corpus_and_their_answers_are_served_together() {
    replay("exchanges", targets::peers::exchanges);
}
