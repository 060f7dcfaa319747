//! Connections to the workers. The request that uses a connection also drives it, so that an answer reaches the client
//! without a switch between tasks, and events that arrive together leave together.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::header::HOST;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::body::Incoming as HyperBody;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tower::ServiceExt as _;

use super::outgoing_body::OutgoingBody;
use super::wake_filter::WakeFilter;
use super::{UpstreamError, error_chain};

/// Frames of an abandoned answer that are discarded to find its end, so that its connection can be used again.
const MAX_DISCARDED_FRAMES: usize = 16;

type WorkerSocket = MaybeHttpsStream<TokioIo<TcpStream>>;

/// Opens connections to workers, and keeps idle ones for later requests. Clones share them.
#[derive(Clone)]
pub(super) struct ConnectionPool {
    connector: HttpsConnector<HttpConnector>,
    idle: Arc<IdleConnections>,
}

impl ConnectionPool {
    pub(super) fn new(
        connector: HttpsConnector<HttpConnector>,
        idle_timeout: Duration,
        max_idle_per_worker: usize,
    ) -> Self {
        let idle = IdleConnections { by_worker: Mutex::default(), idle_timeout, max_idle_per_worker };
        Self { connector, idle: Arc::new(idle) }
    }

    /// Sends a request and waits for the head of its answer. A request that an idle connection did not take, because
    /// the worker had closed it meanwhile, is sent on another one.
    pub(super) async fn send(
        &self,
        mut request: Request<OutgoingBody>,
    ) -> Result<Response<ConnectionBody>, UpstreamError> {
        let address = WorkerAddress::take(request.uri_mut())?;
        request.headers_mut().entry(HOST).or_insert(address.host_header()?);
        loop {
            let (mut connection, is_reused) = match self.idle.take(&address) {
                Some(connection) => (connection, true),
                None => (self.connect(&address).await?, false),
            };
            match connection.send(request).await {
                Ok(answer) => {
                    let idle = self.idle.clone();
                    return Ok(answer.map(|body| ConnectionBody { body, connection: Some(connection), address, idle }));
                }
                Err(mut failed) => match failed.take_message() {
                    Some(unsent) if is_reused => request = unsent,
                    _ => return Err(UpstreamError::Broken(error_chain(failed.error()))),
                },
            }
        }
    }

    async fn connect(&self, address: &WorkerAddress) -> Result<Box<WorkerConnection>, UpstreamError> {
        let socket = self.connector.clone().oneshot(address.uri()?).await;
        let socket = socket.map_err(|error| UpstreamError::Connect(error_chain(&*error)))?;
        let opened = http1::handshake(socket).await;
        let (sender, connection) = opened.map_err(|error| UpstreamError::Connect(error_chain(&error)))?;
        let driver = ConnectionDriver { connection: Some(connection), is_driving: false };
        let mut connection = Box::new(WorkerConnection { sender, driver, wakes: WakeFilter::new() });
        connection.wait_ready().await.map_err(|error| UpstreamError::Broken(error_chain(&error)))?;
        Ok(connection)
    }
}

/// Scheme, host and port of a worker.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct WorkerAddress {
    scheme: Scheme,
    authority: Authority,
}

impl WorkerAddress {
    /// Takes the address out of a request's target, of which path and query remain.
    fn take(target: &mut Uri) -> Result<Self, UpstreamError> {
        let mut parts = std::mem::take(target).into_parts();
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        let (Some(scheme), Some(authority)) = (parts.scheme.take(), parts.authority.take()) else {
            return Err(UpstreamError::Unsendable("the worker's address has no scheme or no host".into()));
        };
        *target = Uri::from_parts(parts).map_err(|error| UpstreamError::Unsendable(error.to_string()))?;
        Ok(Self { scheme, authority })
    }

    fn uri(&self) -> Result<Uri, UpstreamError> {
        let uri = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone()).path_and_query("/");
        uri.build().map_err(|error| UpstreamError::Unsendable(error.to_string()))
    }

    /// Returns the value of `Host` (RFC 9110, section 7.2): without the scheme's default port.
    fn host_header(&self) -> Result<HeaderValue, UpstreamError> {
        let default_port = if self.scheme == Scheme::HTTPS { 443 } else { 80 };
        let text = match self.authority.port_u16() {
            Some(port) if port != default_port => format!("{}:{port}", self.authority.host()),
            _ => self.authority.host().to_owned(),
        };
        HeaderValue::from_str(&text).map_err(|error| UpstreamError::Unsendable(error.to_string()))
    }
}

