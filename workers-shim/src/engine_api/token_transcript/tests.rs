use bytes::Bytes;
use serde_json::Value;

use super::*;
use crate::engine_api::SseFilter;

/// Returns events that vLLM sent with token ids.
fn recorded(case: &str) -> String {
    let find = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        (line["case"] == case).then(|| line["body"].as_str().unwrap().to_owned())
    };
    include_str!("../../../testdata/vllm_token_ids.jsonl").lines().find_map(find).expect("a recorded case")
}

fn events(stream: &str) -> Vec<&str> {
    stream.split_inclusive("\n\n").collect()
}

fn payloads(stream: &str) -> Vec<Value> {
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn text(stream: &str) -> String {
    let choices = payloads(stream).into_iter().filter_map(|event| event["choices"].get(0).cloned());
    let said = |choice: Value| {
        [&choice["text"], &choice["delta"]["content"]].into_iter().find_map(|text| text.as_str().map(str::to_owned))
    };
    choices.filter_map(said).collect()
}

fn resumable_scanner(api: Api, visibility: ClientTokenIdVisibility, telling: TextTiming) -> SseFilter {
    SseFilter::new().with_transcript(TokenTranscript::new(api, visibility, telling))
}

/// Returns what is forwarded of these events.
fn forward(scanner: &mut SseFilter, events: &[&str]) -> String {
    let mut out = Vec::new();
    events.iter().for_each(|event| scanner.push(Bytes::copy_from_slice(event.as_bytes()), &mut out).unwrap());
    out.extend(scanner.finish());
    String::from_utf8(out.concat()).unwrap()
}

/// An event of `/v1/completions`.
fn event(text: &str, ids: &[u32]) -> String {
    let choice = serde_json::json!({"index": 0, "text": text, "finish_reason": null, "stop_reason": null, "prompt_token_ids": [7, 8], "token_ids": ids});
    format!("data: {}\n\n", serde_json::json!({"id": "c", "created": 5, "model": "m", "choices": [choice]}))
}

#[test]
fn unrequested_token_ids_are_hidden_from_the_client() {
    for (case, api, prompt) in [("completion", Api::Completions, 7), ("chat", Api::Chat, 19)] {
        let stream = recorded(case);
        let mut scanner = resumable_scanner(api, ClientTokenIdVisibility::None, TextTiming::WithIds);
        let out = forward(&mut scanner, &[&stream]);
        let mut expected = stream.clone();
        while let Some(at) = expected.find("token_ids\":[") {
            let from = at + "token_ids\":".len();
            let to = from + expected[from..].find(']').unwrap() + 1;
            expected.replace_range(from..to, "null");
        }
        assert_eq!(out, expected, "{case}");
        let usage = TokenUsage { prompt: Tokens(prompt), completion: Tokens(12), cached: None };
        assert_eq!(scanner.transcript().unwrap().usage(), Some(usage), "{case}");
        assert_eq!(
            forward(&mut resumable_scanner(api, ClientTokenIdVisibility::All, TextTiming::WithIds), &[&stream]),
            stream
        );
    }
}

#[test]
fn completion_resumes_after_its_last_whole_character() {
    let (stream, rest) = (recorded("completion"), recorded("completion goes on after 6"));
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds);
    // The seventh event has an id whose character is incomplete.
    let mut out = forward(&mut scanner, &events(&stream)[..7]);
    let (prompt, said) = scanner.transcript().unwrap().resume_ids().unwrap().unwrap();
    assert_eq!((prompt.len(), said), (7, &[1810, 120, 420, 1200, 1934, 1662][..]));
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&rest]);
    assert_eq!(text(&out), text(&stream));
    assert!(!out.contains("token_ids\":["), "{out}");
    let (all, whole) = (payloads(&out), payloads(&stream));
    for field in ["id", "created", "model", "object"] {
        assert!(all.iter().all(|event| event[field] == whole[0][field]), "{field}");
    }
    let told: Vec<_> = all.iter().filter(|event| event["usage"].is_object()).collect();
    assert_eq!(told.len(), 1, "one usage");
    assert_eq!(["prompt_tokens", "completion_tokens", "total_tokens"].map(|name| &told[0]["usage"][name]), [7, 12, 19]);
    assert_eq!(out.matches("[DONE]").count(), 1);
    assert_eq!(scanner.facts().usage.unwrap().completion, Tokens(12));
    assert_eq!(all[all.len() - 2]["choices"][0]["finish_reason"], "length");
}

