use bytes::Bytes;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::buffer::MAX_BUFFERED_BYTES;
use super::*;
use crate::engine_api::SseFilter;

mod after_end;

const ANSWER: &str = "Là-bas, it says: çà et là 42";
const THOUGHT: &str = "Hm… let me see";
const ARGUMENTS: &str = r#"{"city":"Zürich","days":3}"#;

/// Splits text into fragments of `size` characters.
fn pieces(text: &str, size: usize) -> Vec<String> {
    let all: Vec<char> = text.chars().collect();
    all.chunks(size).map(|piece| piece.iter().collect()).collect()
}

fn data(event: Value) -> String {
    match event["type"].as_str() {
        Some(kind) => format!("event: {kind}\ndata: {event}\n\n"),
        None => format!("data: {event}\n\n"),
    }
}

/// Events of a chat with two choices, reasoning, text and two tool calls, in fragments of `size`; `name` is part of
/// every generated id.
fn chat(name: &str, size: usize) -> Vec<String> {
    let event = |choices: Value| {
        data(json!({"id": name, "object": "chat.completion.chunk", "created": size, "model": "m", "choices": choices}))
    };
    let mut all = Vec::new();
    for at in 0..2 {
        let mut delta = |delta: Value, more: Value| {
            let mut choice = json!({"index": at, "delta": delta, "logprobs": null, "finish_reason": null});
            choice.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            all.push(event(json!([choice])));
        };
        delta(json!({"role": "assistant", "content": ""}), json!({}));
        for piece in pieces(THOUGHT, size) {
            delta(json!({"reasoning_content": piece}), json!({}));
        }
        for piece in pieces(ANSWER, size) {
            let tokens: Vec<_> =
                piece.chars().map(|token| json!({"token": token.to_string(), "logprob": -0.1 * size as f64})).collect();
            delta(json!({"content": piece}), json!({"logprobs": {"content": tokens}}));
        }
        for tool in 0..2 {
            let call = json!({"index": tool, "id": format!("{name}-{at}-{tool}"), "type": "function", "function": {"name": "look", "arguments": ""}});
            delta(json!({"tool_calls": [call]}), json!({}));
            for piece in pieces(ARGUMENTS, size) {
                delta(json!({"tool_calls": [{"index": tool, "function": {"arguments": piece}}]}), json!({}));
            }
        }
        delta(json!({}), json!({"finish_reason": "tool_calls"}));
    }
    all.push(data(json!({"id": name, "created": size, "model": "m", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 40}})));
    all.push("data: [DONE]\n\n".into());
    all
}

/// Events of a completion of two prompts with log probabilities and token ids.
fn completion(name: &str, size: usize) -> Vec<String> {
    let event = |choices: Value| {
        data(json!({"id": name, "object": "text_completion", "created": size, "model": "m", "choices": choices}))
    };
    let mut all = Vec::new();
    for at in 0..2 {
        for piece in pieces(ANSWER, size) {
            let tokens: Vec<_> = piece.chars().map(String::from).collect();
            let ids: Vec<_> = piece.chars().map(u32::from).collect();
            let chances = vec![-0.1 * size as f64; tokens.len()];
            all.push(event(json!([{"index": at, "text": piece, "finish_reason": null, "token_ids": ids,
                "logprobs": {"tokens": tokens, "token_logprobs": chances}}])));
        }
        all.push(event(json!([{"index": at, "text": "", "finish_reason": "stop", "logprobs": null}])));
    }
    all.push("data: [DONE]\n\n".into());
    all
}

/// Events of a message with a thinking block, text and a tool's input.
fn message(name: &str, size: usize) -> Vec<String> {
    let mut all = vec![json!({"type": "message_start", "message": {"id": name, "usage": {"input_tokens": 3}}})];
    let blocks = [
        (json!({"type": "thinking", "thinking": ""}), "thinking", THOUGHT),
        (json!({"type": "text", "text": ""}), "text", ANSWER),
        (
            json!({"type": "tool_use", "id": format!("toolu_{name}"), "name": "look", "input": {}}),
            "partial_json",
            ARGUMENTS,
        ),
    ];
    for (at, (block, field, text)) in (0..).zip(blocks) {
        all.push(json!({"type": "content_block_start", "index": at, "content_block": block}));
        for piece in pieces(text, size) {
            all.push(json!({"type": "content_block_delta", "index": at, "delta": {"type": format!("{field}_delta"), field: piece}}));
        }
        if at == 0 {
            all.push(json!({"type": "content_block_delta", "index": at, "delta": {"type": "signature_delta", "signature": format!("sig_{name}")}}));
        }
        all.push(json!({"type": "content_block_stop", "index": at}));
    }
    all.push(json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}}));
    all.push(json!({"type": "message_stop"}));
    all.into_iter().map(data).collect()
}

