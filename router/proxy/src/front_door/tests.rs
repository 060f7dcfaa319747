use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt as _;

use crate::testing::{
    StubWorker, get, occupy_offload_pool, post, raw, read_to_end, read_until, request_bytes, send, start_router,
    start_router_at, wait_until,
};

const CHAT: &str = "/v1/chat/completions";

async fn worker() -> Arc<StubWorker> {
    StubWorker::start("one", "tiny").await
}

#[tokio::test]
async fn bad_input_gets_an_openai_error() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["proxy.body_limit=\"100000B\""]).await;
    let cases: [(&str, &[u8], u16, &str); 12] = [
        (CHAT, b"{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"", 400, ""),
        (CHAT, b"", 400, ""),
        (CHAT, b"[]", 400, ""),
        (CHAT, b"{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"x\":\"\xff\xfe\"}", 400, ""),
        (CHAT, b"{\"model\":7}", 400, "invalid_value"),
        (CHAT, b"{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"stream\":1}", 400, "invalid_value"),
        (CHAT, b"{\"model\":\"gpt-9\",\"messages\":[]}", 404, "model_not_found"),
        ("/v1/completions", b"{\"model\":\"gpt-9\",\"prompt\":\"\"}", 404, "model_not_found"),
        ("/v1/embeddings", b"{\"model\":\"gpt-9\"}", 404, "model_not_found"),
        ("/tokenize", b"nonsense", 400, ""),
        ("/v1/responses", b"{\"previous_response_id\":\"resp_9\"}", 404, "not_found"),
        (CHAT, &[b' '; 100_001], 413, "body_too_large"),
    ];
    for (path, body, status, code) in cases {
        let response = post(router.proxy_address(), path, Bytes::copy_from_slice(body)).await;
        assert_eq!((response.status, response.error_code().as_str()), (status, code), "{path} {:?}", response.body);
    }
    let zstd = Request::post(CHAT).header("content-encoding", "zstd");
    let response = send(router.proxy_address(), zstd, "{}").await;
    assert_eq!((response.status, response.error_code().as_str()), (415, "unsupported_content_encoding"));
    assert_eq!(worker.requests().len(), 0, "none of it reached the worker");
    assert_eq!(
        post(router.proxy_address(), CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.status,
        200
    );
}

#[tokio::test]
async fn a_whole_answer_without_room_in_memory_is_refused_and_counts_against_no_worker() {
    let worker = worker().await;
    let body = json!({"model": "tiny", "prompt": "", "behave": "long answer"}).to_string();
    for (limit, status) in [("256MiB", 200), ("64KiB", 429)] {
        let router = start_router(&[&worker], &[&format!("upstream.stream_buffer_limit={limit:?}")]).await;
        let before = worker.requests().len();
        for _ in 0..6 {
            assert_eq!(post(router.proxy_address(), "/v1/completions", body.clone()).await.status, status, "{limit}");
        }
        assert_eq!(worker.requests().len() - before, 6, "not sent again, and the worker is not ejected");
    }
}

#[tokio::test]
async fn probes_are_answered_without_reading_a_body() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    for path in ["/livez", "/readyz", "/health"] {
        let head = format!("GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 50000000\r\n\r\n{{");
        let answer = read_to_end(&mut raw(router.proxy_address(), head.as_bytes()).await).await;
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("ok\n"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn an_oversized_body_is_refused_while_the_client_still_sends() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["proxy.body_limit=\"1000B\""]).await;
    // Chunked, so that the size shows only while reading; far larger than the socket's buffers.
    let mut stream = raw(
        router.proxy_address(),
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n").as_bytes(),
    )
    .await;
    stream.write_all(&[b"5dc\r\n".as_slice(), &[b'x'; 1500], b"\r\n0\r\n\r\n"].concat()).await.unwrap();
    let answer = read_until(&mut stream, "body_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    // With a content length the body is not even requested.
    let mut stream = raw(
        router.proxy_address(),
        format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 9999\r\n\r\n").as_bytes(),
    )
    .await;
    let answer = read_until(&mut stream, "body_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn slow_headers_and_bodies_time_out_with_an_error() {
    let worker = worker().await;
    let router =
        start_router(&[&worker], &["proxy.header_timeout=\"150ms\"", "proxy.body_idle_timeout=\"150ms\""]).await;
    let mut headers = raw(router.proxy_address(), b"POST /v1/models HTTP/1.1\r\nhost: x\r\nx-slow: ").await;
    let answer = read_to_end(&mut headers).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("headers_timeout"), "{answer}");
    let mut body =
        raw(router.proxy_address(), &request_bytes(CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}")[..70])
            .await;
    let answer = read_to_end(&mut body).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("body_timeout"), "{answer}");
    let mut idle = raw(router.proxy_address(), b"").await;
    assert_eq!(read_to_end(&mut idle).await, "", "an idle connection is closed without a word");
    assert_eq!(get(router.proxy_address(), "/livez").await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_work() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    for behave in ["hang", "stream"] {
        let body = format!("{{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"{behave}\"}}");
        let mut client = raw(router.proxy_address(), &request_bytes(CHAT, &body)).await;
        wait_until("the worker is at work", || worker.active.count() == 1).await;
        if behave == "stream" {
            read_until(&mut client, "data: 0").await;
        }
        drop(client);
        wait_until("the worker was told to stop", || worker.active.count() == 0).await;
        wait_until("the request is over here too", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    }
    let text = String::from_utf8(router.gateway.metrics.render()).unwrap();
    assert!(text.contains("requests_total{code=\"499\",path=\"/v1/chat/completions\"} 1"), "{text}");
    // Cut in the middle of the body, too.
    drop(
        raw(router.proxy_address(), &request_bytes(CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}")[..70])
            .await,
    );
    assert_eq!(
        post(router.proxy_address(), CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.status,
        200
    );
}

#[tokio::test]
async fn bodies_and_headers_are_forwarded_byte_for_byte_both_ways() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    // Odd whitespace, an unknown field, a lone surrogate, a number that a float would round, an escaped slash.
    let body = "{ \"x_unknown\" : [1e400, 12345678901234567890123],\n\t\"model\":\"tiny\", \"messages\":[{\"role\":\"user\",\
                \"content\":\"\\ud800 \\/ é\"}] }";
    let request = Request::post(format!("{CHAT}?a=b%20c"))
        .header("X-Custom", "a, b")
        .header("x-custom", http::HeaderValue::from_bytes(b"caf\xe9").unwrap())
        .header("authorization", "Bearer for-the-engine")
        .header("connection", "x-hop")
        .header("x-hop", "1")
        .header("traceparent", "00-1-2-01");
    let response = send(router.proxy_address(), request, body).await;
    let seen = worker.last_request();
    assert_eq!((seen.method.as_str(), seen.path.as_str()), ("POST", "/v1/chat/completions?a=b%20c"));
    assert_eq!(seen.body, body);
    let custom: Vec<_> = seen.headers.get_all("x-custom").iter().map(|value| value.as_bytes()).collect();
    assert_eq!(custom, [&b"a, b"[..], b"caf\xe9"]);
    assert_eq!(seen.headers["authorization"], "Bearer for-the-engine");
    assert_eq!(seen.headers["traceparent"], "00-1-2-01");
    assert_eq!(seen.headers["host"], worker.address.to_string());
    assert!(!seen.headers.contains_key("x-hop") && !seen.headers.contains_key("connection"));
    assert_eq!((response.status, response.headers["x-engine"].to_str().unwrap()), (200, "yes"));
    assert!(!response.headers.contains_key("connection"), "the worker's connection is not the client's");
    assert!(response.headers["x-request-id"].to_str().unwrap().starts_with("req-"));
    let refused = post(
        router.proxy_address(),
        CHAT,
        "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"refuse\"}",
    )
    .await;
    assert_eq!((refused.status, &refused.body[..]), (422, &b"engine's own words"[..]));
}

#[tokio::test]
async fn a_compressed_body_reaches_the_engine_decompressed() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, b"{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").unwrap();
    let request = Request::post(CHAT).header("content-encoding", "gzip");
    assert_eq!(send(router.proxy_address(), request, encoder.finish().unwrap()).await.status, 200);
    assert_eq!(worker.last_request().body, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}");
    assert!(!worker.last_request().headers.contains_key("content-encoding"));
}

#[tokio::test]
async fn stream_chunks_are_forwarded_immediately() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let body = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"stream\"}";
    let mut client = raw(router.proxy_address(), &request_bytes(CHAT, body)).await;
    let head = read_until(&mut client, "data: 0\n\n").await;
    assert!(head.contains("text/event-stream"), "{head}");
    for n in 1..4 {
        worker.stream_permits.add_permits(1);
        read_until(&mut client, &format!("data: {n}\n\n")).await;
    }
}

#[tokio::test]
async fn small_writes_are_sent_without_nagle_delay() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let request = request_bytes(CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"two writes\"}");
    let mut client = raw(router.proxy_address(), b"").await;
    let mut spans = Vec::new();
    for _ in 0..9 {
        let begun = Instant::now();
        client.write_all(&request).await.unwrap();
        read_until(&mut client, "0\r\n\r\n").await;
        spans.push(begun.elapsed());
    }
    spans.sort();
    assert!(spans[4] < Duration::from_millis(35), "with Nagle's algorithm each takes over 40 ms: {spans:?}");
}

#[tokio::test]
async fn a_worker_that_dies_mid_stream_leaves_an_explicit_error() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let response =
        post(router.proxy_address(), CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"die\"}")
            .await;
    let text = String::from_utf8(response.body.to_vec()).unwrap();
    // No client could parse half an event.
    let told = text.strip_prefix("\n\nevent: error\ndata: ").expect("an error event and nothing before it");
    let error: serde_json::Value = serde_json::from_str(told.trim()).unwrap();
    assert_eq!(error["error"]["code"], "worker_failed");
}

