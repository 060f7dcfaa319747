use std::sync::Arc;
use std::time::Instant;

use http::Request;
use ownership::ledger::Ledger;
use serde_json::json;
use vocabulary::{KvIndexState, ModelId, SessionId, TenantId};
use workers_shim::sim::SimWorker;

use crate::lab::sim_command::tests::{sim, url};
use crate::receipt::{AttemptEvent, Receipt, RequestOutcome};
use crate::server::{BoundSocket, HttpServer, ServerLimits};
use crate::testing::{StubWorker, TestRouter, post, raw, send, start_router, start_router_at, wait_until};

const PATH: &str = "/v1/completions";

fn body(behave: &str) -> String {
    format!("{{\"model\":\"tiny\",\"prompt\":{:?},\"behave\":{behave:?}}}", "a long history ".repeat(40))
}

fn receipts(router: &TestRouter) -> Vec<Arc<Receipt>> {
    router.gateway.decisions.receipts.newest(10, |_| true)
}

fn ending(receipt: &Receipt) -> (RequestOutcome, u16) {
    let seen = receipt.observed.unwrap();
    (seen.outcome, seen.http_status)
}

#[tokio::test]
async fn an_overloaded_worker_without_alternative_yields_429() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let response = post(router.proxy_address(), PATH, body("busy")).await;
    assert_eq!((response.status, response.error_code().as_str()), (429, "overloaded"));
    assert_eq!(response.headers["retry-after"], "1");
    let [receipt] = &receipts(&router)[..] else { panic!("one receipt") };
    assert_eq!(ending(receipt), (RequestOutcome::Failed, 429));
    assert_eq!(receipt.attempts.len(), 1);
    assert_eq!(receipt.attempts[0].events, [AttemptEvent::DecodeBusy]);
    assert_eq!(receipt.attempts[0].kv_index_state, KvIndexState::Approximate, "it tells no events");
    let text = String::from_utf8(router.gateway.metrics.render()).unwrap();
    assert!(!text.contains("ownerserve_retries_total"), "nothing was tried again");
    assert!(text.contains("ownerserve_plan_fallbacks_total{reason=\"decode_busy\"} 1"), "{text}");
}

#[tokio::test]
async fn an_attempt_is_timed_from_its_dispatch() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let address = router.proxy_address();
    let late = tokio::spawn(async move { post(address, PATH, body("late")).await.status });
    wait_until("it is asked", || !worker.requests().is_empty()).await;
    let seen = Instant::now();
    assert_eq!(late.await.unwrap(), 200);
    assert!(receipts(&router)[0].attempts[0].asked <= seen, "what came to trial meanwhile is not what it tells of");
}

#[tokio::test]
async fn a_step_that_fails_everywhere_leaves_a_receipt_with_every_attempt() {
    let expected = "a long history ".repeat(40);
    let user = json!([{"role": "user", "content": expected}]);
    for (path, body) in [
        (PATH, json!({"model": "tiny", "prompt": expected, "behave": "fail"})),
        ("/v1/messages", json!({"model": "tiny", "max_tokens": 2, "messages": user, "behave": "fail"})),
        ("/v1/responses", json!({"model": "tiny", "input": user, "behave": "fail"})),
    ] {
        let (one, two) = (StubWorker::start("one", "tiny").await, StubWorker::start("two", "tiny").await);
        let router = start_router(&[&one, &two], &[]).await;
        wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
        let response = post(router.proxy_address(), path, body.to_string()).await;
        let is_told = if path == "/v1/messages" { "api_error" } else { "server_error" };
        assert_eq!((response.status, response.json()["error"]["type"].as_str().unwrap()), (502, is_told), "{path}");
        assert_eq!((one.requests().len(), two.requests().len()), (1, 1), "{path}: each was tried once");
        assert_eq!(one.last_request().body, two.last_request().body, "{path}: with the same words");
        let [receipt] = &receipts(&router)[..] else { panic!("one receipt") };
        assert_eq!(ending(receipt), (RequestOutcome::Failed, 502));
        assert!(receipt.attempts.iter().all(|attempt| attempt.events == [AttemptEvent::DecodeFailed]));
        assert_eq!(receipt.attempts.len(), 2);
        let retries = router.gateway.metrics.requests.retries.with_label_values(&["decode_failed"]).get();
        assert_eq!(retries, 1, "{path}: the second try was the only retry");
    }
}

