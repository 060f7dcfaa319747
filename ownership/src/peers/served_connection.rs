//! Server side of a connection: reads requests, dispatches them to handlers, writes the answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::peers::caller_identity::CallerIdentity;
use crate::peers::error::PeerError;
use crate::peers::frame::{self, FrameKind, MAX_PAYLOAD, PeerFrame};
use crate::peers::tls::ByteStream;

/// Maximum number of exchanges in progress per connection.
const MAX_EXCHANGES: usize = 1_024;

/// Maximum number of queued pieces of one request; beyond it the connection waits.
const MAX_QUEUED_PIECES: usize = 64;

/// Maximum number of frames that wait to be written.
const QUEUE_FRAMES: usize = 256;

/// Time without frames after which a connection is closed; callers ping more often than this.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a write may be blocked by the other side.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// One request, and the way to answer it.
pub(crate) struct IncomingExchange {
    pub(crate) method: u8,
    pub(crate) first: Bytes,
    /// Further pieces of the request; `None` if it is complete.
    pub(crate) more: Option<mpsc::Receiver<Bytes>>,
    pub(crate) replies: ReplySender,
}

/// Sends the answer to the caller.
pub(crate) struct ReplySender {
    exchange: u64,
    frames: mpsc::Sender<PeerFrame>,
}

impl ReplySender {
    /// Sends one piece of the answer; fails if the caller is gone.
    pub(crate) async fn send(&self, payload: Bytes) -> Result<(), PeerError> {
        let bytes = payload.len();
        if bytes > MAX_PAYLOAD {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_PAYLOAD as u64 });
        }
        let frame = PeerFrame::new(FrameKind::Reply, self.exchange, payload);
        self.frames.send(frame).await.map_err(|_| PeerError::Failed("the caller is gone".into()))
    }

    /// Sends the only answer, or the error.
    pub(crate) async fn finish(self, answer: Result<Bytes, PeerError>) {
        let sent = match answer {
            Ok(payload) => self.send(payload).await,
            Err(error) => Err(error),
        };
        match sent {
            Ok(()) => self.done().await,
            Err(error) => self.fail(error).await,
        }
    }

    pub(crate) async fn done(self) {
        // A caller that is gone needs no answer.
        drop(self.frames.send(PeerFrame::without_payload(FrameKind::Done, self.exchange)).await);
    }

    pub(crate) async fn fail(self, error: PeerError) {
        let body = rmp_serde::to_vec(&error).unwrap_or_default();
        drop(self.frames.send(PeerFrame::new(FrameKind::Fail, self.exchange, body.into())).await);
    }
}

pub(crate) trait ExchangeHandler: Send + Sync + 'static {
    fn handle(self: Arc<Self>, caller: Arc<CallerIdentity>, exchange: IncomingExchange) -> BoxFuture<'static, ()>;
}

/// Serves one greeted connection until it ends.
pub(crate) async fn serve<A: ExchangeHandler>(
    stream: Box<dyn ByteStream>,
    caller: Arc<CallerIdentity>,
    answerer: Arc<A>,
) -> std::io::Result<()> {
    let (reader, writer) = tokio::io::split(stream);
    let (frames, queue) = mpsc::channel(QUEUE_FRAMES);
    let serving = ServedConnection { caller, answerer, frames, open: HashMap::new(), tasks: JoinSet::new() };
    tokio::select! {
        read = serving.run(reader) => read,
        written = write_all(writer, queue) => written,
    }
}

async fn write_all<W: AsyncWrite + Unpin>(to: W, mut queue: mpsc::Receiver<PeerFrame>) -> std::io::Result<()> {
    let mut to = BufWriter::with_capacity(64 << 10, to);
    let mut burst = Vec::with_capacity(QUEUE_FRAMES);
    while queue.recv_many(&mut burst, QUEUE_FRAMES).await > 0 {
        let write = async {
            for frame in burst.drain(..) {
                frame::write(&mut to, &frame).await?;
            }
            to.flush().await
        };
        timeout(WRITE_TIMEOUT, write).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    }
    Ok(())
}

/// State of one connection. Handlers in progress end with it.
struct ServedConnection<A> {
    caller: Arc<CallerIdentity>,
    answerer: Arc<A>,
    frames: mpsc::Sender<PeerFrame>,
    open: HashMap<u64, mpsc::Sender<Bytes>>,
    tasks: JoinSet<()>,
}

impl<A: ExchangeHandler> ServedConnection<A> {
    async fn run<R: AsyncRead + Unpin>(mut self, from: R) -> std::io::Result<()> {
        let mut from = BufReader::with_capacity(64 << 10, from);
        loop {
            let frame =
                timeout(IDLE_TIMEOUT, frame::read(&mut from)).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
            let Some(frame) = frame else { return Ok(()) };
            // Removes finished handlers.
            while self.tasks.try_join_next().is_some() {}
            match frame.kind {
                FrameKind::Ask | FrameKind::Open => self.open(frame).await,
                FrameKind::More => {
                    if let Some(pieces) = self.open.get(&frame.exchange) {
                        // Waiting here applies back-pressure to the caller; every lane has its own connection.
                        if pieces.send(frame.payload).await.is_err() {
                            self.open.remove(&frame.exchange);
                        }
                    }
                }
                FrameKind::End => drop(self.open.remove(&frame.exchange)),
                FrameKind::Ping => {
                    drop(self.frames.send(PeerFrame::without_payload(FrameKind::Pong, frame.exchange)).await)
                }
                FrameKind::Reply | FrameKind::Done | FrameKind::Fail | FrameKind::Pong => {
                    let what = "an answer where a question was expected";
                    return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
                }
            }
        }
    }

    async fn open(&mut self, frame: PeerFrame) {
        let replies = ReplySender { exchange: frame.exchange, frames: self.frames.clone() };
        if self.tasks.len() >= MAX_EXCHANGES {
            return replies.fail(PeerError::Busy).await;
        }
        let more = (frame.kind == FrameKind::Open).then(|| {
            let (pieces, more) = mpsc::channel(MAX_QUEUED_PIECES);
            self.open.retain(|_, pieces| !pieces.is_closed());
            self.open.insert(frame.exchange, pieces);
            more
        });
        let exchange = IncomingExchange { method: frame.method, first: frame.payload, more, replies };
        self.tasks.spawn(self.answerer.clone().handle(self.caller.clone(), exchange));
    }
}
