use std::io::Read as _;

use engine_model::runs::RunTree;
use flate2::read::GzDecoder;
use vocabulary::{Micros, Tokens};

use crate::trace::{ArrivalProcess, ReplayLimits, SessionListError, Trace, TraceError, TraceLoader, TraceStep};

/// Reads the committed agent sessions.
pub(crate) fn sessions() -> Trace {
    let packed = include_bytes!("../../../../configs/traces/weka_cc/sessions.jsonl.gz");
    let mut text = String::new();
    GzDecoder::new(&packed[..]).read_to_string(&mut text).unwrap();
    read(&text)
}

pub(crate) fn read(text: &str) -> Trace {
    try_read(text).unwrap()
}

fn try_read(text: &str) -> Result<Trace, TraceError> {
    let mut reader = TraceLoader::default();
    reader.read("t", text)?;
    Ok(reader.finish()?.unwrap())
}

#[track_caller]
fn assert_rejected(text: &str, expected: &str) {
    let message = try_read(text).map(|trace| trace.sessions).unwrap_err().to_string();
    assert_eq!(message, expected);
}

/// Returns the lengths of a prompt's runs.
fn runs(runs: &RunTree, step: &TraceStep) -> Vec<u64> {
    step.path.iter().map(|run| runs.tokens(*run).0).collect()
}

const DOCUMENT: &str = r#"{"id": "a", "models": [], "block_size": 64, "tool_tokens": 64, "system_tokens": 10, "requests": [
  {"t": 0, "type": "n", "in": 200, "out": 60, "hash_ids": [1, 2, 3], "think_time": 0.0, "api_time": 2.0},
  {"t": 5, "type": "subagent", "agent_id": "x", "duration_ms": 30000, "tool_tokens": 128, "requests": [
    {"t": 0, "type": "s", "in": 140, "out": 9, "hash_ids": [50, 51], "think_time": 0.0, "ttft": 1.0},
    {"t": 4, "type": "subagent", "requests": [
      {"t": 1, "type": "s", "in": 64, "out": 9, "hash_ids": [70], "think_time": null}
    ]},
    {"t": 20, "type": "s", "in": 300, "out": 0, "hash_ids": [50, 51, 52, 53], "think_time": 3.5}
  ]},
  {"t": 40, "type": "n", "in": 330, "out": 5, "hash_ids": [1, 2, 3, 4, 5], "think_time": 38.0}
]}"#;

#[test]
fn parent_step_waits_for_its_sub_agents() {
    let trace = read(DOCUMENT);
    let steps = &trace.sessions[0].steps;
    let after: Vec<&[usize]> = steps.iter().map(|step| &step.after[..]).collect();
    assert_eq!(after, [&[][..], &[0], &[1], &[2], &[3]]);
    let agents: Vec<u32> = steps.iter().map(|step| step.agent).collect();
    assert_eq!(agents, [0, 1, 2, 1, 0]);
    let at: Vec<u64> = steps.iter().map(|step| step.at.0 / 1_000_000).collect();
    assert_eq!(at, [0, 5, 10, 25, 40], "a sub-agent's times are its own");
    assert_eq!(steps[4].pause, Micros(8_000_000), "of the recorded 38 s, the sub-agent ran 30");
    assert_eq!((steps[3].answer, trace.arrivals), (Tokens(1), ArrivalProcess::AfterDependencies));
}

#[test]
fn runs_end_where_prompts_diverge_and_resent_answers_are_found() {
    let trace = read(DOCUMENT);
    let steps = &trace.sessions[0].steps;
    // The first block, of the tools, is a run of its own; the answer of 60 tokens fills the fourth block.
    assert_eq!(runs(&trace.runs, &steps[0]), [64, 128]);
    assert_eq!(runs(&trace.runs, &steps[4]), [64, 128, 64, 64]);
    assert_eq!(steps[0].resent_path.as_deref(), Some(&steps[4].path[..3]));
    assert_eq!(steps[4].resent_path, None);
    assert_eq!(steps[1].path[..], steps[3].path[..1]);
}

