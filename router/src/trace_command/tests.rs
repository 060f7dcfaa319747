use std::path::Path;

use super::*;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn the_figures_of_a_trace_are_a_table_for_people() {
    let trace = files::load(&root().join("configs/traces/weka_cc")).unwrap();
    let text = text(&TraceStats::of(&trace, RepetitionOf::default()));
    let said = |words: &[&str]| text.lines().any(|line| line.split_whitespace().eq(words.iter().copied()));
    assert!(said(&["requests", "950"]) && said(&["conversations", "35,", "2", "with", "sub-agents"]), "{text}");
    assert!(text.lines().any(|line| line.starts_with("kind small_increment ")), "{text}");
}

#[test]
fn what_cannot_be_read_is_said_with_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let said = |name: &str| files::load(&folder.path().join(name)).unwrap_err().to_string();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    assert!(said("").contains("holds no trace: files that end in .json, .jsonl or .csv"));
    assert!(said("none.json").contains("No such file"));
    write("a.tar.xz", b"");
    assert!(said("a.tar.xz").contains("is an archive; unpack it"));
    write("b.json", &[0xff, 0xfe]);
    assert!(said("b.json").ends_with("is not text in UTF-8"));
    write("c.jsonl", b"{\"timestamp\": 0, \"input_length\": 5, \"output_length\": -1, \"hash_ids\": []}\n");
    assert!(said("c.jsonl").contains("c.jsonl:1: invalid value: integer `-1`"), "{}", said("c.jsonl"));
    write("d.json.gz", &[0x1f, 0x8b, 8, 0]);
    assert!(said("d.json.gz").starts_with("cannot read"));
}
