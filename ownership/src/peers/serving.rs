//! The answering side of a connection: reads what is asked, lets somebody answer, writes the answers.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::peers::caller::Caller;
use crate::peers::error::PeerError;
use crate::peers::frame::{self, Frame, Kind, MAX_PAYLOAD};
use crate::peers::socket::Stream;

/// Answers under way on one connection.
const MAX_EXCHANGES: usize = 1_024;

/// Pieces of one question that wait to be taken; more makes the connection wait.
const PIECES: usize = 64;

/// Frames that wait to be written.
const QUEUE: usize = 256;

/// Callers ask at least this often whether anybody is there.
const IDLE: Duration = Duration::from_secs(60);

/// How long the other side may refuse to take bytes.
const STUCK: Duration = Duration::from_secs(10);

/// One question, and the way to answer it.
pub(crate) struct Exchange {
    pub(crate) method: u8,
    pub(crate) first: Bytes,
    /// What else is said, until the caller has said it all; none when the question is complete.
    pub(crate) more: Option<mpsc::Receiver<Bytes>>,
    pub(crate) replies: Replies,
}

/// The way back to who asked.
pub(crate) struct Replies {
    exchange: u64,
    frames: mpsc::Sender<Frame>,
}

impl Replies {
    /// One piece of an answer; an error when the caller is gone.
    pub(crate) async fn send(&self, payload: Bytes) -> Result<(), PeerError> {
        let bytes = payload.len();
        if bytes > MAX_PAYLOAD {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_PAYLOAD as u64 });
        }
        let frame = Frame::new(Kind::Reply, self.exchange, payload);
        self.frames.send(frame).await.map_err(|_| PeerError::Failed("the caller is gone".into()))
    }

    /// The one answer, or why there is none.
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
        drop(self.frames.send(Frame::bare(Kind::Done, self.exchange)).await);
    }

    pub(crate) async fn fail(self, error: PeerError) {
        let body = rmp_serde::to_vec(&error).unwrap_or_default();
        drop(self.frames.send(Frame::new(Kind::Fail, self.exchange, body.into())).await);
    }
}

pub(crate) trait Answerer: Send + Sync + 'static {
    fn answer(self: Arc<Self>, caller: Arc<Caller>, exchange: Exchange) -> BoxFuture<'static, ()>;
}

/// Serves one greeted connection until it ends.
pub(crate) async fn serve<A: Answerer>(
    stream: Box<dyn Stream>,
    caller: Arc<Caller>,
    answerer: Arc<A>,
) -> std::io::Result<()> {
    let (reader, writer) = tokio::io::split(stream);
    let (frames, queue) = mpsc::channel(QUEUE);
    let serving = Serving { caller, answerer, frames, open: HashMap::new(), tasks: JoinSet::new() };
    tokio::select! {
        read = serving.run(reader) => read,
        written = write_all(writer, queue) => written,
    }
}

async fn write_all<W: AsyncWrite + Unpin>(to: W, mut queue: mpsc::Receiver<Frame>) -> std::io::Result<()> {
    let mut to = BufWriter::with_capacity(64 << 10, to);
    let mut burst = Vec::with_capacity(QUEUE);
    while queue.recv_many(&mut burst, QUEUE).await > 0 {
        let write = async {
            for frame in burst.drain(..) {
                frame::write(&mut to, &frame).await?;
            }
            to.flush().await
        };
        timeout(STUCK, write).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
    }
    Ok(())
}

/// One connection's state. Answers under way end with it.
struct Serving<A> {
    caller: Arc<Caller>,
    answerer: Arc<A>,
    frames: mpsc::Sender<Frame>,
    open: HashMap<u64, mpsc::Sender<Bytes>>,
    tasks: JoinSet<()>,
}

impl<A: Answerer> Serving<A> {
    async fn run<R: AsyncRead + Unpin>(mut self, from: R) -> std::io::Result<()> {
        let mut from = BufReader::with_capacity(64 << 10, from);
        loop {
            let frame = timeout(IDLE, frame::read(&mut from)).await.map_err(|_| std::io::ErrorKind::TimedOut)??;
            let Some(frame) = frame else { return Ok(()) };
            // Ended answers make room.
            while self.tasks.try_join_next().is_some() {}
            match frame.kind {
                Kind::Ask | Kind::Open => self.open(frame).await,
                Kind::More => {
                    if let Some(pieces) = self.open.get(&frame.exchange) {
                        // Waiting here holds the caller back; every lane has a connection of its own.
                        if pieces.send(frame.payload).await.is_err() {
                            self.open.remove(&frame.exchange);
                        }
                    }
                }
                Kind::End => drop(self.open.remove(&frame.exchange)),
                Kind::Ping => drop(self.frames.send(Frame::bare(Kind::Pong, frame.exchange)).await),
                Kind::Reply | Kind::Done | Kind::Fail | Kind::Pong => {
                    let what = "an answer where a question was expected";
                    return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
                }
            }
        }
    }

    async fn open(&mut self, frame: Frame) {
        let replies = Replies { exchange: frame.exchange, frames: self.frames.clone() };
        if self.tasks.len() >= MAX_EXCHANGES {
            return replies.fail(PeerError::Busy).await;
        }
        let more = (frame.kind == Kind::Open).then(|| {
            let (pieces, more) = mpsc::channel(PIECES);
            self.open.retain(|_, pieces| !pieces.is_closed());
            self.open.insert(frame.exchange, pieces);
            more
        });
        let exchange = Exchange { method: frame.method, first: frame.payload, more, replies };
        self.tasks.spawn(self.answerer.clone().answer(self.caller.clone(), exchange));
    }
}
