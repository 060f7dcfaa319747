use super::readers::{log, read, sessions};
use crate::stats::{Percentiles, RepeatedPrefixCriteria, TraceStats};

fn of(text: &str) -> TraceStats {
    TraceStats::of(&read(text), RepeatedPrefixCriteria { min_visits: 2, min_prefix_tokens: 100 })
}

fn near(seen: f64, expected: f64) {
    assert!((seen - expected).abs() < 1e-9, "{seen} is not {expected}");
}

/// Two sessions of two steps: the second step of the first session forks, that of the second one continues.
const FORKED: &str = concat!(
    r#"{"id": "a", "block_size": 64, "tool_tokens": 64, "reqs": ["#,
    r#"{"t": 0, "agent": 0, "in": 256, "out": 9, "par": -1, "keep": 0, "runs": [[1, 4]]},"#,
    r#"{"t": 90, "agent": 0, "in": 260, "out": 9, "think": 61, "par": 0, "keep": 2, "runs": [[9, 2]]}]}"#,
    "\n",
    r#"{"id": "b", "block_size": 64, "tool_tokens": 64, "reqs": ["#,
    r#"{"t": 0, "agent": 0, "in": 6400, "out": 64, "par": -1, "keep": 0, "runs": [[1, 100]]},"#,
    r#"{"t": 9, "agent": 0, "in": 6600, "out": 9, "think": 3, "par": 0, "keep": 100, "runs": [[200, 3]]}]}"#,
);

#[test]
fn ideal_hit_rates_are_computed_globally_and_per_conversation() {
    let stats = of(FORKED);
    assert_eq!((stats.requests, stats.conversations), (4, 2));
    let total = 256.0 + 260.0 + 6_400.0 + 6_600.0;
    // One shared cache also hits the first session's tools in the second session.
    near(stats.ideal_hits.everywhere, (128.0 + 64.0 + 6_400.0) / total);
    near(stats.ideal_hits.within_conversations, (128.0 + 6_400.0) / total);
    near(stats.ideal_hits.with_answers, (128.0 + 64.0 + 6_464.0) / total);
    assert_eq!(stats.ideal_hits.distinct_tokens, 256 + 128 + 99 * 64 + 3 * 64);
}

#[test]
fn trace_stats_report_forks_step_kinds_and_pauses() {
    let stats = of(FORKED);
    // Both sessions follow the tools' run; the first session forks after its second block.
    assert_eq!((stats.forks.nodes, stats.forks.deep_nodes), (2, 0));
    near(stats.forks.children.max, 2.0);
    near(stats.kinds["forked_rollout"], 0.25);
    near(stats.kinds["new_long_prefix"], 0.25);
    near(stats.kinds["small_increment"], 0.5);
    near(stats.gaps.over_60_s, 0.5);
    near(stats.gaps.seconds.max, 61.0);
    assert_eq!(stats.with_sub_agents, 0);
}

#[test]
fn repeated_prefixes_are_long_leaves_with_enough_visits() {
    let stats = of(FORKED);
    // The first session's first two blocks (128 tokens), and the second session's first prompt.
    assert_eq!(stats.repetition.prefixes, 2);
    near(stats.repetition.ratio, 1.0);
    let longer = TraceStats::of(&read(FORKED), RepeatedPrefixCriteria { min_visits: 2, min_prefix_tokens: 129 });
    assert_eq!(longer.repetition.prefixes, 1);
    let often = TraceStats::of(&read(FORKED), RepeatedPrefixCriteria { min_visits: 3, min_prefix_tokens: 10 });
    assert_eq!(often.repetition.prefixes, 1, "only the tools are visited that often");
}

