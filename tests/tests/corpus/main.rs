//! Runs the fuzz targets over the seeds and earlier findings, without libFuzzer.

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
fn corpus_events_are_read_or_refused() {
    replay("events", targets::events);
}

#[test]
fn corpus_bodies_are_spliced_or_refused() {
    replay("bodies", targets::bodies);
}

#[test]
fn corpus_grown_bodies_are_read_as_whole_ones_are() {
    replay("growth", targets::growth);
}

#[test]
fn corpus_responses_read_the_same_in_chunks_of_any_size() {
    replay("answers", targets::answers);
}

#[test]
fn corpus_connections_are_read_or_refused() {
    replay("nodes", targets::nodes::connections);
}

#[test]
fn corpus_prompts_render_the_same_step_by_step_and_as_a_whole() {
    replay("prompts", targets::text::prompts);
}

#[test]
fn corpus_templates_render_within_bounds_or_are_refused() {
    replay("templates", targets::text::templates);
}

#[test]
fn corpus_frames_read_the_same_in_pieces_of_any_size_or_are_refused() {
    replay("zmtp", targets::peers::zmtp);
}

#[test]
fn corpus_values_are_read_or_refused() {
    replay("values", targets::peers::values);
}

#[test]
fn corpus_requests_and_responses_are_served_together() {
    replay("exchanges", targets::peers::exchanges);
}
