use super::readers::{read, sessions};
use crate::stats::{RepetitionOf, Spread, TraceStats};

fn of(text: &str) -> TraceStats {
    TraceStats::of(&read(text), RepetitionOf { visits: 2, longer_than: 100 })
}

fn near(seen: f64, expected: f64) {
    assert!((seen - expected).abs() < 1e-9, "{seen} is not {expected}");
}

/// Two sessions of two steps: the second step of the first one leaves its path, that of the second goes on.
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
fn ideal_hits_are_counted_for_all_and_for_each_session() {
    let stats = of(FORKED);
    assert_eq!((stats.requests, stats.conversations), (4, 2));
    let total = 256.0 + 260.0 + 6_400.0 + 6_600.0;
    // Everywhere the second session finds the first one's tools as well.
    near(stats.ideal_hits.everywhere, (128.0 + 64.0 + 6_400.0) / total);
    near(stats.ideal_hits.within_conversations, (128.0 + 6_400.0) / total);
    near(stats.ideal_hits.with_answers, (128.0 + 64.0 + 6_464.0) / total);
    assert_eq!(stats.ideal_hits.distinct_tokens, 256 + 128 + 99 * 64 + 3 * 64);
}

#[test]
fn forks_kinds_and_gaps_are_told() {
    let stats = of(FORKED);
    // The tools' run is followed by both sessions; the first session parts after its second block.
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
fn repeated_prefixes_are_the_long_leaves_that_enough_prompts_go_through() {
    let stats = of(FORKED);
    // Of the first session its first two blocks (128 tokens), of the second its first prompt.
    assert_eq!(stats.repetition.prefixes, 2);
    near(stats.repetition.ratio, 1.0);
    let longer = TraceStats::of(&read(FORKED), RepetitionOf { visits: 2, longer_than: 128 });
    assert_eq!(longer.repetition.prefixes, 1);
    let often = TraceStats::of(&read(FORKED), RepetitionOf { visits: 3, longer_than: 10 });
    assert_eq!(often.repetition.prefixes, 1, "only the tools are visited that often");
}

#[test]
fn requests_at_recorded_times_form_chains() {
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
fn the_committed_sessions_reuse_nearly_everything_within_themselves() {
    let stats = TraceStats::of(&sessions(), RepetitionOf::default());
    assert_eq!((stats.requests, stats.conversations, stats.with_sub_agents), (950, 35, 2));
    assert!((0.85..0.99).contains(&stats.ideal_hits.within_conversations), "{stats:#?}");
    assert!(stats.ideal_hits.everywhere >= stats.ideal_hits.within_conversations);
    near(stats.kinds.values().sum(), 1.0);
    assert_eq!(stats, TraceStats::of(&sessions(), RepetitionOf::default()));
}

#[test]
fn a_spread_of_nothing_is_zero() {
    assert_eq!(Spread::of(Vec::new()), Spread::default());
    let spread = Spread::of((0..=100).rev().map(f64::from).collect());
    assert_eq!((spread.p50, spread.p90, spread.p99, spread.max, spread.mean), (50.0, 90.0, 99.0, 100.0, 50.0));
}
