use serde_json::{Value, json};

use crate::pipeline::receipt::{Ending, Remark};
use crate::testing::{Front, Worker, front, post, until};

const CHAT: &str = "/v1/chat/completions";

fn event(choices: Value, more: Value) -> String {
    let mut event = json!({"id": "c", "object": "o", "created": 1, "model": "tiny", "choices": choices});
    event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    format!("data: {event}\n\n")
}

/// The beginning of a chat's answer: two tokens, of which the second one's character is not whole.
fn begun() -> String {
    event(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]), json!({"prompt_token_ids": [1, 2, 3]}))
        + &event(json!([{"index": 0, "delta": {"content": "a"}, "token_ids": [10]}]), json!({}))
        + &event(json!([{"index": 0, "delta": {"content": ""}, "token_ids": [11]}]), json!({}))
}

/// All of it, as a completion: without a tokenizer nothing of a chat is known to be whole.
fn rest() -> String {
    let choice = |text: &str, ids: &[u32], finish: Value| json!([{"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}]);
    event(choice("a", &[10], Value::Null), json!({}))
        + &event(choice("", &[11], Value::Null), json!({}))
        + &event(choice("é", &[12], "stop".into()), json!({}))
        + &event(json!([]), json!({"usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}}))
        + "data: [DONE]\n\n"
}

async fn two() -> (std::sync::Arc<Worker>, std::sync::Arc<Worker>, Front) {
    let (one, two) = (Worker::start("one", "tiny").await, Worker::start("two", "tiny").await);
    let front = front(&[&one, &two], &[]).await;
    until("both are ready", || front.gateway.roster.ready(front.gateway.fleet()).len() == 2).await;
    (one, two, front)
}

fn broken(front: &Front, outcome: &str) -> u64 {
    front.gateway.metrics.requests.broken.with_label_values(&[outcome]).get()
}

async fn stream(front: &Front, path: &str, more: Value) -> String {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "q"}], "prompt": "q", "input": "q", "stream": true});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    String::from_utf8(post(front.proxy_address(), path, body.to_string()).await.body.to_vec()).unwrap()
}

#[tokio::test]
async fn a_chat_that_breaks_off_goes_on_elsewhere_as_if_nothing_had_happened() {
    let (one, two, front) = two().await;
    for wants_usage in [false, true] {
        let options = json!({"include_usage": wants_usage});
        let more = json!({"behave": "die in chat", "before": begun(), "then": rest(), "stream_options": options, "max_tokens": 9, "seed": 5});
        let told = stream(&front, CHAT, more).await;
        let payloads: Vec<Value> =
            told.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
        let text: String =
            payloads.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!((text.as_str(), told.matches("[DONE]").count()), ("aé", 1), "{told}");
        let usage: Vec<_> = payloads.iter().filter_map(|event| event["usage"]["completion_tokens"].as_u64()).collect();
        assert_eq!(usage, if wants_usage { vec![3] } else { vec![] });
        assert!(!told.contains("token_ids\":["), "{told}");
        let receipt = front.gateway.decisions.receipts.newest(1, |_| true).remove(0);
        let seen = receipt.seen.unwrap();
        assert_eq!((seen.ending, seen.status, seen.answered.unwrap().0), (Ending::Complete, 200, 3));
        let [first, last] = &receipt.attempts[..] else { panic!("two attempts") };
        assert_eq!((&first.remarks[..], first.resumed), (&[Remark::BrokeOff][..], None));
        assert_eq!((last.resumed.unwrap().after.0, first.decode == last.decode), (0, false));
        let asked = [&one, &two].map(|worker| worker.seen()).concat();
        let rest: Value =
            serde_json::from_slice(&asked.iter().find(|seen| seen.path == "/v1/completions").unwrap().body).unwrap();
        assert_eq!((&rest["prompt"], &rest["max_tokens"], &rest["seed"]), (&json!([1, 2, 3]), &json!(9), &json!(5)));
        assert!(rest.get("messages").is_none());
    }
    assert_eq!((broken(&front, "resumed"), broken(&front, "failed")), (2, 0));
}

#[tokio::test]
async fn an_answer_of_which_nothing_was_told_is_asked_for_anew() {
    let (one, two, front) = two().await;
    let told = stream(&front, CHAT, json!({"behave": "die", "before": "data: {\"cut\""})).await;
    assert!(told.contains("no other one could go on with it") && !told.contains("cut"), "{told}");
    assert_eq!((one.seen().len(), two.seen().len()), (1, 1));
    assert_eq!(one.last().body, two.last().body);
    assert_eq!(broken(&front, "resumed") + broken(&front, "failed"), 2, "the second one began, and broke off too");
}

#[tokio::test]
async fn what_cannot_go_on_says_why_and_is_asked_of_nobody_else() {
    let (one, two, front) = two().await;
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
        let mut all = json!({"behave": "die", "before": begun()});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let told = stream(&front, path, all).await;
        assert!(told.contains("cannot go on elsewhere because") && told.contains(why), "{why}: {told}");
        assert_eq!(
            told.contains("drawn without a seed"),
            !why.contains("keeps") && !why.contains("runs"),
            "{why}: {told}"
        );
        assert_eq!(one.seen().len() + two.seen().len(), number + 1, "{why}");
        assert_eq!(broken(&front, "unresumable"), number as u64 + 1, "{why}");
    }
    let nothing = json!({"behave": "die in chat", "before": begun(), "then": rest(), "tools": tool, "tool_choice": "none", "response_format": {"type": "text"},
        "logprobs": false, "top_logprobs": 0, "presence_penalty": 0.0, "n": 1, "stop": []});
    assert!(!stream(&front, CHAT, nothing).await.contains("error"), "what is said and means nothing bars nothing");
}

/// Chat events of a call, as an engine that names its answer so tells it.
fn called(name: &str, arguments: &[&str]) -> String {
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

/// The first events of a stream.
fn first(stream: &str, events: usize) -> String {
    stream.split_inclusive("\n\n").take(events).collect()
}

#[tokio::test]
async fn what_comes_out_the_same_is_made_again_and_goes_on() {
    let (one, two, front) = two().await;
    let begun = first(&called("one", &["{\"a\"", ":1}"]), 2);
    let same = called("two", &["{", "\"a\":", "1}"]);
    for more in [json!({"temperature": 0}), json!({"seed": 7}), json!({"temperature": 0.5, "top_k": 1})] {
        let mut all =
            json!({"behave": "die once", "before": begun, "then": same, "tools": [{"type": "function"}], "n": 1});
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let asked = one.seen().len() + two.seen().len();
        let told = stream(&front, CHAT, all).await;
        let payloads: Vec<Value> =
            told.split("\n\n").filter_map(|event| serde_json::from_str(event.strip_prefix("data: ")?).ok()).collect();
        let deltas =
            payloads.iter().map(|event| &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]);
        let arguments: String = deltas.filter_map(Value::as_str).collect();
        assert_eq!((arguments.as_str(), told.matches("[DONE]").count()), ("{\"a\":1}", 1), "{told}");
        assert!(!told.contains("two") && told.matches("\"look\"").count() == 1, "{told}");
        assert_eq!(one.seen().len() + two.seen().len(), asked + 2);
        assert_eq!(one.last().body, two.last().body);
        let receipt = front.gateway.decisions.receipts.newest(1, |_| true).remove(0);
        let seen = receipt.seen.unwrap();
        assert_eq!((seen.ending, seen.answered.unwrap().0), (Ending::Complete, 7));
    }
    assert_eq!((broken(&front, "resumed"), broken(&front, "unresumable")), (3, 0));
}

#[tokio::test]
async fn what_comes_out_differently_ends_with_an_error() {
    let (_one, _two, front) = two().await;
    let begun = first(&called("one", &["{\"a\"", ":1}"]), 3);
    let other = called("two", &["{\"b\"", ":1}"]);
    let more = json!({"behave": "die once", "before": begun, "then": other, "tools": [{"type": "function"}], "temperature": 0});
    let told = stream(&front, CHAT, more).await;
    assert!(told.contains("another worker went on differently") && !told.contains("[DONE]"), "{told}");
    assert!(!told.contains("\"b\"") && !told.contains("two"), "{told}");
}

#[tokio::test]
async fn what_is_drawn_is_asked_for_anew_while_nothing_of_it_was_said() {
    let (_one, _two, front) = two().await;
    let whole = called("one", &["{}"]);
    let only_role = event(json!([{"index": 0, "delta": {"role": "assistant", "content": ""}}]), json!({"id": "one"}));
    let more = json!({"behave": "die once", "before": only_role, "then": whole, "tools": [{"type": "function"}]});
    let told = stream(&front, CHAT, more).await;
    assert!(told.contains("[DONE]") && told.matches("\"role\"").count() == 1 && told.contains("{}"), "{told}");
}

#[tokio::test]
async fn streams_that_are_not_to_go_on_end_with_an_error_that_says_so() {
    let (one, two) = (Worker::start("one", "tiny").await, Worker::start("two", "tiny").await);
    for (setting, why) in [("resume.enabled=false", "switched off"), ("resume.most_prompt_tokens=0", "too long")] {
        let front = front(&[&one, &two], &[setting]).await;
        until("both are ready", || front.gateway.roster.ready(front.gateway.fleet()).len() == 2).await;
        let asked = one.seen().len() + two.seen().len();
        let told = stream(&front, CHAT, json!({"behave": "die once", "before": begun(), "then": rest()})).await;
        assert!(told.contains(why), "{told}");
        assert_eq!(one.seen().len() + two.seen().len(), asked + 1);
    }
}