/// An open connection. Nothing happens on it unless it is driven.
#[derive(Debug)]
struct WorkerConnection {
    sender: SendRequest<OutgoingBody>,
    driver: ConnectionDriver,
    /// The sender, the driver and the answer's body wake each other.
    wakes: WakeFilter,
}

/// Reads and writes what is possible.
#[derive(Debug)]
struct ConnectionDriver {
    /// `None` once the connection is closed.
    connection: Option<http1::Connection<WorkerSocket, OutgoingBody>>,
    /// Stays set if driving it panicked; the connection is then not touched again.
    is_driving: bool,
}

impl ConnectionDriver {
    fn drive(&mut self, cx: &mut Context<'_>) {
        let Some(connection) = self.connection.as_mut().filter(|_| !self.is_driving) else { return };
        self.is_driving = true;
        let polled = Pin::new(connection).poll(cx);
        self.is_driving = false;
        if let Poll::Ready(ended) = polled {
            if let Err(error) = ended {
                tracing::debug!(error = %error_chain(&error), "a worker's connection ended");
            }
            self.connection = None;
        }
    }

    fn is_open(&self) -> bool {
        self.connection.is_some() && !self.is_driving
    }
}

impl WorkerConnection {
    /// Whether the next request can be sent at once.
    fn is_idle(&mut self) -> bool {
        self.driver.drive(&mut Context::from_waker(Waker::noop()));
        self.driver.is_open() && self.sender.is_ready()
    }

    /// Polls the body of the answer, and reads more of it if nothing of it is there.
    fn poll_frame(
        &mut self,
        mut body: Pin<&mut HyperBody>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Self { driver, wakes, .. } = self;
        wakes.poll(cx, |cx| {
            let frame = body.as_mut().poll_frame(cx);
            if frame.is_ready() {
                return frame;
            }
            driver.drive(cx);
            body.as_mut().poll_frame(cx)
        })
    }

    async fn wait_ready(&mut self) -> hyper::Result<()> {
        let Self { sender, driver, .. } = self;
        poll_fn(|cx| {
            driver.drive(cx);
            sender.poll_ready(cx)
        })
        .await
    }

    async fn send(
        &mut self,
        request: Request<OutgoingBody>,
    ) -> Result<Response<HyperBody>, TrySendError<Request<OutgoingBody>>> {
        let Self { sender, driver, wakes } = self;
        let mut answer = pin!(sender.try_send_request(request));
        poll_fn(|cx| {
            wakes.poll(cx, |cx| {
                driver.drive(cx);
                answer.as_mut().poll(cx)
            })
        })
        .await
    }
}

/// Connections that wait for a request.
#[derive(Debug)]
struct IdleConnections {
    /// The most recently used one is the last.
    by_worker: Mutex<HashMap<WorkerAddress, Vec<IdleConnection>>>,
    idle_timeout: Duration,
    max_idle_per_worker: usize,
}

#[derive(Debug)]
struct IdleConnection {
    connection: Box<WorkerConnection>,
    since: Instant,
}

impl IdleConnections {
    /// Returns the connection that was used last, unless the worker has closed it.
    fn take(&self, address: &WorkerAddress) -> Option<Box<WorkerConnection>> {
        loop {
            let IdleConnection { mut connection, since } = self.by_worker.lock().get_mut(address)?.pop()?;
            if since.elapsed() < self.idle_timeout && connection.is_idle() {
                return Some(connection);
            }
        }
    }

    /// Keeps a connection until it is used again or expires.
    fn put(self: &Arc<Self>, address: WorkerAddress, connection: Box<WorkerConnection>) {
        // Outside of the runtime, at its shutdown, nothing would close it in time.
        let Ok(runtime) = Handle::try_current() else { return };
        let mut workers = self.by_worker.lock();
        if workers.is_empty() {
            runtime.spawn(self.clone().close_expired());
        }
        let idle = workers.entry(address).or_default();
        if idle.len() < self.max_idle_per_worker {
            idle.push(IdleConnection { connection, since: Instant::now() });
        }
    }

    /// Closes expired connections, until none is left.
    async fn close_expired(self: Arc<Self>) {
        let mut next = Instant::now() + self.idle_timeout;
        loop {
            tokio::time::sleep_until(next).await;
            let mut workers = self.by_worker.lock();
            let mut expired = Vec::new();
            workers.retain(|_, idle| {
                let count = idle.partition_point(|idle| idle.since.elapsed() >= self.idle_timeout);
                expired.extend(idle.drain(..count));
                !idle.is_empty()
            });
            let oldest = workers.values().filter_map(|idle| idle.first()).map(|idle| idle.since).min();
            drop(workers);
            drop(expired);
            match oldest {
                Some(oldest) => next = oldest + self.idle_timeout,
                None => return,
            }
        }
    }
}