#[test]
fn delta_session_reads_like_the_full_document() {
    let lines = r#"{"id": "a", "block_size": 64, "tool_tokens": 64, "reqs": [
        {"t": 0.0, "agent": 0, "in": 200, "out": 60, "think": 0.0, "api": 2.0, "par": -1, "keep": 0, "runs": [[1, 3]]},
        {"t": 5.0, "agent": 1, "in": 140, "out": 9, "think": 0.0, "api": 1.0, "par": -1, "keep": 0, "runs": [[50, 2]],
         "sub": {"type": "Explore", "tool_tokens": 128, "system_tokens": 1, "duration_ms": 30000}},
        {"t": 25.0, "agent": 1, "in": 300, "out": 0, "think": 3.5, "par": 1, "keep": 2, "runs": [[52, 2]]},
        {"t": 40.0, "agent": 0, "in": 330, "out": 5, "think": 38.0, "par": 0, "keep": 2, "runs": [[3, 1], [4, 2]]}
    ]}"#;
    let inner = r#"{"t": 4, "type": "subagent", "requests": [
      {"t": 1, "type": "s", "in": 64, "out": 9, "hash_ids": [70], "think_time": null}
    ]},"#;
    let whole = read(&DOCUMENT.replace(inner, ""));
    let deltas = read(&lines.replace('\n', ""));
    assert_eq!(deltas.sessions[0].steps, whole.sessions[0].steps);
}

#[test]
fn sessions_with_the_same_tools_share_their_first_run() {
    let (mut reader, other) = (TraceLoader::default(), DOCUMENT.replace("[1, 2, 3", "[901, 902, 903"));
    reader.read("a", DOCUMENT).unwrap();
    reader.read("b", &other).unwrap();
    let trace = reader.finish().unwrap().unwrap();
    let [a, b] = &trace.sessions[..] else { panic!("two files are two sessions") };
    assert_eq!(a.steps[0].path[0], b.steps[0].path[0]);
    assert_ne!(a.steps[0].path[1], b.steps[0].path[1]);
}

#[test]
fn mooncake_requests_are_sorted_by_time_and_cut_to_whole_blocks() {
    let trace = read(concat!(
        r#"{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 2, 9]}"#,
        "\n\n",
        r#"{"timestamp": 1000, "input_length": 1024, "output_length": 0, "hash_ids": [0, 1]}"#,
    ));
    let steps = &trace.sessions[0].steps;
    assert_eq!([steps[0].at, steps[1].at], [Micros(0), Micros(2_000_000)]);
    assert_eq!((runs(&trace.runs, &steps[0]), runs(&trace.runs, &steps[1])), (vec![1_024], vec![1_024, 512]));
    assert_eq!((trace.arrivals, trace.block), (ArrivalProcess::Recorded, Tokens(512)));
}

#[test]
fn azure_requests_share_nothing() {
    let trace =
        read("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.5,10,2\n2023-11-16 18:17:03.0,20,0\r\n");
    let steps: Vec<_> = trace.steps().map(|step| (step.at, step.prompt.0, step.answer.0, step.path.len())).collect();
    assert_eq!(steps, [(Micros(0), 20, 1, 0), (Micros(1_500_000), 10, 2, 0)]);
}

#[test]
fn equal_text_prefixes_share_runs() {
    let row = |at: u64, input: &str| {
        format!(r#"{{"timestamp": {at}, "session_id": "s", "input": "{input}", "output": "x"}}"#)
    };
    let history = "a".repeat(200);
    let rows = [row(9_000_000, &(history.clone() + &"b".repeat(70))), row(1_000_000, &history), row(2, "")];
    let trace = read(&rows.join("\n"));
    let steps = &trace.sessions[0].steps;
    assert_eq!((runs(&trace.runs, &steps[0]), runs(&trace.runs, &steps[1])), (vec![48], vec![48, 16]));
    assert_eq!((steps[1].after.as_slice(), steps[1].pause.0 / 100_000), (&[0][..], 79));

    assert_rejected(
        &row(1 << 60, &history),
        "t:1: `timestamp` is 1152921504606846976; accepted: microseconds since 1970, to the year 2200",
    );

    let dialogues = r#"[{"task_id": 1, "trial": 0, "reward": 1.0, "info": {}, "traj": [
        {"role": "system", "content": "rules"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "well"}, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"}]},
      {"task_id": 2, "traj": [{"role": "system", "content": "rules"}, {"role": "assistant", "content": "hi"}]}]"#;
    let trace = read(dialogues);
    let [a, b] = &trace.sessions[..] else { panic!("two dialogues") };
    assert_eq!(a.steps[0].path[0], b.steps[0].path[0], "the same rules");
    assert_eq!(a.steps[0].resent_path.as_deref(), Some(&a.steps[1].path[..3]));
    assert_eq!(a.steps[1].pause, Micros(1_000_000));
}

