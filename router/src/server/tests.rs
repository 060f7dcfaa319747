use super::*;
use crate::testing::{Worker, front, get, post, raw, read_until, request_bytes, rest};

const STREAM: &str = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"stream\"}";

#[tokio::test]
async fn accepted_connections_send_without_delay() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    assert!(next_stream(&listener).await.nodelay().unwrap());
    drop(client);
}

#[tokio::test]
async fn a_connection_serves_many_requests() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let mut client = raw(front.proxy_address(), b"").await;
    for _ in 0..3 {
        tokio::io::AsyncWriteExt::write_all(&mut client, &request_bytes("/tokenize", "{}")).await.unwrap();
        read_until(&mut client, "served_by").await;
    }
    assert_eq!(worker.seen().len(), 3);
}

#[tokio::test]
async fn beyond_the_cap_connections_wait_for_a_place() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &["proxy.connections=1"]).await;
    let mut first = raw(front.proxy_address(), &request_bytes("/v1/completions", STREAM)).await;
    read_until(&mut first, "data: 0").await;
    let mut second = raw(front.proxy_address(), b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await;
    let waiting = tokio::time::timeout(Duration::from_millis(100), rest(&mut second)).await;
    assert!(waiting.is_err(), "there was no place for it");
    drop(first);
    assert!(rest(&mut second).await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn stopping_lets_running_requests_end_and_takes_no_new_ones() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    let address = front.proxy_address();
    let mut idle = raw(address, b"").await;
    let body = "{\"model\":\"tiny\",\"messages\":[],\"prompt\":\"\",\"behave\":\"two writes\"}";
    let mut running = raw(address, &request_bytes("/v1/completions", body)).await;
    read_until(&mut running, "data: a").await;
    let stopping = tokio::spawn(front.stop());
    read_until(&mut running, "data: b").await;
    let ended = tokio::time::timeout(Duration::from_secs(1), stopping).await;
    ended.expect("nothing keeps it from ending").unwrap();
    assert_eq!(rest(&mut idle).await, "");
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn what_does_not_end_in_time_is_cut() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &["proxy.drain_timeout=\"100ms\""]).await;
    let mut endless = raw(front.proxy_address(), &request_bytes("/v1/completions", STREAM)).await;
    read_until(&mut endless, "data: 0").await;
    tokio::time::timeout(Duration::from_secs(2), front.stop()).await.expect("bounded by the drain time-out");
    crate::testing::until("the worker was told", || worker.at_work.count() == 0).await;
}

#[tokio::test]
async fn what_is_no_http_harms_nobody() {
    let worker = Worker::start("one", "tiny").await;
    let front = front(&[&worker], &[]).await;
    for bytes in
        [&b"\x16\x03\x01\x02\x00\x01\x00\x01"[..], b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        let mut client = raw(front.proxy_address(), bytes).await;
        tokio::io::AsyncWriteExt::shutdown(&mut client).await.unwrap();
        let answer = rest(&mut client).await;
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 4"), "{answer}");
    }
    let many = "x: y\r\n".repeat(1000);
    let mut client = raw(front.proxy_address(), format!("GET / HTTP/1.1\r\n{many}\r\n").as_bytes()).await;
    assert!(rest(&mut client).await.starts_with("HTTP/1.1 431"));
    assert_eq!(get(front.proxy_address(), "/livez").await.status, 200);
    assert_eq!(post(front.proxy_address(), "/tokenize", "{}").await.status, 200);
}
