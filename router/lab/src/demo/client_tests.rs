//! Tests of the client against a minimal server.

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use super::*;

/// Responds to one request with `response`, byte for byte, and closes.
async fn server(response: &'static str) -> (SocketAddr, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut request = Vec::new();
        while !complete(&request) {
            let mut piece = [0; 4096];
            let read = socket.read(&mut piece).await.unwrap();
            request.extend_from_slice(&piece[..read]);
        }
        socket.write_all(response.as_bytes()).await.unwrap();
        String::from_utf8(request).unwrap()
    });
    (address, seen)
}

fn complete(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request).to_lowercase();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.is_none_or(|length| body.len() >= length.parse::<usize>().unwrap())
}

async fn ask(response: &'static str) -> (Result<ServedAnswer, ProxyClientError>, String) {
    let (address, seen) = server(response).await;
    let messages = [serde_json::json!({"role": "user", "content": "hi"})];
    let ask = ChatRequest { model: "tiny", messages: &messages, max_tokens: 9 };
    let answer = ProxyClient::new().send_step(address, "demo-1", &ask).await;
    (answer, seen.await.unwrap())
}

const STREAM: &str = concat!(
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-sim-worker: w3\r\nconnection: close\r\n\r\n",
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\"on\"},\"finish_reason\":null}]}\n\n",
    "data: {\"choices\":[{\"delta\":{\"content\":\"e\"},\"finish_reason\":\"length\"}]}\n\n",
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":2,\"prompt_tokens_details\":{\"cached_tokens\":8}}}\n\n",
    "data: [DONE]\n\n",
);

#[tokio::test]
async fn streamed_answer_is_assembled_and_timed() {
    let (answer, request) = ask(STREAM).await;
    let ServedAnswer { text, measurement: answer } = answer.unwrap();
    assert_eq!((text.as_str(), answer.worker.as_deref()), ("one", Some("w3")));
    assert_eq!((answer.prompt_tokens, answer.cached_tokens), (12, 8));
    assert!(answer.first_token > Duration::ZERO && answer.first_token <= answer.total);
    assert!(request.to_lowercase().contains("x-session-id: demo-1"));
    let body: Value = serde_json::from_str(request.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    assert_eq!(body["stream_options"], serde_json::json!({"include_usage": true}));
    assert_eq!((body["stream"].as_bool(), body["max_tokens"].as_u64()), (Some(true), Some(9)));
    assert_eq!(body["messages"][0]["content"], "hi");
}

#[test]
fn null_cached_token_count_reads_as_zero() {
    let mut reading = CompletionReader { cached_tokens: 9, ..CompletionReader::default() };
    let usage = r#"{"usage":{"prompt_tokens":3,"prompt_tokens_details":null}}"#;
    reading.push_event(usage, Duration::ZERO).unwrap();
    assert_eq!((reading.prompt_tokens, reading.cached_tokens), (3, 0));
}

#[tokio::test]
async fn http_error_includes_its_body() {
    let (answer, _) = ask("HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nfull").await;
    let error = answer.unwrap_err();
    assert!(matches!(&error, ProxyClientError::Status { status: 503, body } if body == "full"), "{error}");
}

#[tokio::test]
async fn an_error_event_fails_the_step() {
    let (answer, _) =
        ask("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {\"error\":{\"message\":\"worker died\"}}\n\n").await;
    assert!(matches!(answer.unwrap_err(), ProxyClientError::ErrorEvent(text) if text.contains("worker died")));
}

#[tokio::test]
async fn truncated_stream_fails_the_step() {
    let (answer, _) =
        ask("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n")
            .await;
    assert!(matches!(answer.unwrap_err(), ProxyClientError::BrokenStream(text) if text.contains("finish reason")));
}

#[tokio::test]
async fn stream_without_done_marker_fails_the_step() {
    let (answer, _) = ask(
        "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
    )
    .await;
    assert!(matches!(answer.unwrap_err(), ProxyClientError::BrokenStream(text) if text.contains("[DONE]")));
}

#[tokio::test]
async fn refused_connection_error_includes_its_cause() {
    let address = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let error = ProxyClient::new().get_page(address, "/metrics").await.unwrap_err();
    assert!(matches!(&error, ProxyClientError::Connection(text) if text.contains("refused")), "{error}");
}