#[tokio::test]
async fn a_broken_stream_ends_with_the_error_event_of_its_api() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let broken = async |path: &str, more: Value| {
        let mut body = json!({"model": "tiny", "behave": "die", "stream": true, "before": "data: {\"sequence_number\":4}\n\ndata: {\"cut"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let response = post(router.proxy_address(), path, body.to_string()).await;
        let text = String::from_utf8(response.body.to_vec()).unwrap();
        let (before, told) = text.split_once("\n\nevent: error\ndata: ").expect("an error event");
        assert!(!before.contains("cut"), "half an event is with the client: {before}");
        let parsed = serde_json::from_str::<Value>(told.trim()).unwrap();
        (parsed, response.headers["x-request-id"].to_str().unwrap().to_owned())
    };
    let (told, id) = broken("/v1/messages", json!({"messages": [], "max_tokens": 1})).await;
    assert_eq!((&told["type"], &told["error"]["type"]), (&json!("error"), &json!("api_error")));
    assert_eq!(told["request_id"], id);
    // Once for a planned step, and once for a request that is forwarded.
    for more in [json!({"input": "x"}), json!({"input": "x", "background": true})] {
        let (told, _) = broken("/v1/responses", more).await;
        assert_eq!((&told["type"], &told["sequence_number"]), (&json!("error"), &json!(5)));
        assert_eq!((&told["code"], &told["error"]["code"]), (&json!("worker_failed"), &json!("worker_failed")));
        assert_eq!(told["message"], told["error"]["message"]);
    }
}

#[tokio::test]
async fn refusals_on_anthropic_paths_use_anthropics_format() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["proxy.body_limit=\"1000B\""]).await;
    let messages = "/v1/messages";
    for (path, body, status, kind) in [
        (messages, "[]".to_owned(), 400, "invalid_request_error"),
        (messages, json!({"model": "gpt-9", "messages": []}).to_string(), 404, "not_found_error"),
        (messages, " ".repeat(1001), 413, "request_too_large"),
        ("/v1/messages/count_tokens", json!({"model": "gpt-9"}).to_string(), 404, "not_found_error"),
        ("/v1/messages/batches", "{}".into(), 404, "not_found_error"),
    ] {
        let response = post(router.proxy_address(), path, body).await;
        let body = response.json();
        assert_eq!(
            (response.status, &body["type"], &body["error"]["type"]),
            (status, &json!("error"), &json!(kind)),
            "{path}"
        );
        assert_eq!(body["request_id"], response.headers["x-request-id"].to_str().unwrap(), "{path}");
        assert!(body["error"]["message"].as_str().is_some_and(|text| text.len() > 10), "{body}");
    }
    let none = start_router_at(&[], &[]).await;
    let response = post(none.proxy_address(), messages, json!({"model": "tiny", "messages": []}).to_string()).await;
    assert_eq!((response.status, response.json()["error"]["type"].as_str().unwrap()), (503, "overloaded_error"));
    assert_eq!(response.headers["retry-after"], "1");
}

