//! Minimal worker on its own thread: reads the request, responds at once, and has no notion of tokens.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::ProxyBenchError;

/// Name of the served model.
pub(crate) const MODEL: &str = "bench";
const MODELS: &str = r#"{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"bench"}]}"#;
/// Precedes the shape of the response in a prompt's text.
pub(crate) const SHAPE_MARK: &str = "[bench ";
/// Bytes of the shape.
const SHAPE_BYTES: usize = 64;

/// Starts the worker; it ends with this process.
pub(crate) fn start() -> Result<SocketAddr, ProxyBenchError> {
    let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(ProxyBenchError::system("listen for a worker"))?;
    listener.set_nonblocking(true).map_err(ProxyBenchError::system("listen for a worker"))?;
    let address = listener.local_addr().map_err(ProxyBenchError::system("listen for a worker"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(ProxyBenchError::system("start a worker"))?;
    std::thread::spawn(move || {
        runtime.block_on(async {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            while let Ok((connection, _)) = listener.accept().await {
                // A broken connection is reported by the client.
                tokio::spawn(async move { serve(connection).await.ok() });
            }
        });
    });
    Ok(address)
}

async fn serve(mut connection: TcpStream) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(64 << 10);
    loop {
        let head = loop {
            if let Some(end) = body_offset(&buffer) {
                break end;
            }
            if connection.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        };
        let length = content_length(&buffer[..head]);
        buffer.reserve((head + length).saturating_sub(buffer.len()));
        while buffer.len() < head + length {
            if connection.read_buf(&mut buffer).await? == 0 {
                return Ok(());
            }
        }
        let streamed = buffer.starts_with(b"POST /v1/chat/completions");
        if streamed {
            let shape = shape_in(&buffer[head..head + length]);
            stream(&mut connection, number(&shape, "events"), number(&shape, "pause_us")).await?;
        } else {
            let body = if buffer.starts_with(b"GET /v1/models") { MODELS } else { "" };
            let answer = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            connection.write_all(answer.as_bytes()).await?;
        }
        buffer.drain(..head + length);
    }
}

async fn stream(connection: &mut TcpStream, events: u64, pause_us: u64) -> std::io::Result<()> {
    let mut out = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for at in 0..events.clamp(1, 10_000) {
        let choice = format!(r#"{{"index":0,"delta":{{"content":"t{at} "}},"finish_reason":null}}"#);
        event(&mut out, &choice);
        if pause_us > 0 {
            connection.write_all(&out).await?;
            out.clear();
            tokio::time::sleep(Duration::from_micros(pause_us)).await;
        }
    }
    event(&mut out, r#"{"index":0,"delta":{},"finish_reason":"stop"}"#);
    out.extend_from_slice(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    connection.write_all(&out).await
}

fn event(out: &mut Vec<u8>, choice: &str) {
    let data = format!(
        "data: {{\"id\":\"c\",\"object\":\"chat.completion.chunk\",\"created\":1,\"model\":\"{MODEL}\",\"choices\":[{choice}]}}\n\n"
    );
    out.extend_from_slice(format!("{:x}\r\n{data}\r\n", data.len()).as_bytes());
}

/// Returns the text behind the mark; empty without it.
fn shape_in(body: &[u8]) -> String {
    let mark = SHAPE_MARK.as_bytes();
    let start = body.windows(mark.len()).position(|window| window == mark).unwrap_or(body.len());
    String::from_utf8_lossy(&body[start..(start + SHAPE_BYTES).min(body.len())]).into_owned()
}

/// Returns a number of the shape; 0 without it.
fn number(shape: &str, name: &str) -> u64 {
    let after = shape.split_once(&format!("{name}=")).map_or("", |(_, after)| after);
    let digits: String = after.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// Returns the offset of the body.
pub(crate) fn body_offset(buffer: &[u8]) -> Option<usize> {
    buffer.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
}

/// Returns the Content-Length of a head; 0 without one.
pub(crate) fn content_length(head: &[u8]) -> usize {
    let text = String::from_utf8_lossy(head).to_ascii_lowercase();
    let value = text.lines().find_map(|line| line.strip_prefix("content-length:").map(str::trim).map(str::to_owned));
    value.and_then(|value| value.parse().ok()).unwrap_or(0)
}