#[tokio::test]
async fn a_client_that_leaves_before_the_answer_leaves_a_receipt_and_no_intent() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let session = SessionId::of_key(&TenantId::default(), &ModelId::from("tiny"), "s");
    let ledger = |ask: &dyn Fn(&Ledger) -> bool| ask(&router.gateway.directory().view());
    let live = |ledger: &Ledger| ledger.workers().any(|worker| worker.is_live());
    wait_until("the worker has a lease", || ledger(&live)).await;
    let request = Request::post(PATH).header("x-session-id", "s");
    assert_eq!(send(router.proxy_address(), request, body("answer")).await.status, 200);
    wait_until("the session is known", || {
        ledger(&|ledger| ledger.session(session).is_some_and(|s| !s.heads.is_empty()))
    })
    .await;

    let body = body("hang");
    let head = format!("POST {PATH} HTTP/1.1\r\nhost: x\r\nx-session-id: s\r\ncontent-length: {}\r\n\r\n", body.len());
    let client = raw(router.proxy_address(), format!("{head}{body}").as_bytes()).await;
    wait_until("the step is announced", || ledger(&|ledger| ledger.intents(session).count() == 1)).await;
    drop(client);
    wait_until("the announcement is taken back", || ledger(&|ledger| ledger.intents(session).count() == 0)).await;
    let newest = receipts(&router).remove(0);
    assert_eq!(ending(&newest), (RequestOutcome::ClientDisconnected, 499));
    assert_eq!(newest.attempts.len(), 1);
}

/// Proxies a worker under metrics of another name, so that its engine is not recognised as vLLM.
async fn non_vllm_worker(worker: &SimWorker) -> (String, HttpServer) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let (at, client) = (worker.address(), reqwest::Client::builder().no_proxy().build().unwrap());
    let pass = move |request: axum::extract::Request| {
        let client = client.clone();
        async move {
            let (head, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let url = format!("http://{at}{}", head.uri);
            let answer = client.request(head.method, url).headers(head.headers).body(body).send().await.unwrap();
            let (status, kind) = (answer.status(), answer.headers().get("content-type").cloned());
            let text = answer.text().await.unwrap();
            let text = if head.uri.path() == "/metrics" { text.replace("vllm:", "sglang:") } else { text };
            let kind = kind.unwrap_or_else(|| http::HeaderValue::from_static("text/plain"));
            (status, [(http::header::CONTENT_TYPE, kind)], text)
        }
    };
    let bound = BoundSocket::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let routes = axum::Router::new().fallback(pass);
    let limits = ServerLimits {
        header_timeout: std::time::Duration::from_secs(30),
        write_timeout: std::time::Duration::from_secs(30),
        unauthenticated: None,
        connections: 100,
        drain_timeout: std::time::Duration::from_secs(1),
    };
    let server = HttpServer::start(bound, routes, limits, prometheus::IntGauge::new("d", "d").unwrap()).unwrap();
    (format!("http://{}", server.address()), server)
}

#[tokio::test]
async fn steps_of_other_endpoints_are_exact_at_vllm_and_fallback_elsewhere() {
    let worker = sim(&["--speed-up=50"]).await;
    let (other, _server) = non_vllm_worker(&worker).await;
    for (at, is_vllm) in [(url(&worker), true), (other, false)] {
        let front = start_router_at(&[at], &["models.tiny.tokenizer_dir=builtin"]).await;
        let known = |router: &TestRouter| router.gateway.fleet().snapshot()[0].kv_index_state;
        let user = json!([{"role": "user", "content": "Where is my bag?"}]);
        for (path, body, is_guessed) in [
            ("/v1/chat/completions", json!({"model": "tiny", "max_tokens": 2, "messages": user}), false),
            ("/v1/messages", json!({"model": "tiny", "max_tokens": 2, "messages": user}), !is_vllm),
            ("/v1/responses", json!({"model": "tiny", "max_output_tokens": 2, "input": user}), !is_vllm),
        ] {
            wait_until("its events are followed", || known(&front) == KvIndexState::Exact).await;
            let response = post(front.proxy_address(), path, body.to_string()).await;
            assert_eq!(response.status, 200, "{path} {:?}", response.body);
            let receipt = receipts(&front).remove(0);
            assert_eq!(receipt.lookup.token_ids_unavailable, None, "{path}");
            let expected = if is_guessed { KvIndexState::Approximate } else { KvIndexState::Exact };
            assert_eq!(receipt.attempts[0].kv_index_state, expected, "{path}");
        }
        let guessed = front.gateway.metrics.plans.fallback.with_label_values(&["unverified_conversion"]).get();
        assert_eq!(guessed, if is_vllm { 0 } else { 2 });
    }
}
