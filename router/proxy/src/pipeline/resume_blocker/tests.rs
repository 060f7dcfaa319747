use serde_json::{Value, json};
use workers_shim::engine_api::ScannedJson;

use crate::receipt::{AttemptEvent, RequestOutcome};
use crate::testing::{StubWorker, TestRouter, post, start_router, wait_until};

const CHAT: &str = "/v1/chat/completions";

fn event(choices: Value, more: Value) -> String {
    let mut event = json!({"id": "c", "object": "o", "created": 1, "model": "tiny", "choices": choices});
    event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    format!("data: {event}\n\n")
}

/// The beginning of a chat answer: two tokens, of which the second ends inside a character.
fn partial_answer() -> String {
    event(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]), json!({"prompt_token_ids": [1, 2, 3]}))
        + &event(json!([{"index": 0, "delta": {"content": "a"}, "token_ids": [10]}]), json!({}))
        + &event(json!([{"index": 0, "delta": {"content": ""}, "token_ids": [11]}]), json!({}))
}

/// The whole answer, as a completion: without a tokenizer no part of a chat is known to be complete.
fn whole_completion() -> String {
    let choice = |text: &str, ids: &[u32], finish: Value| json!([{"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}]);
    event(choice("a", &[10], Value::Null), json!({}))
        + &event(choice("", &[11], Value::Null), json!({}))
        + &event(choice("é", &[12], "stop".into()), json!({}))
        + &event(json!([]), json!({"usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}}))
        + "data: [DONE]\n\n"
}

async fn two_workers() -> (std::sync::Arc<StubWorker>, std::sync::Arc<StubWorker>, TestRouter) {
    let (one, two) = (StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await);
    let router = start_router(&[&one, &two], &[]).await;
    wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
    (one, two, router)
}

fn broken_count(router: &TestRouter, outcome: &str) -> u64 {
    router.gateway.metrics.requests.broken_streams.with_label_values(&[outcome]).get()
}

async fn stream(router: &TestRouter, path: &str, more: Value) -> String {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "prompt": "q", "input": "q", "stream": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    String::from_utf8(post(router.proxy_address(), path, body.to_string()).await.body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_broken_chat_resumes_on_another_worker_seamlessly() {
    let (one, two, router) = two_workers().await;
    for wants_usage in [false, true] {
        let options = json!({"include_usage": wants_usage});
        let more = json!({"behave": "die in chat", "before": partial_answer(), "then": whole_completion(), "stream_options": options, "max_tokens": 9, "seed": 5});
        let told = stream(&router, CHAT, more).await;
        let payloads: Vec<Value> =
            told.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
        let text: String =
            payloads.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((text.as_str(), told.matches("[DONE]").count()), ("aé", 1), "{told}");
        let usage: Vec<_> = payloads.iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
        assert_eq!(usage, if wants_usage { vec![3] } else { vec![] });
        assert!(!told.contains("token_ids\":["), "{told}");
        let receipt = router.gateway.decisions.receipts.newest(1, |_| true).remove(0);
        let seen = receipt.observed.unwrap();
        assert_eq!((seen.outcome, seen.http_status, seen.output_tokens.unwrap().0), (RequestOutcome::Complete, 200, 3));
        let [first, last] = &receipt.attempts[..] else { panic!("two attempts") };
        assert_eq!((&first.events[..], first.resume), (&[AttemptEvent::StreamInterrupted][..], None));
        assert_eq!((last.resume.unwrap().kept_tokens.0, first.target() == last.target()), (0, false));
        let asked = [&one, &two].map(|worker| worker.requests()).concat();
        let rest: Value =
            serde_json::from_slice(&asked.iter().find(|seen| seen.path == "/v1/completions").unwrap().body).unwrap();
        assert_eq!((&rest["prompt"], &rest["max_tokens"], &rest["seed"]), (&json!([1, 2, 3]), &json!(9), &json!(5)));
        assert!(rest.get("messages").is_none());
    }
    assert_eq!((broken_count(&router, "resumed"), broken_count(&router, "failed")), (2, 0));
}

#[tokio::test]
async fn an_answer_broken_before_its_first_token_is_retried() {
    let (one, two, router) = two_workers().await;
    let told = stream(&router, CHAT, json!({"behave": "die", "before": "data: {\"cut\""})).await;
    assert!(told.contains("no other one could go on with it") && !told.contains("cut"), "{told}");
    assert_eq!((one.requests().len(), two.requests().len()), (1, 1));
    assert_eq!(one.last_request().body, two.last_request().body);
    assert_eq!(
        broken_count(&router, "resumed") + broken_count(&router, "failed"),
        2,
        "the second one began, and broke off too"
    );
}

#[tokio::test]
async fn an_answer_that_cannot_resume_reports_why_and_is_not_retried() {
    let (one, two, router) = two_workers().await;
    let tool = json!([{"type": "function", "function": {"name": "look"}}]);
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]);
    let parsed = event(json!([{"delta": {"reasoning": "hm"}, "token_ids": [1]}]), json!({"prompt_token_ids": [1]}));
    let bare = event(json!([{"delta": {"content": "a"}}]), json!({}));
    let message = [
        json!({"type": "message_start", "message": {"id": "m"}}),
        json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text"}}),
        json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}),
    ];
    let message = message.map(|event| format!("data: {event}\n\n")).concat();
    let asked = [
        (CHAT, json!({"n": 2}), "several choices"),
        ("/v1/completions", json!({"prompt": ["a", "b"]}), "several choices"),
        (CHAT, json!({"logprobs": true}), "log probabilities"),
        ("/v1/completions", json!({"echo": true}), "echo"),
        (CHAT, json!({"response_format": {"type": "json_schema"}}), "format"),
        (CHAT, json!({"structured_outputs": {"regex": "a"}}), "format"),
        (CHAT, json!({"frequency_penalty": 0.5}), "penalties"),
        (CHAT, json!({"tools": tool}), "tools"),
        (CHAT, json!({"messages": image}), "more than text"),
        ("/v1/messages", json!({"max_tokens": 4, "before": message}), "endpoint"),
        ("/v1/responses", json!({"tools": [{"type": "web_search"}]}), "runs its tools"),
        ("/v1/responses", json!({"conversation": "conv_1"}), "keeps it"),
        (CHAT, json!({"before": parsed}), "thoughts or tool calls"),
        (CHAT, json!({"before": bare}), "no token ids"),
        (CHAT, json!({"include_reasoning": false}), "leaves thoughts out"),
        ("/v1/completions", json!({"stop": ["x"], "include_stop_str_in_output": true}), "stop texts"),
    ];
    for (number, (path, more, why)) in asked.iter().enumerate() {
        let mut all = json!({"behave": "die", "before": partial_answer()});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let told = stream(&router, path, all).await;
        assert!(told.contains("cannot go on elsewhere because") && told.contains(why), "{why}: {told}");
        assert_eq!(
            told.contains("drawn without a seed"),
            !why.contains("keeps") && !why.contains("runs"),
            "{why}: {told}"
        );
        assert_eq!(one.requests().len() + two.requests().len(), number + 1, "{why}");
        assert_eq!(broken_count(&router, "not_resumable"), number as u64 + 1, "{why}");
    }
    let nothing = json!({"behave": "die in chat", "before": partial_answer(), "then": whole_completion(), "tools": tool, "tool_choice": "none", "response_format": {"type": "text"},
        "logprobs": false, "top_logprobs": 0, "presence_penalty": 0.0, "n": 1, "stop": []});
    assert!(!stream(&router, CHAT, nothing).await.contains("error"), "what is said and means nothing bars nothing");
}

/// Chat events of a tool call, from an engine that gives its answer this id.
fn tool_call_events(name: &str, arguments: &[&str]) -> String {
    let delta = |delta: Value, finish: Value| {
        let choices = json!([{"index": 0, "delta": delta, "finish_reason": finish}]);
        event(choices, json!({"id": name}))
    };
    let call = json!({"index": 0, "id": name, "type": "function", "function": {"name": "look", "arguments": ""}});
    let part = |text: &&str| delta(json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]}), Value::Null);
    delta(json!({"role": "assistant", "tool_calls": [call]}), Value::Null)
        + &arguments.iter().map(part).collect::<String>()
        + &delta(json!({}), "tool_calls".into())
        + &event(
            json!([]),
            json!({"id": name, "usage": {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}}),
        )
        + "data: [DONE]\n\n"
}

/// Returns the first events of a stream.
fn first_events(stream: &str, events: usize) -> String {
    stream.split_inclusive("\n\n").take(events).collect()
}

#[tokio::test]
async fn a_deterministic_answer_is_replayed_and_continues() {
    let (one, two, router) = two_workers().await;
    let begun = first_events(&tool_call_events("one", &["{\"a\"", ":1}"]), 2);
    let same = tool_call_events("two", &["{", "\"a\":", "1}"]);
    for more in [json!({"temperature": 0}), json!({"seed": 7}), json!({"temperature": 0.5, "top_k": 1})] {
        let mut all =
            json!({"behave": "die once", "before": begun, "then": same, "tools": [{"type": "function"}], "n": 1});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let asked = one.requests().len() + two.requests().len();
        let told = stream(&router, CHAT, all).await;
        let payloads: Vec<Value> =
            told.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
        let deltas =
            payloads.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]);
        let arguments: String = deltas.filter_map(Value::as_str).collect();
        assert_eq!((arguments.as_str(), told.matches("[DONE]").count()), ("{\"a\":1}", 1), "{told}");
        assert!(!told.contains("two") && told.matches("\"look\"").count() == 1, "{told}");
        assert_eq!(one.requests().len() + two.requests().len(), asked + 2);
        assert_eq!(one.last_request().body, two.last_request().body);
        let receipt = router.gateway.decisions.receipts.newest(1, |_| true).remove(0);
        let seen = receipt.observed.unwrap();
        assert_eq!((seen.outcome, seen.output_tokens.unwrap().0), (RequestOutcome::Complete, 7));
    }
    assert_eq!((broken_count(&router, "resumed"), broken_count(&router, "not_resumable")), (3, 0));
}