#[tokio::test]
async fn a_dead_worker_is_skipped_and_no_worker_gives_a_clear_error() {
    let alive = worker().await;
    let dead = StubWorker::start("two", "tiny").await;
    let router = start_router(&[&alive], &[]).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let gone = format!("http://{}", closed.local_addr().unwrap());
    drop(closed);
    let both = start_router_at(&[gone, alive.url()], &["routing.fallback_policy=round_robin"]).await;
    for _ in 0..4 {
        assert_eq!(
            post(both.proxy_address(), CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.status,
            200
        );
    }
    drop((router, dead));

    let none = start_router_at(&[], &[]).await;
    let response = post(none.proxy_address(), CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await;
    assert_eq!((response.status, response.error_code().as_str()), (503, "no_worker"));
    assert_eq!(response.headers["retry-after"], "1");
    assert_eq!(get(none.proxy_address(), "/readyz").await.status, 503);
    assert_eq!(get(none.proxy_address(), "/livez").await.status, 200);
}

#[tokio::test]
async fn only_listed_paths_exist_and_admin_paths_never_reach_a_worker() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    for path in [
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/flush_cache",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/collective_rpc",
        "/server_info",
        "/metrics",
        "/v1/chat/completions/../../../sleep",
        "/v1/chat/completions/render",
        "/v1//chat/completions",
        "/V1/chat/completions",
        "/v1/chat/completions/",
        "/ownerserve/v1/routing",
        "/",
    ] {
        let response = post(router.proxy_address(), path, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await;
        assert_eq!((response.status, response.error_code().as_str()), (404, "unknown_url"), "{path}");
    }
    for path in ["/v1/files", "/v1/batches/b1/cancel", "/v1/assistants", "/v1/threads/t/runs"] {
        let response = post(router.proxy_address(), path, "{}").await;
        assert_eq!((response.status, response.error_code().as_str()), (501, "not_implemented"), "{path}");
    }
    for path in ["/v1/responses/resp_x", "/v1/responses/..", "/v1/responses/%2e%2e%2fsleep"] {
        let response = get(router.proxy_address(), path).await;
        assert_eq!((response.status, response.error_code().as_str()), (404, "not_found"), "{path}");
    }
    assert_eq!(worker.requests().len(), 0);
}

#[tokio::test]
async fn methods_are_checked_and_options_and_head_answered() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let at = router.proxy_address();
    let response = get(at, CHAT).await;
    assert_eq!((response.status, response.headers["allow"].to_str().unwrap()), (405, "POST, OPTIONS"));
    assert_eq!(response.error_code(), "method_not_allowed");
    let response = send(at, Request::options(CHAT), "").await;
    assert_eq!((response.status, response.headers["allow"].to_str().unwrap()), (204, "POST, OPTIONS"));
    let response = send(at, Request::head("/v1/models"), "").await;
    assert_eq!((response.status, response.body.len()), (200, 0));
    assert_ne!(response.headers["content-length"], "0");
    assert_eq!(send(at, Request::delete("/v1/models"), "").await.status, 405);
    assert_eq!(worker.requests().len(), 0);
}

#[tokio::test]
async fn the_model_list_merges_workers_and_keeps_entries_unchanged() {
    let (a, b) = (StubWorker::start("a", "org/m1").await, StubWorker::start("b", "m2").await);
    let again = StubWorker::start("again", "m2").await;
    let router = start_router(&[&a, &b, &again], &[]).await;
    wait_until("all are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 3).await;
    let list = get(router.proxy_address(), "/v1/models").await.json();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!((list["object"].as_str().unwrap(), ids), ("list", vec!["org/m1", "m2"]));
    assert_eq!(list["data"][1]["x_extra"], 1);
    for path in ["/v1/models/org/m1", "/v1/models/org%2Fm1"] {
        assert_eq!(get(router.proxy_address(), path).await.json()["owned_by"], "a", "{path}");
    }
    let unknown = get(router.proxy_address(), "/v1/models/m9").await;
    assert_eq!((unknown.status, unknown.error_code().as_str()), (404, "model_not_found"));
    for (model, name) in [("org/m1", "a"), ("m2", "b")] {
        let body = format!("{{\"model\":\"{model}\"}}");
        let response = post(router.proxy_address(), "/v1/embeddings", body).await.json();
        assert!(response["served_by"] == name || (model == "m2" && response["served_by"] == "again"), "{response}");
    }
}

#[tokio::test]
async fn a_stored_response_is_found_at_its_worker_and_only_by_its_tenant() {
    let (a, b) = (StubWorker::start("a", "tiny").await, StubWorker::start("b", "tiny").await);
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
    let file = format!("auth.keys_file={}", keys.display());
    let router = start_router(&[&a, &b], &[&file, "routing.fallback_policy=round_robin"]).await;
    wait_until("both are ready", || router.gateway.worker_pool.ready(router.gateway.fleet()).len() == 2).await;
    let at = router.proxy_address();
    let ask = |request: http::request::Builder, key: &str, body: &'static str| {
        send(at, request.header("authorization", format!("Bearer {key}")), body)
    };
    let path = "/v1/responses";
    let made = ask(Request::post(path), "k1", "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.json();
    let (id, maker) = (made["id"].as_str().unwrap(), made["served_by"].clone());
    for _ in 0..3 {
        let response = ask(Request::get(format!("{path}/{id}?stream=false")), "k1", "").await;
        assert_eq!(response.json()["served_by"], maker);
        let next = format!("{{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"previous_response_id\":\"{id}\"}}");
        let response = send(at, Request::post(path).header("authorization", "Bearer k1"), next).await;
        assert_eq!(response.json()["served_by"], maker);
    }
    assert_eq!(ask(Request::get(format!("{path}/{id}")), "k2", "").await.status, 404, "another tenant's");
    assert_eq!(ask(Request::post(format!("{path}/{id}/cancel")), "k1", "").await.json()["served_by"], maker);
    assert_eq!(ask(Request::delete(format!("{path}/{id}")), "k1", "").await.status, 200);
    assert_eq!(ask(Request::get(format!("{path}/{id}")), "k1", "").await.status, 404, "deleted");
}

#[tokio::test]
async fn api_keys_are_required_and_not_forwarded() {
    let worker = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"sk-right\" = \"team\"").unwrap();
    let router = start_router(&[&worker], &[&format!("auth.keys_file={}", keys.display())]).await;
    let at = router.proxy_address();
    for request in [Request::post(CHAT), Request::post(CHAT).header("authorization", "Bearer sk-wrong")] {
        let response = send(at, request, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await;
        assert_eq!((response.status, response.error_code().as_str()), (401, "invalid_api_key"));
    }
    assert_eq!(get(at, "/v1/models").await.status, 401);
    assert_eq!(get(at, "/readyz").await.status, 200);
    assert_eq!(worker.requests().len(), 0);
    let right = Request::post(CHAT).header("authorization", "Bearer sk-right");
    assert_eq!(send(at, right, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.status, 200);
    assert!(!worker.last_request().headers.contains_key("authorization"));
}

#[tokio::test]
async fn router_only_fields_are_stripped_on_every_path_and_tenants_are_salted() {
    let worker = worker().await;
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys.toml");
    std::fs::write(&keys, "[keys]\n\"k1\" = \"t1\"\n\"k2\" = \"t2\"").unwrap();
    // The router's own proof of cache_salt would be the last request at times.
    let settings = [&format!("auth.keys_file={}", keys.display()), "auth.verify_cache_salt=false"];
    let router = start_router(&[&worker], &settings).await;
    let body = "{\"model\":\"tiny\", \"messages\":[],\"prompt\":\"\",\"kv_transfer_params\":{\"remote_request_id\":\"x\"},\
                \"cache_salt\":\"guessed\",\"vllm_xargs\":{\"kv_cache_report_mode\":\"full\",\"y\":1}}";
    let paths = [CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"];
    let mut salts = std::collections::BTreeSet::new();
    for (path, key) in paths.into_iter().flat_map(|path| [(path, "k1"), (path, "k2")]) {
        let request = Request::post(path).header("authorization", format!("Bearer {key}"));
        assert_eq!(send(router.proxy_address(), request, body).await.status, 200, "{path}");
        let seen: serde_json::Value = serde_json::from_slice(&worker.last_request().body).unwrap();
        assert_eq!(seen.get("kv_transfer_params"), None, "{path}");
        assert_eq!(seen["vllm_xargs"], serde_json::json!({"y": 1}), "{path}");
        salts.insert(seen["cache_salt"].as_str().unwrap().to_owned());
    }
    assert!(salts.len() == 2 && !salts.contains("guessed"), "one salt a tenant: {salts:?}");
    let part = r#"{"model":"tiny","prompt":"","input":"","messages":[{"role":"user","content":[{"type":"image_url","uuid":"a"}]}]}"#;
    for path in [CHAT, "/v1/embeddings", "/tokenize"] {
        let request = Request::post(path).header("authorization", "Bearer k1");
        assert_eq!(send(router.proxy_address(), request, part).await.status, 400, "{path}: media of another tenant");
    }
    let stripped = |name| router.gateway.metrics.requests.stripped.with_label_values(&[name]).get();
    assert_eq!(["kv_transfer_params", "kv_cache_report_mode", "cache_salt"].map(stripped), [12, 12, 12]);
}

#[tokio::test]
async fn probes_and_short_requests_are_answered_while_long_bodies_queue() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let release = occupy_offload_pool(&router.gateway).await;
    let address = router.proxy_address();
    let long = format!("{{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"{}\"}}", "x".repeat(100_000));
    let waiting = tokio::spawn(async move { post(address, CHAT, long).await.status });
    wait_until("it has arrived", || router.gateway.metrics.requests.in_flight.get() == 1).await;
    assert_eq!(get(address, "/livez").await.status, 200);
    assert_eq!(post(address, CHAT, "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"}").await.status, 200);
    assert!(!waiting.is_finished());
    drop(release);
    assert_eq!(waiting.await.unwrap(), 200);
}

#[tokio::test]
async fn active_requests_stay_within_the_memory_budget_and_release_it() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["proxy.body_limit=\"1MiB\"", "proxy.request_memory_limit=\"8MiB\""]).await;
    let address = router.proxy_address();
    let large = |behave: &str| {
        let text = "x".repeat(900_000);
        format!("{{\"model\":\"tiny\",\"messages\":[],\"behave\":\"{behave}\",\"prompt\":\"{text}\"}}")
    };
    let mut held = Vec::new();
    for at_work in 1..=8 {
        let body = large("hang");
        held.push(tokio::spawn(async move { post(address, CHAT, body).await }));
        wait_until("it is at work", || worker.active.count() == at_work).await;
    }
    let response = post(address, CHAT, large("answer")).await;
    assert_eq!((response.status, response.error_code().as_str()), (429, "overloaded"));
    assert!(response.headers.contains_key("retry-after"));
    held.iter().for_each(tokio::task::JoinHandle::abort);
    wait_until("they are given back", || router.gateway.metrics.memory.reserved.get() == 0).await;
    assert_eq!(post(address, CHAT, large("answer")).await.status, 200);
}

#[tokio::test]
async fn copies_of_a_body_are_charged_beside_it() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let text = "x".repeat(100_000);
    for (path, fields, copies) in [
        ("/tokenize", "\"prompt\"", 0),
        // A field that only routers may send is removed.
        ("/tokenize", "\"kv_transfer_params\":{},\"prompt\"", 1),
        // The input is kept for the transcript.
        ("/v1/responses", "\"input\"", 1),
    ] {
        let body = format!("{{\"model\":\"tiny\",\"behave\":\"hang\",{fields}:\"{text}\"}}");
        let address = router.proxy_address();
        let asked = tokio::spawn(async move { post(address, path, body).await });
        wait_until("it is at work", || worker.active.count() == 1).await;
        let reserved = router.gateway.metrics.memory.reserved.get() as usize;
        assert_eq!(reserved / text.len(), 1 + copies, "{path} {fields}: {reserved}");
        asked.abort();
        wait_until("all is given back", || router.gateway.metrics.memory.reserved.get() == 0).await;
        wait_until("the worker was told", || worker.active.count() == 0).await;
    }
}

#[tokio::test]
async fn a_json_tree_with_too_many_values_is_refused_before_it_is_built() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let list = "0,".repeat(3 << 20);
    let body =
        format!("{{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"chat_template_kwargs\":{{\"a\":[{list}0]}}}}");
    let response = post(router.proxy_address(), CHAT, body).await;
    assert_eq!(response.status, 400);
    assert!(response.json()["error"]["message"].as_str().unwrap().contains("values"), "{}", response.json());
    assert!(worker.requests().is_empty());
}

