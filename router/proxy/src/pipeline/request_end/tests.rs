use http::Request;
use serde_json::{Value, json};

use crate::lab::sim_command::tests::{sim, url};
use crate::testing::{StubWorker, TestRouter, post, raw, read_until, send, start_router, start_router_at, wait_until};

const METERED: &str = "tenants.default.tokens_per_minute=1000000";

fn charged(router: &TestRouter) -> u64 {
    router.gateway.metrics.shared_cache.tenant_tokens.with_label_values(&["default"]).get()
}

/// Reads this many events of a streamed answer, then disconnects.
async fn leave_after(router: &TestRouter, (path, body): (&str, &Value), events: usize) {
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let mut client = raw(router.proxy_address(), format!("{head}{body}").as_bytes()).await;
    let mut seen = 0;
    while seen < events {
        seen += read_until(&mut client, "\n\n").await.matches("data:").count();
    }
}

#[tokio::test]
async fn a_disconnected_client_is_charged_for_delivered_tokens_only() {
    let worker = sim(&["--speed-up=5"]).await;
    let user = json!([{"role": "user", "content": "Tell a long story."}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let chat = |more: Value| {
        let mut body =
            json!({"model": "tiny", "stream": true, "max_tokens": 2000, "ignore_eos": true, "messages": user});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let response =
        json!({"model": "tiny", "stream": true, "max_output_tokens": 2000, "ignore_eos": true, "input": user});
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({}))),
        ("/v1/chat/completions", chat(json!({"n": 2}))),
        ("/v1/chat/completions", chat(json!({"tools": [tool]}))),
        ("/v1/chat/completions", chat(json!({"logprobs": true}))),
        ("/v1/messages", chat(json!({}))),
        ("/v1/responses", response),
    ] {
        let router = start_router_at(&[url(&worker)], &["models.tiny.tokenizer_dir=builtin", METERED]).await;
        leave_after(&router, (path, &body), 300).await;
        wait_until("it is over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
        assert!(charged(&router) >= 280, "{path} {body}: {} tokens", charged(&router));
    }
}

#[tokio::test]
async fn leaving_a_whole_answer_costs_what_was_reserved_for_it() {
    let worker = StubWorker::start("one", "tiny").await;
    for (stream, charge) in [(false, 500..600), (true, 1..100)] {
        let router = start_router(&[&worker], &[METERED]).await;
        let body = json!({"model": "tiny", "prompt": "short", "behave": "hang", "max_tokens": 500, "stream": stream});
        let (address, body) = (router.proxy_address(), body.to_string());
        let asked = tokio::spawn(async move { post(address, "/v1/completions", body).await });
        wait_until("a worker is at it", || worker.active.count() == 1).await;
        asked.abort();
        wait_until("it is over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
        assert!(charge.contains(&charged(&router)), "stream {stream}: {}", charged(&router));
        wait_until("the worker knows", || worker.active.count() == 0).await;
    }
}

#[tokio::test]
async fn an_implausible_engine_token_count_is_ignored() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[METERED]).await;
    let ask = async |counted: u64, generated: u64| {
        let prompt = "a history ".repeat(40);
        let body = json!({"model": "tiny", "prompt": prompt, "behave": "count", "counted": counted,
            "generated": generated, "max_tokens": 10});
        post(router.proxy_address(), "/v1/completions", body.to_string()).await
    };
    assert_eq!(ask(u64::MAX, 10).await.status, 200);
    assert_eq!(ask(100, 50_000).await.status, 200, "of an answer of ten tokens");
    let after = ask(100, 10).await;
    assert_eq!(after.status, 200, "the tenant is not locked out");
    let left: u64 = after.headers["x-ratelimit-remaining-tokens"].to_str().unwrap().parse().unwrap();
    assert!(left > 900_000, "{left}");
    wait_until("all are charged", || charged(&router) > 0).await;
    assert!(charged(&router) < 10_000, "{}", charged(&router));
    assert_eq!(router.gateway.metrics.requests.implausible_usage.get(), 2);
}

