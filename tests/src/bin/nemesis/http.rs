//! A keep-alive HTTP/1.1 connection to one listener, which says whether a lost request may have been executed.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Larger answers are not read.
const MOST_BYTES: usize = 64 << 20;
const CONNECTS_WITHIN: Duration = Duration::from_millis(1000);

/// An answer.
pub(crate) struct Reply {
    /// Its status.
    pub(crate) status: StatusCode,
    /// Its headers.
    pub(crate) headers: HeaderMap,
    /// Its body.
    pub(crate) body: Bytes,
}

/// Why there is none.
#[derive(Debug)]
pub(crate) enum Silence {
    /// The request never left.
    NotSent(String),
    /// It may have been read and executed.
    Lost(String),
}

impl std::fmt::Display for Silence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Silence::NotSent(why) => write!(f, "not sent: {why}"),
            Silence::Lost(why) => write!(f, "lost: {why}"),
        }
    }
}

/// One connection, made when it is needed and forgotten when it breaks.
pub(crate) struct Line {
    address: SocketAddr,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl Line {
    /// To `address`; nothing is sent yet.
    pub(crate) fn new(address: SocketAddr) -> Line {
        Line { address, sender: None }
    }

    /// Sends a request and reads the whole answer.
    pub(crate) async fn ask(&mut self, request: Request<Full<Bytes>>, within: Duration) -> Result<Reply, Silence> {
        let asked = tokio::time::timeout(within, self.exchange(request)).await;
        let answer = asked.unwrap_or_else(|_| Err(Silence::Lost(format!("no answer within {within:?}"))));
        if answer.is_err() {
            self.sender = None;
        }
        answer
    }

    /// Sends a request and returns as soon as the answer begins; its body is a stream.
    pub(crate) async fn open(
        &mut self,
        request: Request<Full<Bytes>>,
        within: Duration,
    ) -> Result<Response<Incoming>, Silence> {
        let asked = tokio::time::timeout(within, self.send(request)).await;
        asked.unwrap_or_else(|_| Err(Silence::Lost(format!("no answer within {within:?}"))))
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<Reply, Silence> {
        let (parts, body) = self.send(request).await?.into_parts();
        let body = Limited::new(body, MOST_BYTES).collect().await;
        let body = body.map_err(|error| Silence::Lost(error.to_string()))?.to_bytes();
        Ok(Reply { status: parts.status, headers: parts.headers, body })
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Silence> {
        let mut sender = match self.sender.take() {
            Some(sender) if !sender.is_closed() => sender,
            _ => self.connect().await?,
        };
        let answer = sender.send_request(request).await;
        match answer {
            Ok(answer) => {
                self.sender = Some(sender);
                Ok(answer)
            }
            // Only what hyper has not begun to write is certain not to have arrived.
            Err(error) if error.is_canceled() => Err(Silence::NotSent(error.to_string())),
            Err(error) => Err(Silence::Lost(error.to_string())),
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, Silence> {
        let not_sent = |error: &dyn std::fmt::Display| Silence::NotSent(error.to_string());
        let connecting = tokio::time::timeout(CONNECTS_WITHIN, TcpStream::connect(self.address)).await;
        let stream = connecting.map_err(|late| not_sent(&late))?.map_err(|error| not_sent(&error))?;
        stream.set_nodelay(true).map_err(|error| not_sent(&error))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| not_sent(&error))?;
        // It ends when the sender is dropped or the other side closes; its errors reach the sender.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }
}
