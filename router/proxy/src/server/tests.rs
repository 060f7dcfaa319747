use super::*;
use crate::testing::{StubWorker, get, post, raw, read_to_end, read_until, request_bytes, start_router};

const STREAM: &str = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"stream\"}";

#[tokio::test]
async fn accepted_connections_use_tcp_nodelay() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    assert!(next_stream(&listener, &mut RareWarning::default()).await.nodelay().unwrap());
    drop(client);
}

#[tokio::test]
async fn connection_serves_many_requests() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let mut client = raw(router.proxy_address(), b"").await;
    for _ in 0..3 {
        tokio::io::AsyncWriteExt::write_all(&mut client, &request_bytes("/tokenize", "{}")).await.unwrap();
        read_until(&mut client, "served_by").await;
    }
    assert_eq!(worker.requests().len(), 3);
}

#[tokio::test]
async fn connections_beyond_the_cap_wait_for_a_free_slot() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["proxy.max_connections=1"]).await;
    let mut first = raw(router.proxy_address(), &request_bytes("/v1/completions", STREAM)).await;
    read_until(&mut first, "data: 0").await;
    let mut second = raw(router.proxy_address(), b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let waiting = tokio::time::timeout(Duration::from_millis(100), read_to_end(&mut second)).await;
    assert!(waiting.is_err(), "there was no place for it");
    drop(first);
    assert!(read_to_end(&mut second).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn idle_connections_are_closed_where_new_ones_wait_for_room() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["proxy.max_connections=2"]).await;
    let address = router.proxy_address();
    let mut busy = raw(address, &request_bytes("/v1/completions", STREAM)).await;
    read_until(&mut busy, "data: 0").await;
    let mut idle = raw(address, &request_bytes("/tokenize", "{}")).await;
    read_until(&mut idle, "served_by").await;
    let mut third = raw(address, b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    assert!(read_to_end(&mut third).await.starts_with("HTTP/1.1 200"));
    assert_eq!(read_to_end(&mut idle).await, "", "it was closed for the third");
    let busy_end = tokio::time::timeout(Duration::from_millis(100), read_to_end(&mut busy)).await;
    assert!(busy_end.is_err(), "the stream goes on");
    let closed = &router.gateway.metrics.process.idle_closed;
    assert!(closed.with_label_values(&["clients"]).get() >= 1);
}

#[tokio::test]
async fn stopping_server_finishes_requests_and_accepts_none() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let address = router.proxy_address();
    let mut idle = raw(address, b"").await;
    let body = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"two writes\"}";
    let mut running = raw(address, &request_bytes("/v1/completions", body)).await;
    read_until(&mut running, "data: a").await;
    let stopping = tokio::spawn(router.stop());
    read_until(&mut running, "data: b").await;
    let ended = tokio::time::timeout(Duration::from_secs(1), stopping).await;
    ended.expect("nothing keeps it from ending").unwrap();
    assert_eq!(read_to_end(&mut idle).await, "");
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn requests_exceeding_the_drain_timeout_are_cut() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["proxy.drain_timeout=\"100ms\""]).await;
    let mut endless = raw(router.proxy_address(), &request_bytes("/v1/completions", STREAM)).await;
    read_until(&mut endless, "data: 0").await;
    tokio::time::timeout(Duration::from_secs(2), router.stop()).await.expect("bounded by the drain time-out");
    crate::testing::wait_until("the worker was told", || worker.active.count() == 0).await;
}

#[tokio::test]
async fn malformed_http_does_not_affect_other_clients() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    for bytes in
        [&b"\x16\x03\x01\x02\x00\x01\x00\x01"[..], b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        let mut client = raw(router.proxy_address(), bytes).await;
        tokio::io::AsyncWriteExt::shutdown(&mut client).await.unwrap();
        let answer = read_to_end(&mut client).await;
        let is_refused = answer.starts_with("HTTP/1.1 400 ") && answer.contains("\"malformed_head\"");
        assert!(is_refused || (answer.is_empty() && bytes.starts_with(b"PRI")), "{answer}");
    }
    let many = "x: y\r\n".repeat(1000);
    let mut client = raw(router.proxy_address(), format!("GET / HTTP/1.1\r\n{many}\r\n").as_bytes()).await;
    let answer = read_to_end(&mut client).await;
    assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains("\"headers_too_large\""), "{answer}");
    assert_eq!(get(router.proxy_address(), "/livez").await.status, 200);
    assert_eq!(post(router.proxy_address(), "/tokenize", "{}").await.status, 200);
}

