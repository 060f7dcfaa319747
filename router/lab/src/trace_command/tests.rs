use std::io::Write as _;
use std::path::Path;

use super::*;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap()
}

#[test]
fn trace_statistics_render_as_a_table() {
    let trace = files::load(&root().join("configs/traces/weka_cc")).unwrap();
    let text = stats_table(&TraceStats::of(&trace, RepeatedPrefixCriteria::default()));
    let said = |words: &[&str]| text.lines().any(|line| line.split_whitespace().eq(words.iter().copied()));
    assert!(said(&["requests", "950"]) && said(&["conversations", "35,", "2", "with", "sub-agents"]), "{text}");
    assert!(text.lines().any(|line| line.starts_with("kind small_increment ")), "{text}");
}

#[test]
fn unreadable_trace_is_reported_with_its_position() {
    let folder = tempfile::tempdir().unwrap();
    let said = |name: &str| files::load(&folder.path().join(name)).unwrap_err().to_string();
    let write = |name: &str, text: &[u8]| std::fs::write(folder.path().join(name), text).unwrap();
    assert!(said("").contains("holds no trace: files that end in .json, .jsonl or .csv"));
    assert!(said("none.json").contains("No such file"));
    write("a.tar.xz", b"");
    assert!(said("a.tar.xz").contains("is an archive; unpack it"));
    assert!(said("none.zip").contains("is an archive; unpack it"), "it is not opened");
    write("b.json", &[0xff, 0xfe]);
    assert!(said("b.json").ends_with("is not text in UTF-8"));
    write("c.jsonl", b"{\"timestamp\": 0, \"input_length\": 5, \"output_length\": -1, \"hash_ids\": []}\n");
    assert!(said("c.jsonl").contains("c.jsonl:1: invalid value: integer `-1`"), "{}", said("c.jsonl"));
    write("d.json.gz", &[0x1f, 0x8b, 8, 0]);
    assert!(said("d.json.gz").starts_with("cannot read"));
}

#[test]
fn trace_size_limit_covers_all_files_after_decompression() {
    let folder = tempfile::tempdir().unwrap();
    let line = "{\"timestamp\": 0, \"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}\n";
    let most = 100 * line.len() as u64;
    let read =
        |most| files::load_within(folder.path(), most).map(|trace| trace.steps().count()).map_err(|e| e.to_string());
    std::fs::write(folder.path().join("a.jsonl"), line.repeat(60)).unwrap();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
    packed.write_all(line.repeat(40).as_bytes()).unwrap();
    std::fs::write(folder.path().join("b.jsonl.gz"), packed.finish().unwrap()).unwrap();
    assert_eq!(read(most), Ok(100));
    let error = read(most - 1).unwrap_err();
    assert!(error.contains("b.jsonl.gz makes the trace longer than 0 MiB; accepted: less in all files"), "{error}");
    assert!(read(59 * line.len() as u64).unwrap_err().contains("a.jsonl makes"));
}

#[test]
fn data_directory_resolves_to_its_decision_log() {
    let folder = tempfile::tempdir().unwrap();
    // What else lies there is no trace.
    std::fs::write(folder.path().join("identity.json"), "{\"cluster\": 1}").unwrap();
    let log = folder.path().join("decisions");
    std::fs::create_dir(&log).unwrap();
    let message = files::load(folder.path()).unwrap_err().to_string();
    assert!(message.contains("decisions holds no trace"), "{message}");
    let line = r#"{"receipt":{"arrived_at":"2026-11-26T04:05:25Z","lookup":{"session_id":"s-1","prompt_tokens":100,"max_overlap_tokens":0},"observed":{"outcome":"complete","duration":"9us","output_tokens":5}}}"#;
    std::fs::write(
        log.join("decisions.jsonl"),
        format!("{{\"version\":2,\"release\":\"x\",\"planner\":{{}}}}\n{line}\n"),
    )
    .unwrap();
    assert_eq!(files::load(folder.path()).unwrap().steps().count(), 1);
}

#[test]
fn truncated_log_is_read_with_a_note_even_inside_a_character() {
    let folder = tempfile::tempdir().unwrap();
    let head = "{\"version\":2,\"release\":\"x\",\"planner\":{}}";
    let receipt = |tenant| {
        let at = r#""arrived_at":"2026-11-26T04:05:25Z""#;
        let lookup = r#""lookup":{"session_id":"s-1","prompt_tokens":100,"max_overlap_tokens":0}"#;
        let observed = r#""observed":{"outcome":"complete","duration":"9us","output_tokens":5}"#;
        format!("{{\"receipt\":{{{at},{lookup},{observed},\"tenant\":\"{tenant}\"}}}}")
    };
    let whole = format!("{head}\n{}\n{}", receipt("a"), receipt("\u{e9}"));
    let file = folder.path().join("decisions.jsonl");
    std::fs::write(&file, &whole.as_bytes()[..=whole.find('\u{e9}').unwrap()]).unwrap();
    let trace = files::load(folder.path()).unwrap();
    let stats = TraceStats::of(&trace, RepeatedPrefixCriteria::default());
    let expected = "cut off, as a router that was killed leaves its last line; left out";
    assert_eq!(stats.requests, 1);
    let text = stats_table(&stats);
    assert!(text.contains(&format!("\nnote: {}:3: {expected}\n", file.display())), "{text}");
}