/// An answer's body. Reading it drives its connection, which is used again once the body was read to its end; dropped
/// before, it closes the connection, by which engines cancel the work.
#[derive(Debug)]
pub(super) struct ConnectionBody {
    body: HyperBody,
    /// `None` once the body has ended.
    connection: Option<Box<WorkerConnection>>,
    address: WorkerAddress,
    idle: Arc<IdleConnections>,
}

impl ConnectionBody {
    fn release(&mut self) {
        if let Some(mut connection) = self.connection.take()
            && connection.is_idle()
        {
            connection.wakes.forget_task();
            self.idle.put(self.address.clone(), connection);
        }
    }
}

impl HttpBody for ConnectionBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let this = &mut *self;
        let frame = match &mut this.connection {
            None => Pin::new(&mut this.body).poll_frame(cx),
            Some(connection) => connection.poll_frame(Pin::new(&mut this.body), cx),
        };
        match &frame {
            Poll::Ready(None) => this.release(),
            Poll::Ready(Some(Err(_))) => this.connection = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ConnectionBody {
    fn drop(&mut self) {
        // The end of an answer may have arrived with its last event, after which nobody reads.
        let mut cx = Context::from_waker(Waker::noop());
        for _ in 0..MAX_DISCARDED_FRAMES {
            if self.connection.is_none() {
                return;
            }
            match Pin::new(&mut *self).poll_frame(&mut cx) {
                Poll::Ready(Some(Ok(_))) => {}
                Poll::Ready(None | Some(Err(_))) | Poll::Pending => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use futures::FutureExt as _;
    use http_body_util::BodyExt as _;
    use hyper_rustls::HttpsConnectorBuilder;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use workers_shim::engine_api::LegBody;

    use super::*;

    const STREAM: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n1\r\nb\r\n1\r\nc\r\n";
    const END: &str = "0\r\n\r\n";
    const TIMEOUT: Duration = Duration::from_secs(10);

    fn pool(idle_timeout: Duration) -> ConnectionPool {
        let tls = crate::upstream::tls();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1();
        ConnectionPool::new(connector.wrap_connector(http), idle_timeout, 8)
    }

    async fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at)
    }

    async fn get(pool: &ConnectionPool, at: SocketAddr) -> Result<Response<ConnectionBody>, UpstreamError> {
        let request =
            Request::get(format!("http://{at}/path?query")).body(OutgoingBody::from(LegBody::default())).unwrap();
        tokio::time::timeout(TIMEOUT, pool.send(request)).await.unwrap()
    }

    /// Accepts a connection.
    async fn accept(listener: &TcpListener) -> TcpStream {
        tokio::time::timeout(TIMEOUT, listener.accept()).await.unwrap().unwrap().0
    }

    /// Reads one request without a body, and returns it.
    async fn read_request(socket: &mut TcpStream) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert_ne!(tokio::time::timeout(TIMEOUT, socket.read_buf(&mut head)).await.unwrap().unwrap(), 0);
        }
        String::from_utf8(head).unwrap()
    }

    async fn answer(socket: &mut TcpStream, text: &str) {
        read_request(socket).await;
        socket.write_all(text.as_bytes()).await.unwrap();
    }

    async fn wait_closed(socket: &mut TcpStream) {
        assert_eq!(tokio::time::timeout(TIMEOUT, socket.read(&mut [0; 64])).await.unwrap().unwrap(), 0);
    }

    /// Waits until it has arrived that the worker closed the idle connections.
    async fn wait_until_end_arrived(pool: &ConnectionPool) {
        let is_open = || {
            let mut workers = pool.idle.by_worker.lock();
            workers.values_mut().flatten().any(|idle| idle.connection.is_idle())
        };
        let end = Instant::now() + TIMEOUT;
        while is_open() {
            assert!(Instant::now() < end, "an idle connection does not notice its end");
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_connection_serves_one_request_after_the_other() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        let whole = [STREAM, END].concat();
        let served = tokio::spawn(async move {
            let mut socket = accept(&listener).await;
            let request = read_request(&mut socket).await;
            socket.write_all(whole.as_bytes()).await.unwrap();
            answer(&mut socket, &whole).await;
            (request, listener.accept().now_or_never().is_none())
        });
        for _ in 0..2 {
            let body = get(&pool, at).await.unwrap().into_body().collect().await.unwrap().to_bytes();
            assert_eq!(body, "abc");
        }
        let (request, is_only_one) = served.await.unwrap();
        assert!(request.starts_with("GET /path?query HTTP/1.1\r\n"), "{request}");
        assert!(request.contains(&format!("host: {at}\r\n")), "{request}");
        assert!(is_only_one);
    }

    #[tokio::test]
    async fn a_request_that_a_closed_connection_did_not_take_is_sent_on_another_one() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        for _ in 0..3 {
            let asked = tokio::spawn({
                let pool = pool.clone();
                async move { get(&pool, at).await.unwrap().into_body().collect().await.unwrap().to_bytes() }
            });
            let mut socket = accept(&listener).await;
            answer(&mut socket, &[STREAM, END].concat()).await;
            assert_eq!(asked.await.unwrap(), "abc");
            drop(socket);
            wait_until_end_arrived(&pool).await;
        }
    }

    #[tokio::test]
    async fn frames_that_arrived_together_are_read_without_a_wait() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        let (mut body, mut socket) = {
            let (answered, socket) = tokio::join!(get(&pool, at), async {
                let mut socket = accept(&listener).await;
                answer(&mut socket, STREAM).await;
                socket
            });
            (answered.unwrap().into_body(), socket)
        };
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let mut read = vec![first];
        while let Some(frame) = body.frame().now_or_never() {
            read.push(frame.unwrap().unwrap().into_data().unwrap());
        }
        assert_eq!(read, ["a", "b", "c"]);
        drop(body);
        wait_closed(&mut socket).await;
    }

    #[tokio::test]
    async fn a_connection_outlives_an_answer_whose_end_has_arrived() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        let asked = tokio::join!(get(&pool, at), async {
            let mut socket = accept(&listener).await;
            answer(&mut socket, &[STREAM, END].concat()).await;
            socket
        });
        let (mut body, mut socket) = (asked.0.unwrap().into_body(), asked.1);
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), "a");
        drop(body);
        let (again, ()) = tokio::join!(get(&pool, at), answer(&mut socket, "HTTP/1.1 204 No Content\r\n\r\n"));
        assert_eq!(again.unwrap().status(), 204);
    }

    #[tokio::test]
    async fn a_connection_with_unread_bytes_is_not_used_again() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        for answered in ["HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc", "HTTP/1.1 204 No Content\r\n\r\n"] {
            let (body, ()) = tokio::join!(
                async { get(&pool, at).await.unwrap().into_body().collect().await.unwrap().to_bytes() },
                async {
                    let mut socket = accept(&listener).await;
                    answer(&mut socket, answered).await;
                    if answered.contains("200") {
                        wait_closed(&mut socket).await;
                    }
                }
            );
            assert_eq!(body.len(), usize::from(answered.contains("200")));
        }
    }

    #[tokio::test]
    async fn an_early_answer_closes_its_connection_after_it() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        let long = OutgoingBody::from(LegBody::from(Bytes::from(vec![b'x'; 64 << 20])));
        let request = Request::post(format!("http://{at}/")).body(long).unwrap();
        let (answered, mut socket) = tokio::join!(pool.send(request), async {
            let mut socket = accept(&listener).await;
            socket.read_exact(&mut [0; 16]).await.unwrap();
            socket.write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 1\r\n\r\na").await.unwrap();
            socket
        });
        let answered = answered.unwrap();
        assert_eq!(answered.status(), 413);
        assert_eq!(answered.into_body().collect().await.unwrap().to_bytes(), "a");
        assert!(pool.idle.by_worker.lock().is_empty());
        let mut rest = Vec::new();
        let read = tokio::time::timeout(TIMEOUT, socket.read_to_end(&mut rest)).await.unwrap();
        assert!(read.is_err() || rest.len() < 64 << 20, "the rest of the body is not sent");
    }

    #[tokio::test]
    async fn a_request_that_is_given_up_closes_its_connection() {
        let (pool, (listener, at)) = (pool(TIMEOUT), listen().await);
        let asked = tokio::spawn({
            let pool = pool.clone();
            async move { get(&pool, at).await.map(drop) }
        });
        let mut socket = accept(&listener).await;
        read_request(&mut socket).await;
        asked.abort();
        wait_closed(&mut socket).await;
    }

    #[tokio::test]
    async fn idle_connections_are_closed_in_time() {
        let (pool, (listener, at)) = (pool(Duration::from_millis(50)), listen().await);
        let (answered, mut socket) = tokio::join!(get(&pool, at), async {
            let mut socket = accept(&listener).await;
            answer(&mut socket, "HTTP/1.1 204 No Content\r\n\r\n").await;
            socket
        });
        drop(answered.unwrap());
        assert_eq!(pool.idle.by_worker.lock().values().map(Vec::len).sum::<usize>(), 1);
        wait_closed(&mut socket).await;
        assert!(pool.idle.by_worker.lock().is_empty());
    }
}