#[test]
fn malformed_line_error_names_the_line_and_accepted_values() {
    let good = r#"{"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}"#;
    let bad = |from: &str, to: &str| format!("{good}\n{}", good.replace(from, to));
    let form = r#"accepted: {"timestamp": MILLISECONDS, "input_length": TOKENS, "output_length": TOKENS, "hash_ids": [ID, ...]} on each line"#;
    assert_rejected(
        &bad(": 1,", ": -1,"),
        "t:2: `timestamp (in seconds)` is -0.001; accepted: 0 to 315576000 s (ten years)",
    );
    assert_rejected(&bad("600", "99000000000"), "t:2: `input_length` is 99000000000; accepted: 1 to 16777216 tokens");
    assert_rejected(
        &bad("[0, 1]", "[0, 1, 2, 3]"),
        "t:2: `hash_ids` is 4 ids for 600 tokens; accepted: one for each 512 tokens of input_length, the last one \
         perhaps partial",
    );
    let unknown = try_read(&bad("hash_ids", "hashes")).unwrap_err().to_string();
    assert!(unknown.starts_with("t:2: unknown field `hashes`, expected one of `timestamp`") && unknown.contains(form));
    let cut = try_read(&format!("{good}\n{}", &good[..40])).unwrap_err().to_string();
    assert!(cut.starts_with("t:2: the text is cut off: EOF while parsing") && cut.ends_with(form), "{cut}");
    let negative = try_read(&bad("600", "-600")).unwrap_err().to_string();
    assert!(negative.starts_with("t:2: invalid value: integer `-600`, expected u64"), "{negative}");
}

#[test]
fn malformed_request_in_a_document_is_reported_with_its_line() {
    let bad = |from: &str, to: &str| DOCUMENT.replacen(from, to, 1);
    assert_rejected(&bad("\"t\": 20", "\"t\": -20"), "t:8: `t` is -20; accepted: 0 to 315576000 s (ten years)");
    assert_rejected(
        &bad("[50, 51]", "[50, 51, 52]"),
        "t:4: `hash_ids` is 3 whole blocks in a prompt of 140 tokens; accepted: ids of whole blocks of 64 tokens",
    );
    assert_rejected(&bad("\"block_size\": 64", "\"block_size\": 16"), "t:1: `block_size` is 16; accepted: 64");
    let unknown = try_read(&bad("api_time", "api_thyme")).unwrap_err().to_string();
    assert!(unknown.starts_with("t:2: unknown field `api_thyme`, expected one of `t`"), "{unknown}");
    let cut = try_read(&DOCUMENT[..DOCUMENT.len() - 60]).unwrap_err().to_string();
    assert!(cut.contains("the text is cut off"), "{cut}");
}

fn ids(field: &str, id: u64) -> String {
    format!("t:2: `{field}` is {id}; accepted: ids below 9223372036854775808")
}

#[test]
fn block_ids_above_the_maximum_are_rejected() {
    let end = (1 << 63) - 1;
    let (good, bad) = (format!("[1, 2, {end}]"), format!("[1, 2, {}]", end + 1));
    assert!(try_read(&DOCUMENT.replacen("[1, 2, 3]", &good, 1)).is_ok());
    assert_rejected(&DOCUMENT.replacen("[1, 2, 3]", &bad, 1), &ids("hash_ids", end + 1));
    let row = r#"{"timestamp": 1, "input_length": 1536, "output_length": 5, "hash_ids": IDS}"#;
    assert_rejected(&["[1, 2, 3]", &bad].map(|all| row.replace("IDS", all)).join("\n"), &ids("hash_ids", end + 1));
}

