//! One keep-alive connection of an ordinary client: no delay on sending, and the kernel's usual delayed acknowledgements.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::BenchError;
use crate::worker::{content_length, end_of_head};

/// A request that takes longer has failed.
const LONGEST: Duration = Duration::from_secs(20);

/// When the parts of an answer came, from just before the request was written.
#[derive(Clone, Copy)]
pub(crate) struct Timing {
    /// The first byte of the body.
    pub(crate) first_byte: Duration,
    /// The last one.
    pub(crate) whole: Duration,
}

/// A connection to one target.
pub(crate) struct Client {
    name: String,
    connection: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects.
    pub(crate) async fn connect(name: &str, address: SocketAddr) -> Result<Client, BenchError> {
        let connection = TcpStream::connect(address).await.map_err(BenchError::system(format!("connect to {name}")))?;
        connection.set_nodelay(true).map_err(BenchError::system("set TCP_NODELAY"))?;
        Ok(Client { name: name.to_owned(), connection, buffer: Vec::with_capacity(16 << 10) })
    }

    /// Sends one chat of `session` and reads its answer to the end.
    pub(crate) async fn chat(&mut self, session: &str, body: &[u8]) -> Result<Timing, BenchError> {
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-session-id: {session}\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        let request = [head.as_bytes(), body].concat();
        let exchanged = tokio::time::timeout(LONGEST, self.exchange(&request)).await;
        let late = |_| std::io::Error::from(std::io::ErrorKind::TimedOut);
        let timing =
            exchanged.map_err(late).and_then(|result| result).map_err(BenchError::system(self.name.clone()))?;
        if !self.buffer.starts_with(b"HTTP/1.1 200") || !self.buffer.windows(6).any(|window| window == b"[DONE]") {
            let got = String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(400)]).into_owned();
            return Err(BenchError::Answer { target: self.name.clone(), got });
        }
        Ok(timing)
    }

    async fn exchange(&mut self, request: &[u8]) -> std::io::Result<Timing> {
        self.buffer.clear();
        let sent = Instant::now();
        self.connection.write_all(request).await?;
        let head = loop {
            if let Some(end) = end_of_head(&self.buffer) {
                break end;
            }
            self.read().await?;
        };
        while self.buffer.len() == head && content_length(&self.buffer[..head]) == 0 && !self.ended(head) {
            self.read().await?;
        }
        let first_byte = sent.elapsed();
        while !self.ended(head) {
            self.read().await?;
        }
        Ok(Timing { first_byte, whole: sent.elapsed() })
    }

    async fn read(&mut self) -> std::io::Result<()> {
        match self.connection.read_buf(&mut self.buffer).await? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Whether the answer is whole. Answers are not pipelined, so that the last chunk ends the buffer.
    fn ended(&self, head: usize) -> bool {
        let length = content_length(&self.buffer[..head]);
        if self.buffer[..head].windows(7).any(|window| window.eq_ignore_ascii_case(b"chunked")) {
            self.buffer[head..] == *b"0\r\n\r\n" || self.buffer[head..].ends_with(b"\r\n0\r\n\r\n")
        } else {
            self.buffer.len() >= head + length
        }
    }
}
