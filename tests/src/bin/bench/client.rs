//! Keep-alive connection of an ordinary client: TCP_NODELAY on sending, the kernel's default delayed
//! acknowledgements.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Buf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::ProxyBenchError;
use crate::worker::{body_offset, content_length};

/// Timeout of a request.
const MAX_REQUEST_TIME: Duration = Duration::from_secs(60);

/// Times at which parts of the response arrived, measured from just before the request was written.
#[derive(Clone, Copy)]
pub(crate) struct ResponseTiming {
    /// First byte of the body.
    pub(crate) first_byte: Duration,
    /// Last byte of the body.
    pub(crate) whole: Duration,
}

/// Connection to one target.
pub(crate) struct BenchClient {
    name: String,
    connection: TcpStream,
    buffer: Vec<u8>,
}

impl BenchClient {
    /// Connects to a target.
    pub(crate) async fn connect(name: &str, address: SocketAddr) -> Result<BenchClient, ProxyBenchError> {
        let connection =
            TcpStream::connect(address).await.map_err(ProxyBenchError::system(format!("connect to {name}")))?;
        connection.set_nodelay(true).map_err(ProxyBenchError::system("set TCP_NODELAY"))?;
        Ok(BenchClient { name: name.to_owned(), connection, buffer: Vec::with_capacity(16 << 10) })
    }

    /// Sends one chat request of `session` and reads the whole response.
    pub(crate) async fn chat(&mut self, session: &str, body: &[u8]) -> Result<ResponseTiming, ProxyBenchError> {
        let exchanged = tokio::time::timeout(MAX_REQUEST_TIME, self.exchange(session, body)).await;
        let timing = self.in_time(exchanged)?;
        if !self.buffer.starts_with(b"HTTP/1.1 200") || !self.buffer.windows(6).any(|window| window == b"[DONE]") {
            let text = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(400)]).into_owned();
            return Err(ProxyBenchError::Answer { target: self.name.clone(), got: text });
        }
        Ok(timing)
    }

    /// Sends one chat request of `session` and reads the response up to the first bytes of its body.
    pub(crate) async fn open(&mut self, session: &str, body: &[u8]) -> Result<(), ProxyBenchError> {
        let begun = tokio::time::timeout(MAX_REQUEST_TIME, self.begin(session, body)).await;
        self.in_time(begun).map(|_| ())
    }

    fn in_time<T>(&self, done: Result<std::io::Result<T>, tokio::time::error::Elapsed>) -> Result<T, ProxyBenchError> {
        let late = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
        done.map_err(late).and_then(|result| result).map_err(ProxyBenchError::system(self.name.clone()))
    }

    async fn exchange(&mut self, session: &str, body: &[u8]) -> std::io::Result<ResponseTiming> {
        let start = Instant::now();
        let head = self.begin(session, body).await?;
        let first_byte = start.elapsed();
        while !self.is_complete(head) {
            self.read().await?;
        }
        Ok(ResponseTiming { first_byte, whole: start.elapsed() })
    }

    /// Sends the request and reads the response up to the first bytes of its body. Returns the offset of the body.
    async fn begin(&mut self, session: &str, body: &[u8]) -> std::io::Result<usize> {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-session-id: {session}\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.buffer.clear();
        let mut request = Buf::chain(head.as_bytes(), body);
        while request.has_remaining() {
            self.connection.write_buf(&mut request).await?;
        }
        let head = loop {
            if let Some(end) = body_offset(&self.buffer) {
                break end;
            }
            self.read().await?;
        };
        while self.buffer.len() == head && content_length(&self.buffer[..head]) == 0 && !self.is_complete(head) {
            self.read().await?;
        }
        Ok(head)
    }

    async fn read(&mut self) -> std::io::Result<()> {
        match self.connection.read_buf(&mut self.buffer).await? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Returns whether the response is complete. Responses are not pipelined, so the last chunk is at the end of the
    /// buffer.
    fn is_complete(&self, head: usize) -> bool {
        let length = content_length(&self.buffer[..head]);
        if self.buffer[..head].windows(7).any(|window| window.eq_ignore_ascii_case(b"chunked")) {
            self.buffer[head..] == *b"0\r\n\r\n" || self.buffer[head..].ends_with(b"\r\n0\r\n\r\n")
        } else {
            self.buffer.len() >= head + length
        }
    }
}