#[tokio::test]
async fn a_replayed_answer_that_differs_ends_with_an_error() {
    let (_one, _two, router) = two_workers().await;
    let begun = first_events(&tool_call_events("one", &["{\"a\"", ":1}"]), 3);
    let other = tool_call_events("two", &["{\"b\"", ":1}"]);
    let more = json!({"behave": "die once", "before": begun, "then": other, "tools": [{"type": "function"}], "temperature": 0});
    let told = stream(&router, CHAT, more).await;
    assert!(told.contains("another worker went on differently") && !told.contains("[DONE]"), "{told}");
    assert!(!told.contains("\"b\"") && !told.contains("two"), "{told}");
}

#[tokio::test]
async fn a_sampled_answer_is_retried_while_no_token_was_delivered() {
    let (_one, _two, router) = two_workers().await;
    let whole = tool_call_events("one", &["{}"]);
    let only_role = event(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]), json!({"id": "one"}));
    let more = json!({"behave": "die once", "before": only_role, "then": whole, "tools": [{"type": "function"}]});
    let told = stream(&router, CHAT, more).await;
    assert!(told.contains("[DONE]") && told.matches("\"role\"").count() == 1 && told.contains("{}"), "{told}");
}

#[tokio::test]
async fn streams_that_must_not_resume_end_with_an_error() {
    let (one, two) = (StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await);
    for (setting, why) in [("resume.enabled=false", "switched off"), ("resume.max_prompt_tokens=0", "too long")] {
        let router = start_router(&[&one, &two], &[setting]).await;
        wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
        let asked = one.requests().len() + two.requests().len();
        let told = stream(
            &router,
            CHAT,
            json!({"behave": "die once", "before": partial_answer(), "then": whole_completion()}),
        )
        .await;
        assert!(told.contains(why), "{told}");
        assert_eq!(one.requests().len() + two.requests().len(), asked + 1);
    }
}

#[test]
fn null_false_zero_and_empty_values_count_as_unset() {
    let is_on = |value: &str| {
        let body = format!(r#"{{"a": {value} , "b": 1}}"#);
        super::is_on(&ScannedJson::scan(body.into(), &[]).unwrap(), "a")
    };
    for unset in ["null", "false", "0", "-0.0", "0e5", r#""""#, "[]", "[ \n]", "{}", "{\t}"] {
        assert!(!is_on(unset), "{unset}");
    }
    for set in ["true", "1", "0.5", "-1", r#""0""#, "[0]", "[ null ]", r#"{ "a": null}"#] {
        assert!(is_on(set), "{set}");
    }
    assert!(!super::is_on(&ScannedJson::scan("{}".into(), &[]).unwrap(), "a"));
}