/// Returns the status for a chat request with these headers, and the code of its error.
async fn status_and_code(at: std::net::SocketAddr, headers: &[(&str, &str)]) -> (u16, String) {
    let body = "{\"model\":\"tiny\",\"messages\":[]}";
    let mut request = Request::post(CHAT).header("content-type", "text/plain");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = send(at, request, body).await;
    (response.status, if response.status == 200 { String::new() } else { response.error_code() })
}

#[tokio::test]
async fn a_cross_site_page_reaches_no_engine() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["server.allowed_origins=[\"https://ui.example\"]"]).await;
    let at = router.proxy_address();
    let own = format!("http://{at}");
    let refused = |code: &str| (403, code.to_owned());
    assert_eq!(status_and_code(at, &[("origin", "http://evil.example")]).await, refused("origin_not_allowed"));
    assert_eq!(status_and_code(at, &[("origin", "null")]).await, refused("origin_not_allowed"));
    assert_eq!(status_and_code(at, &[("host", "evil.example")]).await, refused("host_not_allowed"));
    let rebound = [("host", "evil.example"), ("origin", "http://evil.example")];
    assert_eq!(status_and_code(at, &rebound).await, refused("host_not_allowed"));
    let preflight = Request::options(CHAT).header("origin", "http://evil.example");
    let response = send(at, preflight, Bytes::new()).await;
    assert_eq!((response.status, response.error_code().as_str()), (403, "origin_not_allowed"));
    assert!(!response.headers.contains_key("access-control-allow-origin"));
    let unknown = Request::get("/nowhere").header("host", "evil.example");
    assert_eq!(send(at, unknown, Bytes::new()).await.status, 403, "the path is not looked at");
    assert_eq!(worker.requests().len(), 0, "none of it reached the worker");
    for headers in [vec![], vec![("origin", own.as_str())], vec![("origin", "https://ui.example")], vec![("host", "x")]]
    {
        assert_eq!(status_and_code(at, &headers).await, (200, String::new()), "{headers:?}");
    }
}