#[test]
fn requests_at_recorded_times_form_conversations() {
    let row = |at: u64, blocks: &str, tokens: u64| {
        format!(r#"{{"timestamp": {at}, "input_length": {tokens}, "output_length": 1, "hash_ids": [{blocks}]}}"#)
    };
    let rows = [
        row(0, "1,2", 1_024),
        row(1_000, "1,2,3", 1_536),
        row(3_000, "1,2,4", 1_536),
        row(9_000, "7,8", 1_024),
        row(99_000, "1,2,3,5", 2_048),
    ];
    let stats = of(&rows.join("\n"));
    assert_eq!((stats.requests, stats.conversations), (5, 3));
    near(stats.steps.max, 3.0);
    near(stats.kinds["forked_rollout"], 0.2);
    near(stats.kinds["cold_resume"], 0.2);
    near(stats.gaps.seconds.max, 98.0);
}

#[test]
fn committed_sessions_reuse_nearly_all_of_their_own_tokens() {
    let stats = TraceStats::of(&sessions(), RepeatedPrefixCriteria::default());
    assert_eq!((stats.requests, stats.conversations, stats.with_sub_agents), (950, 35, 2));
    assert!((0.85..0.99).contains(&stats.ideal_hits.within_conversations), "{stats:#?}");
    assert!(stats.ideal_hits.everywhere >= stats.ideal_hits.within_conversations);
    near(stats.kinds.values().sum(), 1.0);
    assert_eq!(stats, TraceStats::of(&sessions(), RepeatedPrefixCriteria::default()));
}

#[test]
fn percentiles_of_no_values_are_zero() {
    assert_eq!(Percentiles::of(Vec::new()), Percentiles::default());
    let spread = Percentiles::of((0..=100).rev().map(f64::from).collect());
    assert_eq!((spread.p50, spread.p90, spread.p99, spread.max, spread.mean), (50.0, 90.0, 99.0, 100.0, 50.0));
}

/// Decision log of four conversations with a common start, of which the last one forks from the third; no length is a
/// multiple of 64 tokens.
const TALKS: [(&str, u64, u64, u64, u64); 11] = [
    ("s-1", 1_000, 1_210, 0, 25),
    ("s-1", 2_000, 1_348, 1_232, 40),
    ("s-2", 2_500, 1_153, 1_008, 30),
    ("s-1", 3_000, 1_519, 1_376, 40),
    ("s-2", 3_500, 1_332, 1_168, 40),
    ("s-3", 4_000, 1_175, 1_008, 15),
    ("s-3", 5_000, 1_301, 1_184, 19),
    ("s-3", 6_000, 1_454, 1_312, 40),
    // Starts within the last answer of another session.
    ("s-4", 7_000, 1_699, 1_552, 40),
    ("s-4", 8_000, 1_808, 1_728, 40),
    // Goes back to the state of two steps ago.
    ("s-3", 9_000, 1_400, 1_184, 9),
];

#[test]
fn decision_log_steps_never_find_more_than_the_ideal() {
    let stats = of(&log(&TALKS));
    let sum = |of: fn(&(&str, u64, u64, u64, u64)) -> u64| TALKS.iter().map(of).sum::<u64>() as f64;
    let found = sum(|step| step.3) / sum(|step| step.2);
    near(stats.ideal_hits.with_answers, found);
    assert!(stats.ideal_hits.everywhere < found, "the engines kept answers");
    assert_eq!(stats.notes.len(), 1);
    let text = format!(
        "the log's steps found {:.2} % of their prompt tokens known, answers of earlier steps among them",
        100.0 * found
    );
    assert_eq!(stats.notes[0], text);
}

#[test]
fn tokens_cached_before_the_log_count_as_new_and_are_reported() {
    let stats = of(&log(&[("s-1", 1_000, 1_210, 1_008, 25), ("s-2", 2_000, 1_210, 1_008, 25)]));
    near(stats.ideal_hits.everywhere, 1_008.0 / 2_420.0);
    assert!(stats.notes[0].contains("found 83.31 % of"), "{:?}", stats.notes);
    assert!(stats.notes[0].contains("; 1008 of these tokens lie in no earlier step of the log"), "{:?}", stats.notes);
}

#[test]
fn engine_cache_hits_beyond_the_routers_knowledge_count() {
    let text = log(&[("s-1", 1_000, 640, 0, 64), ("s-1", 9_000, 1_280, 320, 64)]);
    let counted = text.replacen(
        "\"output_tokens\":64}},\"planning_inputs\":{\"step\":{\"reused_tokens\":320",
        "\"cached_tokens\":640,\"output_tokens\":64}},\"planning_inputs\":{\"step\":{\"reused_tokens\":320",
        1,
    );
    assert_ne!(text, counted);
    near(of(&text).ideal_hits.everywhere, 320.0 / 1_920.0);
    near(of(&counted).ideal_hits.everywhere, 640.0 / 1_920.0);
}

#[test]
fn unfinished_log_steps_are_reported_with_their_sessions() {
    let steps = [("s-1", 1_000, 640, 0, 64), ("s-1", 2_000, 704, 640, 64), ("s-2", 3_000, 640, 0, 64)];
    let text = log(&steps);
    let lines: Vec<&str> = text.lines().collect();
    let broken = text.replacen(lines[2], &lines[2].replace("complete", "interrupted"), 1);
    let stats = of(&broken.replacen(lines[3], &lines[3].replace("complete", "client_disconnected"), 1));
    assert_eq!((stats.requests, stats.conversations), (1, 1));
    assert_eq!(
        stats.notes[0],
        "2 of the log's 3 steps did not end in a whole answer and are left out, and with them 1 of its 2 sessions, which \
         have no other"
    );
}