#[test]
fn sub_agents_nest_at_most_sixteen_deep() {
    let nested = |depth: usize| {
        let open = "{\"t\": 0, \"type\": \"subagent\", \"requests\": [\n".repeat(depth);
        let inner = r#"{"t": 1, "type": "s", "in": 64, "out": 9, "hash_ids": [70]}"#;
        let head = r#"{"id": "a", "block_size": 64, "tool_tokens": 0, "requests": ["#;
        format!("{head}{open}{inner}{}]}}", "]}".repeat(depth))
    };
    assert_eq!(read(&nested(16)).sessions[0].steps[0].agent, 16);
    let deep = "`requests` is a sub-agent 17 deep; accepted: sub-agents within each other, 16 deep";
    assert_rejected(&nested(17), &format!("t:17: {deep}"));
    // A file below one megabyte that once overflowed the stack.
    assert_rejected(&nested(15_000), &format!("t:17: {deep}"));
}

#[test]
fn trace_that_expands_beyond_the_budget_is_rejected() {
    let accepted = "accepted: prompts of 33554432 runs in all; split the trace";
    // Each request continues the previous one with forty blocks that are not consecutive.
    let delta = |n: u64| {
        let (tokens, par, keep) = ((n + 1) * 40 * 64, n as i64 - 1, 40 * n);
        let runs: Vec<String> = (keep..keep + 40).map(|block| format!("[{}, 1]", 2 * block)).collect();
        let runs = runs.join(",");
        format!(r#"{{"t": 0, "agent": 0, "in": {tokens}, "out": 1, "par": {par}, "keep": {keep}, "runs": [{runs}]}}"#)
    };
    let lines = |most: u64| {
        let all: Vec<String> = (0..most).map(delta).collect();
        format!(r#"{{"id": "a", "block_size": 64, "tool_tokens": 0, "reqs": [{}]}}"#, all.join(","))
    };
    assert_eq!(read(&lines(100)).sessions[0].steps[99].path.len(), 100);
    assert_rejected(&lines(1_000), &format!("t:1: `the prompts` is more than can be held; {accepted}"));
    let message = |n: usize| format!(r#"{{"role": "assistant", "content": "{n}"}}"#);
    let dialogue = |most: usize| {
        let all: Vec<String> = (0..most).map(message).collect();
        format!(r#"[{{"task_id": 1, "traj": [{}]}}]"#, all.join(","))
    };
    assert_eq!(read(&dialogue(100)).sessions[0].steps.len(), 99);
    assert_rejected(&dialogue(6_000), &format!("t:1: `the prompts` is more than can be held; {accepted}"));
}

#[test]
fn malformed_delta_is_rejected() {
    let line = r#"{"id": "a", "block_size": 64, "tool_tokens": 64, "reqs": [{"t": 0.0, "agent": 0, "in": 200, "out": 60, "par": -1, "keep": 0, "runs": [[1, 3]]}]}"#;
    let bad = |from: &str, to: &str| format!("\n{}", line.replacen(from, to, 1));
    assert_rejected(
        &bad("\"par\": -1", "\"par\": 0"),
        "t:2: `par` is 0; accepted: -1, or the index of an earlier request",
    );
    assert_rejected(
        &bad("\"keep\": 0", "\"keep\": 1"),
        "t:2: `keep` is 1; accepted: at most the blocks of the request `par`",
    );
    let fit = |blocks: u64| {
        format!(
            "t:2: `runs` is {blocks} whole blocks with those kept in a prompt of 200 tokens; accepted: counts of blocks \
             that fit into the prompt"
        )
    };
    assert_rejected(&bad("[[1, 3]]", "[[1, 4]]"), &fit(4));
    assert_rejected(&bad("[[1, 3]]", "[[1, 2], [9, 2]]"), &fit(4));
    let wrapped: Vec<String> = (0..2_048).map(|run| format!("[{}, 2097152]", run * 4_194_304_u64)).collect();
    assert_rejected(&bad("[[1, 3]]", &format!("[{}, [1, 3]]", wrapped.join(","))), &fit((1 << 32) + 3));
    assert_rejected(&bad("[[1, 3]]", "[[9223372036854775806, 3]]"), &ids("runs", (1 << 63) - 2));
    assert_rejected(&bad("[[1, 3]]", "[[18446744073709551615, 1]]"), &ids("runs", u64::MAX));
    assert!(try_read(&bad("[[1, 3]]", "[[9223372036854775805, 3]]")).is_ok());
    assert_rejected(
        &bad("\"agent\": 0", "\"agent\": 5"),
        "t:2: `agent` is 5; accepted: 0, or the next sub-agent's number",
    );
    assert_rejected(
        &bad("{\"t\": 0.0", "{\"t\": 1e99"),
        &format!("t:2: `t` is 1{}; accepted: 0 to 315576000 s (ten years)", "0".repeat(99)),
    );
    let none = r#"{"id": "a", "block_size": 64, "tool_tokens": 64, "reqs": []}"#;
    assert_rejected(none, "t:1: holds no request; accepted: at least one");
}

#[test]
fn malformed_csv_line_and_unknown_format_are_rejected() {
    let azure = |line: &str| format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{line}\n");
    let accepted =
        "accepted: TIMESTAMP,ContextTokens,GeneratedTokens first, then lines such as 2023-11-16 18:17:03.979,4808,10";
    assert_rejected(&azure("2023-11-16 18:17:03,5"), &format!("t:2: 2 columns where 3 belong; {accepted}"));
    assert_rejected(
        &azure("2023-11-16 18:17:03,-5,1"),
        &format!("t:2: ContextTokens `-5` is not a whole number from 0 on; {accepted}"),
    );
    assert_rejected(&azure("yesterday,5,1"), &format!("t:2: `yesterday` is not a time; {accepted}"));
    assert_rejected(
        &azure("2023-11-16 18:17:03,5,1\n1970-01-01 00:00:00,5,1"),
        "t:2: `TIMESTAMP (seconds after the first)` is 1700158623; accepted: 0 to 315576000 s (ten years)",
    );
    assert_rejected("TIMESTAMP,Tokens\n", &format!("t:1: the first line names other columns; {accepted}"));
    assert_rejected(" \n", "t:1: holds no request; accepted: at least one");
    for odd in ["hello", "{\"a\": 1}", "[1, 2]", "\u{e9}"] {
        assert!(
            try_read(odd).unwrap_err().to_string().starts_with("t:1: not a trace that is known here; accepted are")
        );
    }
}

#[test]
fn files_of_one_trace_must_share_a_format() {
    let mut reader = TraceLoader::default();
    reader.read("a", DOCUMENT).unwrap();
    let error = reader.read("b", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1").unwrap_err();
    assert_eq!(
        error.to_string(),
        "b:1: `the form` is unlike the files before (steps that wait for others, blocks of 64 tokens); accepted: one \
         form in all files of a trace"
    );
    assert!(TraceLoader::default().finish().unwrap().is_none());
}

#[test]
fn oversized_steps_are_dropped_with_their_dependents() {
    let trace = read(DOCUMENT);
    let limits = |context, steps, shortest| ReplayLimits {
        max_context: Tokens(context),
        max_steps: steps,
        min_steps: shortest,
        ..ReplayLimits::default()
    };
    let left =
        |limits: &ReplayLimits| trace.clone().apply_limits(limits).sessions.first().map(|session| session.steps.len());
    assert_eq!(left(&limits(335, 9, 1)), Some(5));
    assert_eq!(left(&limits(260, 9, 1)), Some(3), "without its second step the sub-agent never ends");
    assert_eq!((left(&limits(335, 2, 1)), left(&limits(260, 9, 4)), left(&limits(10, 9, 1))), (Some(2), None, None));
    let short = trace.clone().apply_limits(&ReplayLimits { max_pause: Micros(5_000_000), ..limits(335, 9, 1) });
    assert_eq!(short.sessions[0].steps[4].pause, Micros(5_000_000));
}

#[test]
fn sessions_replay_in_the_order_of_a_list_or_a_seed() {
    let trace = sessions();
    let ids = |trace: &Trace| trace.sessions.iter().map(|session| session.id.to_string()).collect::<Vec<_>>();
    let listed = trace.clone().in_order("trace_0291\n\n trace_0016 \n").unwrap();
    assert_eq!(ids(&listed), ["trace_0291", "trace_0016"]);
    let unknown = trace.clone().in_order("trace_0016\nnobody").unwrap_err();
    assert!(unknown.to_string().starts_with("line 2 of the list names the session `nobody`"));
    let twice = trace.clone().in_order("trace_0016\ntrace_0291\ntrace_0016").unwrap_err();
    assert_eq!(
        twice.to_string(),
        "line 3 of the list names the session `trace_0016` again; accepted: each session once"
    );
    assert_eq!(trace.clone().in_order(" \n").unwrap_err(), SessionListError::Empty);
    let (once, again, other) = (trace.clone().shuffled(3), trace.clone().shuffled(3), trace.clone().shuffled(4));
    assert_eq!(ids(&once), ids(&again));
    assert_ne!(ids(&once), ids(&other));
    let sorted = |mut ids: Vec<String>| {
        ids.sort();
        ids
    };
    assert_eq!(sorted(ids(&once)), sorted(ids(&trace)));
}

#[test]
fn shuffling_recorded_requests_permutes_the_gaps_between_them() {
    let row = |at: u64| {
        format!(r#"{{"timestamp": {at}, "input_length": {}, "output_length": 5, "hash_ids": [9]}}"#, 100 + at)
    };
    let trace = read(&[0, 10, 30, 60, 100, 150, 210].map(row).join("\n"));
    let of = |trace: &Trace| trace.steps().map(|step| (step.at.0 / 1_000, step.prompt.0)).collect::<Vec<_>>();
    let shuffled = |seed| of(&trace.clone().shuffled(seed));
    assert_eq!(shuffled(1), shuffled(1));
    assert_ne!(shuffled(1), shuffled(2));
    let (recorded, other) = (of(&trace), shuffled(1));
    let prompts = |steps: &[(u64, u64)]| steps.iter().map(|(_, prompt)| *prompt).collect::<Vec<_>>();
    assert_eq!(prompts(&recorded), prompts(&other), "who comes after whom stays");
    let gaps = |steps: &[(u64, u64)]| {
        let mut gaps: Vec<u64> = steps.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
        gaps.sort_unstable();
        gaps
    };
    assert_eq!((gaps(&recorded), other[0].0), (gaps(&other), 0), "the rate stays too");
}

/// Returns a decision log of steps: session, arrival in milliseconds, prompt, reused tokens, answer.
pub(crate) fn log(steps: &[(&str, u64, u64, u64, u64)]) -> String {
    let mut text = "{\"version\":2,\"release\":\"0.1.0\",\"planner\":{}}\n".to_owned();
    for (session, at, prompt, reused, answer) in steps {
        let at = format!("1970-01-01T00:{:02}:{:02}.{:03}Z", at / 60_000, at / 1_000 % 60, at % 1_000);
        let lookup = format!(r#"{{"session_id":"{session}","prompt_tokens":{prompt},"max_overlap_tokens":{reused}}}"#);
        let observed = format!(r#"{{"outcome":"complete","duration":"2s","output_tokens":{answer}}}"#);
        let receipt =
            format!(r#"{{"request_id":"req-1","arrived_at":"{at}","lookup":{lookup},"observed":{observed}}}"#);
        text += &format!(r#"{{"receipt":{receipt},"planning_inputs":{{"step":{{"reused_tokens":{reused}}}}}}}"#);
        text.push('\n');
    }
    text
}

#[test]
fn decision_log_replays_its_recorded_sessions() {
    let steps = [
        ("s-1", 10_000, 1_280, 0, 64),
        ("s-2", 11_000, 1_280, 640, 64),
        ("s-3", 12_000, 1_280, 640, 64),
        ("s-1", 17_000, 1_920, 1_344, 64),
        // The session went back to before the last answer.
        ("s-1", 20_000, 1_920, 1_280, 64),
    ];
    let trace = read(&log(&steps));
    assert_eq!((trace.arrivals, trace.block), (ArrivalProcess::AfterDependencies, Tokens(16)));
    let ids: Vec<&str> = trace.sessions.iter().map(|session| &*session.id).collect();
    assert_eq!(ids, ["s-1", "s-2", "s-3"]);
    let [first, second, third] = [0, 1, 2].map(|at| &trace.sessions[at].steps);
    assert_eq!(first.iter().map(|step| step.pause.0 / 1_000_000).collect::<Vec<_>>(), [0, 5, 1]);
    let shared = |a: &TraceStep, b: &TraceStep| {
        let same = a.path.iter().zip(&*b.path).take_while(|(a, b)| a == b).map(|(run, _)| *run);
        same.map(|run| trace.runs.tokens(run).0).sum::<u64>()
    };
    assert_eq!((shared(&first[0], &first[1]), shared(&first[1], &first[2])), (1_280, 1_280));
    assert_eq!((shared(&first[0], &second[0]), shared(&second[0], &third[0])), (640, 640));
    let resent = first[0].resent_path.as_ref().expect("the second step resends the first one's answer");
    assert_eq!(trace.runs.end_depth(resent), Tokens(1_344));
    assert_eq!(first[1].resent_path, None);
}

#[test]
fn session_continues_in_the_next_file_of_its_log() {
    let mut reader = TraceLoader::default();
    reader.read("a", &log(&[("s-1", 1_000, 640, 0, 64)])).unwrap();
    reader.read("b", &log(&[("s-1", 9_000, 1_280, 704, 64)])).unwrap();
    let trace = reader.finish().unwrap().unwrap();
    assert_eq!((trace.sessions.len(), trace.sessions[0].steps.len()), (1, 2));
    assert_eq!(trace.sessions[0].steps[1].after, [0]);
}

#[test]
fn decision_log_tolerates_only_a_truncated_last_line() {
    let whole = log(&[("s-1", 1_000, 640, 0, 64), ("s-1", 9_000, 1_280, 704, 64)]);
    let torn = &whole[..whole.len() - 20];
    assert_eq!(read(torn).sessions[0].steps.len(), 1);
    for tail in ["\n", "\0\0\0", "\n\n"] {
        let trace = read(&format!("{torn}{tail}"));
        assert_eq!(trace.sessions[0].steps.len(), 1, "{tail:?}");
        assert_eq!(trace.notes[0], "t:3: cut off, as a router that was killed leaves its last line; left out");
    }
    assert!(read(&whole).notes.iter().all(|note| !note.contains("cut off")));
    let second = whole.lines().nth(1).unwrap();
    let message = try_read(&whole.replacen(second, &second[..60], 1)).unwrap_err().to_string();
    assert!(message.starts_with("t:2: the text is cut off: "), "{message}");
    let other = whole.replacen("\"prompt_tokens\":1280", "\"prompt_tokens\":\"x\"", 1);
    let message = try_read(&other).unwrap_err().to_string();
    assert!(
        message.starts_with("t:3: ") && message.contains("accepted: "),
        "a last line that is whole is no torn one: {message}"
    );
    let message = try_read(&whole.replacen("\"prompt_tokens\":640", "\"prompt_tokens\":0", 1)).unwrap_err().to_string();
    assert_eq!(message, "t:2: `lookup.prompt_tokens` is 0; accepted: 1 to 16777216 tokens");
    let message = try_read(&whole.replacen("\"version\":2", "\"version\":3", 1)).unwrap_err().to_string();
    assert_eq!(message, "t:1: `version` is 3; accepted: 1 or 2");
    let broken = whole.replacen("complete", "interrupted", 1);
    assert_eq!(read(&broken).sessions[0].steps.len(), 1, "a step that broke off is not replayed");
}

#[test]
fn decision_log_of_version_1_is_read_like_one_of_version_2() {
    let old = |at: u64, prompt: u64, reused: u64| {
        let text = format!(r#"{{"session":"s-1","prompt":{prompt},"deepest_overlap":{reused}}}"#);
        let seen = r#"{"ending":"complete","total":2000000,"answered":64}"#;
        let receipt = format!(r#"{{"at_unix_ms":{at},"known":{text},"seen":{seen}}}"#);
        format!(r#"{{"receipt":{receipt},"case":{{"facts":{{"reused":{reused}}}}}}}"#)
    };
    let head = r#"{"version":1,"release":"0.1.0","policy":{}}"#;
    let old = read(&[head.to_owned(), old(1_000, 640, 0), old(9_000, 1_280, 704)].join("\n"));
    let new = read(&log(&[("s-1", 1_000, 640, 0, 64), ("s-1", 9_000, 1_280, 704, 64)]));
    assert_eq!(old.sessions[0].steps, new.sessions[0].steps);
}