/// Events of a response with a message and a function call.
fn response(name: &str, size: usize) -> Vec<String> {
    let whole = |output: Value| json!({"id": name, "created_at": size, "model": "m", "output": output});
    let mut all = vec![
        json!({"type": "response.created", "response": whole(json!([]))}),
        json!({"type": "response.in_progress", "response": whole(json!([]))}),
    ];
    let (said, called) = (format!("msg_{name}"), format!("fc_{name}"));
    all.push(json!({"type": "response.output_item.added", "output_index": 0, "item": {"type": "message", "id": said}}));
    let inside = |kind: &str, more: Value| {
        let mut event = json!({"type": kind, "item_id": said, "output_index": 0, "content_index": 0});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        event
    };
    all.push(inside("response.content_part.added", json!({"part": {"type": "output_text", "text": ""}})));
    for piece in pieces(ANSWER, size) {
        let tokens: Vec<_> =
            piece.chars().map(|token| json!({"token": token.to_string(), "logprob": 0.1 * size as f64})).collect();
        all.push(inside("response.output_text.delta", json!({"delta": piece, "logprobs": tokens})));
    }
    all.push(inside("response.output_text.done", json!({"text": ANSWER})));
    all.push(inside("response.content_part.done", json!({"part": {"type": "output_text", "text": ANSWER}})));
    let message = json!({"type": "message", "id": said, "content": [{"text": ANSWER}]});
    all.push(json!({"type": "response.output_item.done", "output_index": 0, "item": message}));
    let call = |arguments: &str| json!({"type": "function_call", "id": called, "call_id": format!("call_{name}"), "name": "look", "arguments": arguments});
    all.push(json!({"type": "response.output_item.added", "output_index": 1, "item": call("")}));
    for piece in pieces(ARGUMENTS, size) {
        all.push(json!({"type": "response.function_call_arguments.delta", "item_id": called, "output_index": 1, "delta": piece}));
    }
    all.push(json!({"type": "response.function_call_arguments.done", "item_id": called, "output_index": 1, "arguments": ARGUMENTS}));
    all.push(json!({"type": "response.output_item.done", "output_index": 1, "item": call(ARGUMENTS)}));
    all.push(json!({"type": "response.completed", "response": whole(json!([message, call(ARGUMENTS)]))}));
    let numbered = all.into_iter().zip(0..).map(|(mut event, number)| {
        event["sequence_number"] = number.into();
        data(event)
    });
    numbered.collect()
}

/// Merges a delta into the accumulated answer: texts and lists are appended, objects merged.
fn merge_delta(told: &mut Value, delta: &Value) {
    match (told, delta) {
        (told, delta) if told.is_null() => *told = delta.clone(),
        (Value::String(told), Value::String(more)) => told.push_str(more),
        (Value::Array(told), Value::Array(more)) if more.iter().any(|item| item["index"].is_u64()) => {
            for item in more {
                match told.iter_mut().find(|known| known["index"] == item["index"]) {
                    Some(known) => merge_delta(known, item),
                    None => told.push(item.clone()),
                }
            }
        }
        (Value::Array(told), Value::Array(more)) => told.extend(more.iter().cloned()),
        (Value::Object(told), Value::Object(more)) => {
            for (name, value) in more {
                match told.get_mut(name) {
                    Some(known) => merge_delta(known, value),
                    None => drop(told.insert(name.clone(), value.clone())),
                }
            }
        }
        // A difference here means that something was forwarded twice.
        (Value::Number(told), Value::Number(more)) => assert_eq!(told, more),
        _ => {}
    }
}

fn without_numbers(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("logprob");
            fields.remove("token_logprobs");
            fields.values_mut().for_each(without_numbers);
        }
        Value::Array(items) => items.iter_mut().for_each(without_numbers),
        _ => {}
    }
}

/// Assembles a stream as a client does: events in order, consecutive deltas merged.
fn assemble_stream(stream: &str) -> Vec<Value> {
    let mut all: Vec<Value> = Vec::new();
    for line in stream.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let mut event = serde_json::from_str(line).unwrap_or_else(|_| json!(line));
        without_numbers(&mut event);
        let is_delta = |event: &Value| {
            event["delta"].is_string()
                || event["type"] == "content_block_delta" && event["delta"]["signature"].is_null()
        };
        let kind = |event: &Value| (event["type"].clone(), event["index"].clone(), event["output_index"].clone());
        match all.last_mut() {
            Some(last) if event["choices"][0].is_object() && last["choices"][0].is_object() => {
                for name in ["id", "created", "model"] {
                    assert_eq!(last[name], event[name]);
                }
                merge_delta(&mut last["choices"], &event["choices"]);
            }
            Some(last) if is_delta(&event) && is_delta(last) && kind(last) == kind(&event) => {
                let (told, more) = (&mut last["delta"], &event["delta"]);
                let kind = more["type"].clone();
                merge_delta(told, more);
                if told.is_object() {
                    told["type"] = kind;
                }
                merge_delta(&mut last["logprobs"], &event["logprobs"]);
            }
            _ => all.push(event),
        }
    }
    all
}