#[tokio::test]
async fn with_keys_any_host_is_served_but_no_foreign_origin() {
    let (worker, folder) = (worker().await, tempfile::tempdir().unwrap());
    let path = folder.path().join("keys.toml");
    std::fs::write(&path, "[keys]\n\"sk-a\" = \"a\"").unwrap();
    let router = start_router(&[&worker], &[&format!("auth.keys_file={path:?}")]).await;
    let (at, key) = (router.proxy_address(), ("authorization", "Bearer sk-a"));
    assert_eq!(status_and_code(at, &[key, ("host", "api.example")]).await, (200, String::new()));
    let page = [key, ("host", "api.example"), ("origin", "http://evil.example")];
    assert_eq!(status_and_code(at, &page).await, (403, "origin_not_allowed".into()));
}

#[tokio::test]
async fn http_1_1_requests_without_a_host_are_refused() {
    let router = start_router_at(&[], &[]).await;
    for at in [router.proxy_address(), router.operator_address()] {
        for (head, status) in [
            ("GET /livez HTTP/1.1\r\nconnection: close\r\n\r\n", "HTTP/1.1 400 "),
            ("GET /livez HTTP/1.1\r\nhost: a\r\nhost: a\r\nconnection: close\r\n\r\n", "HTTP/1.1 400 "),
            ("GET http://evil.example/livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", "HTTP/1.1 403 "),
            ("GET /livez HTTP/1.0\r\n\r\n", "HTTP/1.0 200 "),
            ("GET /livez HTTP/1.1\r\nhost: 10.0.0.7:8080\r\nconnection: close\r\n\r\n", "HTTP/1.1 200 "),
        ] {
            let answer = read_to_end(&mut raw(at, head.as_bytes()).await).await;
            assert!(answer.starts_with(status), "{head}: {answer}");
        }
    }
}

