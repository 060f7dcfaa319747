//! Keep-alive HTTP/1.1 connection that tells whether a failed request may have been executed.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Maximum response size read.
const MAX_BODY_BYTES: usize = 64 << 20;
const CONNECT_TIMEOUT: Duration = Duration::from_millis(1000);

/// HTTP response.
pub(crate) struct HttpReply {
    /// Status code.
    pub(crate) status: StatusCode,
    /// Headers.
    pub(crate) headers: HeaderMap,
    /// Body.
    pub(crate) body: Bytes,
}

/// Failure of a request.
#[derive(Debug)]
pub(crate) enum HttpFailure {
    /// The request was never sent.
    NotSent(String),
    /// The request may have been received and executed.
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

/// Connection that is opened on demand and dropped when it breaks.
pub(crate) struct KeepAliveConnection {
    address: SocketAddr,
    sender: Option<SendRequest<Full<Bytes>>>,
}

impl KeepAliveConnection {
    /// Creates a connection to `address`, not connected yet.
    pub(crate) fn new(address: SocketAddr) -> KeepAliveConnection {
        KeepAliveConnection { address, sender: None }
    }

    /// Sends a request and reads the whole response.
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

    /// Sends a request and returns with the response head; the body is a stream.
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
            // Only a request that hyper has not begun to write is certainly not received.
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
        // The task ends when the sender is dropped or the peer closes; errors reach the sender.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }
}