#[test]
fn chat_resumes_after_the_ids_whose_text_was_delivered() {
    let (stream, rest) = (recorded("chat"), recorded("chat goes on after 7"));
    let mut scanner = resumable_scanner(Api::Chat, ClientTokenIdVisibility::None, TextTiming::WithIds);
    let mut out = forward(&mut scanner, &events(&stream)[..2]);
    assert_eq!(
        scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1,
        [0_u32; 0],
        "seven at once: the last may be half a character"
    );
    let delivered = text(&out);
    scanner.settle_text(|ids| (ids.len() == 7).then(|| delivered.clone()));
    assert_eq!(scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1.len(), 7);
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&rest]);
    assert_eq!(text(&out), text(&stream));
    let all = payloads(&out);
    assert!(all.iter().all(|event| event["object"] == "chat.completion.chunk"));
    let roles = all.iter().filter(|event| event["choices"][0]["delta"]["role"].is_string()).count();
    assert_eq!((roles, &all.last().unwrap()["usage"]["completion_tokens"]), (1, &Value::from(12)));
}

#[test]
fn resuming_within_a_character_echoes_the_prompt() {
    let text = text(&recorded("chat goes on within a character"));
    assert!(text.starts_with("user\nitem 0 is about caches"), "why only whole characters are gone on after: {text}");
}

#[test]
fn unsettled_text_is_regenerated_and_not_delivered_again() {
    for cut in [["a", "b", "cd"], ["ab", "", "cd"], ["abc", "d", ""]] {
        let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds);
        let mut out = forward(&mut scanner, &[&event("x", &[1]), &event("abc", &[2, 3, 4])]);
        assert_eq!(scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1, [1]);
        scanner.switch_engine();
        out += &forward(&mut scanner, &[&event(cut[0], &[2]), &event(cut[1], &[3]), &event(cut[2], &[4])]);
        assert_eq!(text(&out), "xabcd", "{cut:?}");
        assert_eq!(scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1.first(), Some(&1));
    }
}

#[test]
fn answer_may_break_again_during_regeneration() {
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds);
    let mut out = forward(&mut scanner, &[&event("abcd", &[1, 2, 3, 4])]);
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&event("ab", &[1])]);
    assert_eq!(scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1, [1]);
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&event("c", &[3]), &event("de", &[4])]);
    assert_eq!(text(&out), "abcde");
    assert_eq!(scanner.transcript().unwrap().usage().unwrap().completion, Tokens(3));
}

#[test]
fn diverging_regeneration_is_not_resumed() {
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::AfterIds);
    let mut out = forward(&mut scanner, &[&event("a", &[1]), &event("b", &[2])]);
    assert_eq!(
        scanner.transcript().unwrap().resume_ids().unwrap().unwrap().1,
        [0_u32; 0],
        "text may be behind its ids"
    );
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&event("a", &[1]), &event("x", &[9])]);
    assert_eq!(
        (text(&out).as_str(), scanner.transcript().unwrap().resume_ids()),
        ("ab", Err(ContinuationBlocker::Diverged))
    );
    assert_eq!(scanner.closing_events(), None);
}

#[test]
fn client_that_requested_ids_receives_each_once() {
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::All, TextTiming::WithIds);
    let mut out = forward(&mut scanner, &[&event("a", &[1]), &event("", &[2])]);
    scanner.switch_engine();
    out += &forward(&mut scanner, &[&event("", &[2]), &event("b", &[3])]);
    let ids = payloads(&out).into_iter().flat_map(|event| event["choices"][0]["token_ids"].as_array().unwrap().clone());
    assert_eq!((text(&out).as_str(), ids.collect::<Vec<_>>()), ("ab", vec![1.into(), 2.into(), 3.into()]));
}

