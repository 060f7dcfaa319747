use vocabulary::Tokens;

use super::*;
use crate::trace::{Trace, TraceLoader};

const SIDECHAIN: &str = r#""isSidechain":true,"#;

/// Returns a user message.
fn asked((uuid, parent): (&str, &str), second: u32, content: &str) -> String {
    line("user", (uuid, parent), second, &format!(r#"{{"role":"user","content":{content:?}}}"#))
}

/// Returns an answer or a part of one: parts with equal ids form one answer.
fn answered((uuid, parent): (&str, &str), second: u32, (id, content): (&str, &str)) -> String {
    let usage = r#"{"input_tokens":1000,"cache_read_input_tokens":500,"output_tokens":3}"#;
    let message = format!(
        r#"{{"id":{id:?},"role":"assistant","model":"m","content":[{{"type":"text","text":{content:?}}}],"usage":{usage}}}"#
    );
    line("assistant", (uuid, parent), second, &message)
}

fn line(kind: &str, (uuid, parent): (&str, &str), second: u32, message: &str) -> String {
    let parent = if parent.is_empty() { "null".into() } else { format!("{parent:?}") };
    format!(
        r#"{{"type":{kind:?},"uuid":{uuid:?},"parentUuid":{parent},"timestamp":"2026-02-05T09:00:{second:02}.500Z","cwd":"/","message":{message}}}"#
    ) + "\n"
}

fn trace(text: &str) -> Result<Trace, TraceError> {
    let mut reader = TraceLoader::default();
    reader.read("a.jsonl", text)?;
    Ok(reader.finish()?.expect("one file"))
}

fn dialogue() -> String {
    let summary = "{\"type\":\"summary\",\"leafUuid\":\"c\",\"summary\":\"a talk\"}\n";
    let parts = [
        asked(("a", ""), 0, &"q".repeat(410)),
        answered(("b", "a"), 4, ("one", "thinking")),
        answered(("c", "b"), 6, ("one", "words")),
        asked(("d", "c"), 9, "and now?"),
        answered(("e", "d"), 12, ("two", "so")),
    ];
    summary.to_owned() + &parts.concat()
}

#[test]
fn model_call_prompt_is_its_ancestors_and_its_messages_one_answer() {
    let trace = trace(&dialogue()).unwrap();
    let [session] = &trace.sessions[..] else { panic!("one session") };
    let [first, second] = &session.steps[..] else { panic!("two calls") };
    // 1,500 tokens minus 100 of the question, rounded down to a multiple of 256, plus the question.
    assert_eq!(first.prompt, Tokens(1_280 + 100));
    assert_eq!((first.path.len(), first.resent_path.as_ref().unwrap().len()), (2, 4));
    assert_eq!(second.path[..4], first.resent_path.as_ref().unwrap()[..]);
    assert_eq!((&second.after[..], second.pause), (&[0][..], Micros(3_000_000)));
    assert_eq!(second.at, Micros(9_000_000));
    assert!(second.answer < first.answer, "one part against two");
}

#[test]
fn branches_and_sub_agents_share_their_common_prefix() {
    let branch = asked(("f", "c"), 20, "something else") + &answered(("g", "f"), 22, ("three", "well"));
    let alone = asked(("h", ""), 21, "look there") + &answered(("i", "h"), 25, ("four", "found"));
    let side: String = alone.lines().map(|line| line.replacen('{', &format!("{{{SIDECHAIN}"), 1) + "\n").collect();
    let trace = trace(&(dialogue() + &branch + &side)).unwrap();
    let steps = &trace.sessions[0].steps;
    assert_eq!(steps.len(), 4);
    assert_eq!(steps[2].path[..4], steps[1].path[..4]);
    assert_ne!(steps[2].path[4], steps[1].path[4]);
    // The last call of its own history, not the one recorded last.
    assert_eq!((steps[2].agent, &steps[2].after[..]), (0, &[0][..]));
    assert_eq!((steps[3].agent, &steps[3].after[..]), (1, &[2][..]));
    assert_ne!(steps[3].path[0], steps[0].path[0], "a sub-agent has a system prompt of its own");
}

#[test]
fn equal_system_prompts_are_shared_between_sessions() {
    let mut reader = TraceLoader::default();
    reader.read("a.jsonl", &dialogue()).unwrap();
    reader.read("b.jsonl", &dialogue().replace("and now?", "and then?")).unwrap();
    let trace = reader.finish().unwrap().unwrap();
    assert_eq!(trace.sessions[0].steps[1].path[..4], trace.sessions[1].steps[1].path[..4]);
    assert_ne!(trace.sessions[0].steps[1].path[4], trace.sessions[1].steps[1].path[4]);
}

#[test]
fn malformed_transcript_line_is_reported_with_its_number() {
    let no_time = dialogue().replace("09:00:09.500Z", "noon");
    let message = trace(&no_time).unwrap_err().to_string();
    assert!(message.contains("a.jsonl:5") && message.contains("`2026-02-05Tnoon` is not a time"), "{message}");
    let cut = dialogue();
    let message = trace(&cut[..cut.len() - 20]).unwrap_err().to_string();
    assert!(message.contains("a.jsonl:6") && message.contains("cut off"), "{message}");
    let backwards = dialogue().replace("09:00:00", "09:30:00");
    assert!(trace(&backwards).is_ok(), "clocks of two machines differ");
    let none = trace("{\"type\":\"summary\",\"leafUuid\":\"c\"}\n").unwrap_err().to_string();
    assert!(none.contains("a.jsonl"), "{none}");
}