/// Removes the event numbers, which depend on how an answer is split.
fn numbers(events: &mut [Value]) {
    events.iter_mut().filter_map(Value::as_object_mut).for_each(|event| drop(event.remove("sequence_number")));
}

fn forward(scanner: &mut SseFilter, events: &[String]) -> String {
    let mut out = Vec::new();
    scanner.push(Bytes::from(events.concat()), &mut out).unwrap();
    String::from_utf8(out.concat()).unwrap()
}

type AnswerStreamBuilder = fn(&str, usize) -> Vec<String>;
const ALL: [(Api, AnswerStreamBuilder); 4] =
    [(Api::Chat, chat), (Api::Completions, completion), (Api::Messages, message), (Api::Responses, response)];

fn replaying_scanner(api: Api, visibility: ClientTokenIdVisibility, repeats: AnswerDeterminism) -> SseFilter {
    SseFilter::new().with_replay_verifier(ReplayVerifier::new(api, visibility, repeats))
}

#[test]
fn replayed_answer_is_delivered_once_wherever_the_first_broke_off() {
    for (api, make) in ALL {
        let first = make("one", 3);
        let expected = assemble_stream(&first.concat());
        for cut in 0..first.len() {
            let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
            let begun = forward(&mut scanner, &first[..cut]);
            assert_eq!(begun, first[..cut].concat(), "{api:?}");
            assert_eq!(scanner.resume_ids(), Ok(None));
            scanner.switch_engine();
            // The second engine splits and names its events differently; the same events would test nothing.
            let size = if cut == 0 { 3 } else { 1 + cut % 5 };
            let told = begun + &forward(&mut scanner, &make(if cut == 0 { "one" } else { "two" }, size));
            assert_same_ids(&told);
            let (mut made, mut expected) = (assemble_stream(&told.replace("two", "one")), expected.clone());
            numbers(&mut made);
            numbers(&mut expected);
            assert_eq!(made, expected, "{api:?} {cut}");
            assert!(scanner.facts().done && !told.contains("\"two\""), "{api:?} {cut}: {told}");
        }
    }
}

/// Asserts that no id of the first engine changes later in the stream.
fn assert_same_ids(told: &str) {
    let calls = ["-0-0", "-0-1", "-1-0", "-1-1"].map(|tail| ("", tail));
    for (start, end) in
        [("toolu_", ""), ("sig_", ""), ("msg_", ""), ("fc_", ""), ("call_", "")].into_iter().chain(calls)
    {
        let is_told = |name: &str| told.contains(&format!("\"{start}{name}{end}\""));
        assert!(!(is_told("one") && is_told("two")), "{start}{end}: {told}");
    }
}

#[test]
fn replayed_events_are_numbered_without_a_gap() {
    let first = response("one", 3);
    for cut in 1..first.len() {
        let mut scanner = replaying_scanner(Api::Responses, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        let begun = forward(&mut scanner, &first[..cut]);
        scanner.switch_engine();
        let told = begun + &forward(&mut scanner, &response("two", 1 + cut % 4));
        let payloads = told.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
        let numbers: Vec<_> = payloads.map(|event| event["sequence_number"].as_u64().unwrap()).collect();
        assert_eq!(numbers, (0..numbers.len() as u64).collect::<Vec<_>>(), "{cut}");
    }
}

#[test]
fn diverging_replay_stops_before_anything_of_it_is_delivered() {
    for (api, make) in ALL {
        let (first, other) = (make("one", 3), make("two", 2).concat());
        let at = first.len() - 3;
        let other = if api == Api::Completions { other.replace("et", "at") } else { other.replace("Z", "z") };
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &first[..at]);
        scanner.switch_engine();
        let rest = forward(&mut scanner, &[other]);
        assert!(scanner.has_diverged() && rest.is_empty(), "{api:?} {rest}");
    }
}

#[test]
fn replay_with_another_tool_diverges() {
    for (api, make) in [ALL[0], ALL[2], ALL[3]] {
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &make("one", 3));
        scanner.switch_engine();
        assert!(!scanner.has_diverged());
        forward(&mut scanner, &[make("two", 3).concat().replace("look", "find")]);
        assert!(scanner.has_diverged(), "{api:?}");
    }
}