#[test]
fn parsed_output_and_missing_ids_are_not_resumable() {
    let chat = |delta: &str, ids: &str| {
        format!(
            "data: {{\"id\":\"c\",\"created\":5,\"model\":\"m\",\"choices\":[{{\"delta\":{delta},\"token_ids\":{ids}}}],\"prompt_token_ids\":[1]}}\n\n"
        )
    };
    for (delta, ids, lost) in [
        (r#"{"reasoning":"hm"}"#, "[1]", ContinuationBlocker::ParsedOutput),
        (r#"{"tool_calls":[{"index":0}]}"#, "[1]", ContinuationBlocker::ParsedOutput),
        (r#"{"content":"a"}"#, "null", ContinuationBlocker::NoIds),
    ] {
        let mut scanner = resumable_scanner(Api::Chat, ClientTokenIdVisibility::None, TextTiming::WithIds);
        forward(&mut scanner, &[&chat(delta, ids)]);
        assert_eq!(scanner.transcript().unwrap().resume_ids(), Err(lost), "{delta}");
    }
    let mut scanner = resumable_scanner(Api::Chat, ClientTokenIdVisibility::None, TextTiming::WithIds);
    forward(&mut scanner, &["data: {\"cut"]);
    assert_eq!(scanner.transcript().unwrap().resume_ids(), Ok(None), "nothing was told: all can be asked for anew");
}

#[test]
fn an_answer_that_cannot_resume_still_hides_token_ids() {
    let chat = |ids: &str| {
        format!(
            "data: {{\"id\":\"c\",\"created\":5,\"model\":\"m\",\"choices\":[{{\"delta\":{{\"content\":\"a\"}}{ids}}}]}}\n\n"
        )
    };
    let (plain, named) = (chat(""), chat(",\"token_ids\":[7]"));
    for (visibility, shown) in [(ClientTokenIdVisibility::None, false), (ClientTokenIdVisibility::All, true)] {
        let mut scanner = resumable_scanner(Api::Chat, visibility, TextTiming::WithIds);
        assert_eq!(forward(&mut scanner, &[&plain]), plain);
        assert_eq!(scanner.transcript().unwrap().resume_ids(), Err(ContinuationBlocker::NoIds));
        let out = forward(&mut scanner, &[&named, &plain]);
        assert_eq!((text(&out).as_str(), out.contains("[7]")), ("aa", shown), "{out}");
        assert!(out.ends_with(&plain), "{out}");
        assert_eq!(scanner.facts().outputs, 3);
    }
}

#[test]
fn engine_errors_are_withheld_and_client_errors_forwarded() {
    let failed = |code: u16| format!("data: {{\"error\":{{\"message\":\"no\",\"code\":{code}}}}}\n\n");
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds);
    let out = forward(&mut scanner, &[&event("a", &[1]), &failed(500), "data: [DONE]\n\n"]);
    assert_eq!((text(&out).as_str(), out.contains("error"), out.contains("DONE")), ("a", false, false));
    assert_eq!(scanner.failure().unwrap(), failed(500).as_bytes());
    scanner.switch_engine();
    assert!(scanner.failure().is_none() && !scanner.facts().ended());
    let out = forward(
        &mut resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds),
        &[&failed(400), "data: [DONE]\n\n"],
    );
    assert_eq!(out, failed(400) + "data: [DONE]\n\n");
}

#[test]
fn answer_that_lacks_only_its_end_is_closed_locally() {
    let stream = recorded("completion");
    let events = events(&stream);
    let mut scanner = resumable_scanner(Api::Completions, ClientTokenIdVisibility::None, TextTiming::WithIds);
    forward(&mut scanner, &events[..11]);
    assert_eq!(scanner.closing_events(), None, "the last word is missing");
    forward(&mut scanner, &events[11..12]);
    let end = String::from_utf8(scanner.closing_events().unwrap().to_vec()).unwrap();
    assert_eq!(payloads(&end)[0]["usage"]["completion_tokens"], 12);
    assert!(end.ends_with("data: [DONE]\n\n"));
    forward(&mut scanner, &events[12..13]);
    assert_eq!(scanner.closing_events().unwrap(), "data: [DONE]\n\n");
    forward(&mut scanner, &events[13..]);
    assert_eq!(scanner.closing_events(), None, "it was told");
}