#[tokio::test]
async fn an_engine_cannot_redirect_clients_or_set_proxy_headers() {
    let worker = worker().await;
    let router = start_router(&[&worker], &[]).await;
    let at = router.proxy_address();
    for path in [CHAT, "/v1/messages", "/v1/embeddings", "/tokenize"] {
        for stream in [false, true] {
            let body = |behave: &str| {
                let fields = "\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\"";
                format!("{{{fields},\"stream\":{stream},\"behave\":\"{behave}\"}}")
            };
            let response = post(at, path, body("send away")).await;
            assert_eq!(response.status, 502, "{path}");
            assert!(
                String::from_utf8_lossy(&response.body).contains("redirect, which is not followed"),
                "{response:?}"
            );
            assert!(
                ["location", "set-cookie"].iter().all(|name| !response.headers.contains_key(*name)),
                "{response:?}"
            );
            let request = String::from_utf8(request_bytes(path, &body("speak for the proxy"))).unwrap();
            let request = request.replace("host: x", "host: x\r\nconnection: close\r\nte: trailers");
            let text = read_to_end(&mut raw(at, request.as_bytes()).await).await;
            assert!(text.contains(if stream { "[DONE]" } else { "\"x\"" }), "{path}: {text}");
            assert!(text.contains("x-engine: yes"), "{path}: {text}");
            for name in ["server:", "location:", "set-cookie", "alt-svc:", "refresh:"] {
                assert!(!text.contains(name), "{path}: {name} in {text}");
            }
        }
    }
}

#[tokio::test]
async fn concurrent_model_list_requests_share_one_lookup() {
    let worker = worker().await;
    let router = start_router(&[&worker], &["tenants.default.requests_per_minute=20"]).await;
    let at = router.proxy_address();
    let mut lists = Vec::new();
    for _ in 0..20 {
        let response = get(at, "/v1/models").await;
        assert_eq!(response.status, 200);
        lists.push(response.body);
    }
    assert!(lists.iter().all(|list| *list == lists[0]));
    assert_eq!(get(at, "/v1/models").await.status, 429);
    assert_eq!(get(at, "/v1/models/tiny").await.status, 429);
}
