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
const MAX_BODY_BYTES: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1000);

/// An answer.
pub(crate) struct HttpReply {
    /// Its status.
    pub(crate) status: StatusCode,
    /// Its headers.
    pub(crate) headers: HeaderMap,
    /// Its body.
    pub(crate) body: Bytes,
}

/// Why there is none.
#[derive(Debug)]
pub(crate) enum HttpFailure {
    /// The request never left.
    NotSent(String),
    /// It may have been read and executed.
    Lost(String),
}

impl std::fmt::Display for HttpFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            HttpFailure::NotSent(why) => write!(f, "not sent: {why}"),
            HttpFailure::Lost(why) => write!(f, "lost: {why}"),
        }
    }
}

/// One connection, made when it is needed and forgotten when it breaks.
pub(crate) struct KeepAliveConnection {
    address: SocketAddr,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl KeepAliveConnection {
    /// To `address`; nothing is sent yet.
    pub(crate) fn new(address: SocketAddr) -> KeepAliveConnection {
        KeepAliveConnection { address, sender: None }
    }

    /// Sends a request and reads the whole answer.
    pub(crate) async fn request(
        &mut self,
        request: Request<Full<Bytes>>,
        within: Duration,
    ) -> Result<HttpReply, HttpFailure> {
        let asked = tokio::time::timeout(within, self.exchange(request)).await;
        let answer = asked.unwrap_or_else(|_| Err(HttpFailure::Lost(format!("no answer within {within:?}"))));
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
    ) -> Result<Response<Incoming>, HttpFailure> {
        let asked = tokio::time::timeout(within, self.send(request)).await;
        asked.unwrap_or_else(|_| Err(HttpFailure::Lost(format!("no answer within {within:?}"))))
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<HttpReply, HttpFailure> {
        let (parts, body) = self.send(request).await?.into_parts();
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
        let body = body.map_err(|error| HttpFailure::Lost(error.to_string()))?.to_bytes();
        Ok(HttpReply { status: parts.status, headers: parts.headers, body })
    }

    async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, HttpFailure> {
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
            Err(error) if error.is_canceled() => Err(HttpFailure::NotSent(error.to_string())),
            Err(error) => Err(HttpFailure::Lost(error.to_string())),
        }
    }

    async fn connect(&self) -> Result<SendRequest<Full<Bytes>>, HttpFailure> {
        let not_sent = |error: &dyn std::fmt::Display| HttpFailure::NotSent(error.to_string());
        let connecting = tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(self.address)).await;
        let stream = connecting.map_err(|late| not_sent(&late))?.map_err(|error| not_sent(&error))?;
        stream.set_nodelay(true).map_err(|error| not_sent(&error))?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|error| not_sent(&error))?;
        // It ends when the sender is dropped or the other side closes; its errors reach the sender.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }
}