#[tokio::test]
async fn a_response_that_counts_what_cannot_be_is_not_believed() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[METERED]).await;
    let ask = async |previous: Value| {
        let body = json!({"model": "tiny", "input": "a history ".repeat(40), "behave": "store", "counted": u64::MAX,
            "previous_response_id": previous});
        post(router.proxy_address(), "/v1/responses", body.to_string()).await
    };
    let first = ask(Value::Null).await;
    let id = first.json()["id"].clone();
    let second = ask(id).await;
    assert_eq!((first.status, second.status), (200, 200));
    wait_until("both are over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    assert_eq!(router.gateway.metrics.requests.implausible_usage.get(), 2);
    assert!((1..10_000).contains(&charged(&router)), "{}", charged(&router));
}

#[tokio::test]
async fn the_expected_answer_is_reserved_from_the_quota() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["tenants.default.tokens_per_minute=16000"]).await;
    let body = json!({"model": "tiny", "prompt": "short", "behave": "hang", "max_tokens": 100_000}).to_string();
    let address = router.proxy_address();
    let mut running = Vec::new();
    for at_work in 1..=15 {
        let body = body.clone();
        running.push(tokio::spawn(async move { post(address, "/v1/completions", body).await }));
        wait_until("it runs", || worker.active.count() == at_work).await;
    }
    let sixteenth = post(address, "/v1/completions", body).await;
    assert_eq!((sixteenth.status, sixteenth.error_code().as_str()), (429, "rate_limit_exceeded"));
    running.iter().for_each(tokio::task::JoinHandle::abort);
    let answered = json!({"model": "tiny", "prompt": "short", "behave": "count", "counted": 5}).to_string();
    wait_until("what they did not use is given back", || worker.active.count() == 0).await;
    wait_until("they are over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    assert_eq!(post(address, "/v1/completions", answered).await.status, 200);
}

#[tokio::test]
async fn concurrent_requests_of_a_tenant_are_limited() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["tenants.default.concurrent_requests=1"]).await;
    let address = router.proxy_address();
    let body = |behave: &str| json!({"model": "tiny", "prompt": "", "behave": behave}).to_string();
    let hanging = body("hang");
    let first = tokio::spawn(async move { post(address, "/v1/completions", hanging).await });
    wait_until("it runs", || worker.active.count() == 1).await;
    let second = post(address, "/v1/completions", body("answer")).await;
    assert_eq!((second.status, second.error_code().as_str()), (429, "rate_limit_exceeded"));
    assert!(second.headers.contains_key("retry-after"));
    let refusals = &router.gateway.metrics.shared_cache.quota_refusals;
    assert_eq!(refusals.with_label_values(&["default", "concurrent_requests"]).get(), 1);
    first.abort();
    wait_until("it is over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    assert_eq!(post(address, "/v1/completions", body("answer")).await.status, 200);
}

#[tokio::test]
async fn a_passed_through_request_is_charged_by_reported_usage() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[METERED]).await;
    let body = json!({"model": "tiny", "input": "text", "behave": "count", "counted": 123}).to_string();
    assert_eq!(post(router.proxy_address(), "/v1/embeddings", body).await.status, 200);
    wait_until("it is charged", || charged(&router) == 124).await;
    let refused = json!({"model": "tiny", "input": "text", "behave": "refuse"}).to_string();
    assert_eq!(post(router.proxy_address(), "/v1/embeddings", refused).await.status, 422);
    wait_until("it is over", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    assert_eq!(charged(&router), 124);
}

#[tokio::test]
async fn background_responses_are_refused_to_metered_tenants() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[METERED]).await;
    let body = json!({"model": "tiny", "input": "text", "background": true}).to_string();
    let request = Request::post("/v1/responses").header("content-type", "application/json");
    let response = send(router.proxy_address(), request, body).await;
    assert_eq!((response.status, response.json()["error"]["param"].as_str()), (400, Some("background")));
    assert!(worker.requests().is_empty());
}