/// Returns the first events of a generated answer up to the one that names a tool, and a complete one without tools.
fn events_naming_a_tool(make: fn(&str, usize) -> Vec<String>) -> (Vec<String>, Vec<String>) {
    let (first, second) = (make("one", 3), make("two", 3));
    let named = first.iter().position(|event| event.contains("look")).unwrap();
    let second = second
        .into_iter()
        .filter(|event| ["tool", "partial_json", "fc_", "response.completed"].iter().all(|word| !event.contains(word)));
    (first[..=named].to_vec(), second.collect())
}

#[test]
fn replay_without_the_named_tool_diverges() {
    for (api, make) in [ALL[0], ALL[2], ALL[3]] {
        let (first, second) = events_naming_a_tool(make);
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &first);
        scanner.switch_engine();
        let end = match api {
            Api::Chat => data(json!({"id": "two", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})),
            Api::Responses => data(json!({"type": "response.completed", "response": {"id": "two", "output": []}})),
            _ => data(json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})),
        };
        let rest = forward(&mut scanner, &[second, vec![end]].concat());
        assert!(scanner.has_diverged(), "{api:?} {rest}");
        assert!(["DONE", "message_stop", "completed"].iter().all(|end| !rest.contains(end)), "{rest}");
    }
}

#[test]
fn sampled_answer_is_not_replayed_after_naming_a_tool() {
    for (api, make) in [ALL[0], ALL[2], ALL[3]] {
        let named = make("one", 3).into_iter().find(|event| event.contains("look")).unwrap();
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::UntilFirstOutput);
        forward(&mut scanner, &[named]);
        assert_eq!(scanner.resume_ids(), Err(ContinuationBlocker::Sampled), "{api:?}");
    }
}

#[test]
fn unreadable_replay_events_are_not_forwarded() {
    for (api, make) in ALL {
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        forward(&mut scanner, &make("one", 3)[..3]);
        scanner.switch_engine();
        assert_eq!(forward(&mut scanner, &["data: {broken\n\n".to_owned()]), "", "{api:?}");
        assert!(scanner.has_diverged());
    }
}

#[test]
fn replay_that_ends_early_diverges() {
    for (api, make) in ALL {
        let (first, second) = (make("one", 3), make("two", 3));
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        let begun = forward(&mut scanner, &first[..first.len() - 1]);
        scanner.switch_engine();
        let dropped = second.len() - if api == Api::Completions { 3 } else { 4 };
        let short = [&second[..dropped], &second[dropped + 1..]].concat();
        let rest = forward(&mut scanner, &short);
        assert!(scanner.has_diverged(), "{api:?} {rest}");
        assert!(!rest.contains("DONE") && !rest.contains("_stop\"") && !rest.contains("completed"), "{begun}{rest}");
    }
}

#[test]
fn sampled_answer_is_replayed_only_before_its_first_output() {
    for (api, make) in ALL {
        let events = make("one", 3);
        let words = events.iter().position(|event| event.contains("Là") || event.contains("Hm")).unwrap();
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::UntilFirstOutput);
        forward(&mut scanner, &events[..words]);
        assert_eq!(scanner.resume_ids(), Ok(None), "{api:?}");
        assert_eq!(forward(&mut scanner, &events[words..]), events[words..].concat());
        assert_eq!(scanner.resume_ids(), Err(ContinuationBlocker::Sampled), "{api:?}");
    }
}

#[test]
fn replay_omits_token_ids_that_were_not_requested() {
    let mut scanner = replaying_scanner(Api::Completions, ClientTokenIdVisibility::None, AnswerDeterminism::Always);
    forward(&mut scanner, &completion("one", 3)[..2]);
    scanner.switch_engine();
    let rest = forward(&mut scanner, &completion("two", 2));
    assert!(rest.contains("token_ids\":null") && !rest.contains("token_ids\":["), "{rest}");
}

#[test]
fn answer_beyond_the_buffer_limit_is_not_replayed() {
    let long = |text: &str| {
        data(json!({"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, "delta": {"content": text}}]}))
    };
    let mut scanner = replaying_scanner(Api::Chat, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
    let (most, one) = (long(&"a".repeat(MAX_BUFFERED_BYTES - 500)), long(&"a".repeat(500)));
    assert_eq!(forward(&mut scanner, std::slice::from_ref(&most)), most);
    assert_eq!(scanner.resume_ids(), Ok(None));
    assert_eq!(forward(&mut scanner, std::slice::from_ref(&one)), one);
    assert_eq!(scanner.resume_ids(), Err(ContinuationBlocker::TooLong));
}

proptest! {
    #[test]
    fn first_attempt_forwards_any_json_unchanged(bytes in "[ -~]{0,40}", api in 0..4usize) {
        let (api, make) = ALL[api];
        let mut events = make("one", 2);
        events.insert(3, format!("data: {bytes}\n\n"));
        let mut scanner = replaying_scanner(api, ClientTokenIdVisibility::All, AnswerDeterminism::Always);
        prop_assert_eq!(forward(&mut scanner, &events), events.concat());
    }
}