#[tokio::test]
async fn idle_unauthenticated_connections_time_out_and_block_no_client() {
    let worker = StubWorker::start("one", "tiny").await;
    let settings = [
        "proxy.max_connections=8",
        "proxy.max_unauthenticated_connections=4",
        "proxy.max_unauthenticated_connections_per_address=4",
        "proxy.authentication_timeout=\"300ms\"",
    ];
    let router = start_router(&[&worker], &settings).await;
    let address = router.proxy_address();
    let mut strangers = Vec::new();
    for _ in 0..40 {
        strangers.push(raw(address, b"GET /v1/models HTTP/1.1\r\nx-unfinished: ").await);
    }
    let begun = std::time::Instant::now();
    assert_eq!(get(address, "/livez").await.status, 200, "a probe needs no key");
    assert_eq!(post(address, "/tokenize", "{}").await.status, 200);
    assert!(begun.elapsed() < Duration::from_secs(20), "nobody waited for a stranger to be timed out");
    let mut known = raw(address, &request_bytes("/tokenize", "{}")).await;
    read_until(&mut known, "served_by").await;
    for stranger in &mut strangers {
        let answer = read_to_end(stranger).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408 "), "{answer}");
    }
    tokio::io::AsyncWriteExt::write_all(&mut known, &request_bytes("/tokenize", "{}")).await.unwrap();
    read_until(&mut known, "served_by").await;
    let closed = &router.gateway.metrics.process.unauthenticated_closed;
    let count = |cause| closed.with_label_values(&["clients", cause]).get();
    crate::testing::wait_until("all are counted", || count("evicted_address") + count("timeout") >= 40).await;
}

#[tokio::test]
async fn rejected_key_does_not_authenticate_a_connection() {
    let worker = StubWorker::start("one", "tiny").await;
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "[keys]\n\"sk-a\" = \"a\"\n").unwrap();
    let file = format!("auth.keys_file={:?}", keys.path());
    let router = start_router(&[&worker], &[&file, "proxy.authentication_timeout=\"300ms\""]).await;
    let mut wrong = raw(router.proxy_address(), &request_bytes("/tokenize", "{}")).await;
    assert!(read_to_end(&mut wrong).await.starts_with("HTTP/1.1 401 "), "and then it is closed");
}

#[tokio::test]
async fn stalled_reader_is_disconnected_and_no_longer_counted() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &["proxy.write_timeout=\"200ms\""]).await;
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut slow = socket.connect(router.proxy_address()).await.unwrap();
    let body = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"flood\"}";
    tokio::io::AsyncWriteExt::write_all(&mut slow, &request_bytes("/v1/completions", body)).await.unwrap();
    crate::testing::wait_until("it is served", || worker.active.count() == 1).await;
    crate::testing::wait_until("it is cut", || router.gateway.metrics.requests.in_flight.get() == 0).await;
    crate::testing::wait_until("the worker was told", || worker.active.count() == 0).await;
    drop(slow);
}

#[tokio::test]
async fn request_head_is_buffered_only_up_to_its_limit() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let head =
        |bytes: usize| format!("GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: {}", "y".repeat(bytes));
    let mut long = raw(router.proxy_address(), head(MAX_HEAD_BYTES + (8 << 10)).as_bytes()).await;
    let answer = read_to_end(&mut long).await;
    assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains("\"headers_too_large\""), "{answer}");
    let mut fits = raw(router.proxy_address(), format!("{}\r\n\r\n", head(MAX_HEAD_BYTES / 2)).as_bytes()).await;
    assert!(read_to_end(&mut fits).await.starts_with("HTTP/1.1 200 "));
}

#[tokio::test]
async fn a_path_that_is_too_long_is_refused_in_words() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let request = format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", "y".repeat(LONGEST_URI));
    let answer = read_to_end(&mut raw(router.proxy_address(), request.as_bytes()).await).await;
    assert!(answer.starts_with("HTTP/1.1 414 ") && answer.contains("\"uri_too_long\""), "{answer}");
}

#[tokio::test]
async fn every_refused_head_gets_an_error_in_the_format_of_its_listener() {
    let worker = StubWorker::start("one", "tiny").await;
    let router = start_router(&[&worker], &[]).await;
    let many = "x: y\r\n".repeat(1000);
    let long = format!("x: {}\r\n", "y".repeat(300_000));
    let path = format!("/{}", "y".repeat(LONGEST_URI));
    for (head, status, code, kind) in [
        (format!("GET / HTTP/1.1\r\n{many}\r\n"), "431", "headers_too_large", "headers_too_large"),
        (format!("GET / HTTP/1.1\r\n{long}\r\n"), "431", "headers_too_large", "headers_too_large"),
        (format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n"), "414", "uri_too_long", "uri_too_long"),
        ("GET / HTTP/9.9\r\n\r\n".to_owned(), "400", "malformed_head", "invalid_header"),
        ("GET /\r\nno colon\r\n\r\n".to_owned(), "400", "malformed_head", "invalid_header"),
    ] {
        for (address, media, word) in [
            (router.proxy_address(), "application/json", format!("\"code\":\"{code}\"")),
            (router.operator_address(), "application/problem+json", format!("urn:ownerserve:problem:{kind}\"")),
        ] {
            // A request before it, whose answer must not be held back.
            let mut client = raw(address, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n").await;
            read_until(&mut client, "\r\n\r\nok").await;
            tokio::io::AsyncWriteExt::write_all(&mut client, head.as_bytes()).await.unwrap();
            let answer = read_to_end(&mut client).await;
            let (head, body) = answer.trim_start().split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
            assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
            assert!(head.contains(&format!("content-type: {media}")) && head.contains("connection: close"), "{answer}");
            assert!(body.contains(&word) && serde_json::from_str::<serde_json::Value>(body).is_ok(), "{answer}");
        }
    }
}

#[test]
fn frequent_warnings_are_rate_limited_and_counted() {
    let (mut warning, begun) = (RareWarning::default(), Instant::now());
    assert_eq!(warning.record(begun), Some(1));
    assert_eq!((warning.record(begun), warning.record(begun)), (None, None));
    assert_eq!(warning.record(begun + WARN_INTERVAL), Some(3));
}

#[test]
fn connection_with_a_panicked_task_is_closed() {
    let open = IntGauge::new("open", "of a test").unwrap();
    let counted = OpenConnectionGuard::count(&open);
    let panicked = std::thread::spawn(move || {
        let _open = counted;
        panic!("a bug");
    });
    assert!(panicked.join().is_err());
    assert_eq!(open.get(), 0);
}

#[tokio::test]
async fn strangers_keep_no_client_out_where_more_of_them_may_come_than_there_are_connections() {
    let worker = StubWorker::start("one", "tiny").await;
    let settings = [
        "proxy.max_connections=4",
        "proxy.max_unauthenticated_connections=1024",
        "proxy.max_unauthenticated_connections_per_address=1024",
        "proxy.authentication_timeout=\"60s\"",
    ];
    let router = start_router(&[&worker], &settings).await;
    let mut strangers = Vec::new();
    for _ in 0..20 {
        strangers.push(raw(router.proxy_address(), b"GET /v1/models HTTP/1.1\r\nx-unfinished: ").await);
    }
    let probe = tokio::time::timeout(Duration::from_secs(20), get(router.proxy_address(), "/livez")).await;
    assert_eq!(probe.expect("a stranger gave way").status, 200);
}
