//! The way to one node on one lane: connects when it is needed, again when it broke, and carries many calls at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, BufReader, BufWriter, WriteHalf};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};

use crate::peers::error::PeerError;
use crate::peers::frame::{self, Frame, Kind, MAX_PAYLOAD};
use crate::peers::method::Method;
use crate::peers::socket::{Dialer, Duplex};

/// Frames that wait to be written.
const QUEUE: usize = 256;

/// Calls that wait for an answer.
const MAX_CALLS: usize = 1_024;

/// The wait after the first failed attempt; it doubles.
const FIRST_WAIT: Duration = Duration::from_millis(50);

/// The longest wait between two attempts.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How often a connection is looked after.
const LOOK: Duration = Duration::from_millis(500);

/// Silence after which the other side is asked whether it is there, while somebody waits for it.
const SILENCE: Duration = Duration::from_secs(1);

/// Silence after which a connection is given up, or a write that does not get through.
const DEAD: Duration = Duration::from_secs(4);

enum Waiting {
    One(oneshot::Sender<Result<Bytes, PeerError>>),
    /// A sequence of answers.
    Many(mpsc::Sender<Result<Bytes, PeerError>>),
}

impl Waiting {
    fn fail(self, error: PeerError) {
        match self {
            // Whoever waited may have gone.
            Waiting::One(answer) => drop(answer.send(Err(error))),
            Waiting::Many(answers) => drop(answers.try_send(Err(error))),
        }
    }

    fn is_gone(&self) -> bool {
        match self {
            Waiting::One(answer) => answer.is_closed(),
            Waiting::Many(answers) => answers.is_closed(),
        }
    }
}

/// What a link's task is asked to do.
enum Outgoing {
    Open { method: u8, exchange: u64, payload: Bytes, waiting: Waiting },
    More { exchange: u64, payload: Bytes },
    End { exchange: u64 },
}

/// A way to a node. Dropping the last handle closes the connection.
#[derive(Clone)]
pub(crate) struct Link {
    outgoing: mpsc::Sender<Outgoing>,
    next: Arc<AtomicU64>,
}

impl Link {
    /// A link that dials when it is first used.
    pub(crate) fn new(dialer: Dialer) -> Self {
        let (outgoing, queue) = mpsc::channel(QUEUE);
        tokio::spawn(Way { dialer, failures: 0, retry_at: None }.run(queue));
        Self { outgoing, next: Arc::default() }
    }

    /// Asks once and waits for the one answer.
    pub(crate) async fn call(&self, method: Method, payload: Bytes, within: Duration) -> Result<Bytes, PeerError> {
        let asked = async { self.ask(method, payload).await?.answer().await };
        let late = |_| PeerError::TimedOut { millis: within.as_millis() as u64 };
        timeout(within, asked).await.map_err(late)?
    }

    /// Asks once. When this returns, the question has its place in the order of this link's questions.
    pub(crate) async fn ask(&self, method: Method, payload: Bytes) -> Result<Pending, PeerError> {
        let (answer, answered) = oneshot::channel();
        self.open(method, payload, Waiting::One(answer)).await?;
        Ok(Pending(answered))
    }

    /// Begins a conversation in which `expected` answers at most may wait to be taken.
    pub(crate) async fn converse(
        &self,
        method: Method,
        payload: Bytes,
        expected: usize,
    ) -> Result<(Speaker, Answers), PeerError> {
        let (answers, answered) = mpsc::channel(expected);
        let exchange = self.open(method, payload, Waiting::Many(answers)).await?;
        Ok((Speaker { outgoing: self.outgoing.clone(), exchange, is_over: false }, answered))
    }

    async fn open(&self, method: Method, payload: Bytes, waiting: Waiting) -> Result<u64, PeerError> {
        let bytes = payload.len();
        if bytes > MAX_PAYLOAD {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_PAYLOAD as u64 });
        }
        let exchange = self.next.fetch_add(1, Relaxed);
        let open = Outgoing::Open { method: method as u8, exchange, payload, waiting };
        self.outgoing.send(open).await.map_err(|_| gone())?;
        Ok(exchange)
    }
}

/// An answer on its way.
pub(crate) struct Pending(oneshot::Receiver<Result<Bytes, PeerError>>);

impl Pending {
    pub(crate) async fn answer(self) -> Result<Bytes, PeerError> {
        self.0.await.unwrap_or_else(|_| Err(lost()))
    }
}

pub(crate) type Answers = mpsc::Receiver<Result<Bytes, PeerError>>;

/// The asking side of a conversation. Dropped, it says that nothing more comes: else the other side would wait for it
/// and keep what it holds for it.
pub(crate) struct Speaker {
    outgoing: mpsc::Sender<Outgoing>,
    exchange: u64,
    is_over: bool,
}

impl Speaker {
    pub(crate) async fn say(&self, payload: Bytes) -> Result<(), PeerError> {
        self.outgoing.send(Outgoing::More { exchange: self.exchange, payload }).await.map_err(|_| gone())
    }

    /// Nothing more will be said.
    pub(crate) async fn end(mut self) -> Result<(), PeerError> {
        self.outgoing.send(Outgoing::End { exchange: self.exchange }).await.map_err(|_| gone())?;
        self.is_over = true;
        Ok(())
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (outgoing, end) = (self.outgoing.clone(), Outgoing::End { exchange: self.exchange });
        // Behind what waits to be written; the task ends with the link at the latest. A link that is gone has told the
        // other side already.
        if let Err(mpsc::error::TrySendError::Full(end)) = outgoing.try_send(end)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { outgoing.send(end).await.is_ok() });
        }
    }
}

/// Its link went while the answer was on its way: the node was removed, or this one is closing.
fn lost() -> PeerError {
    PeerError::Lost { address: "the node".into(), why: "its link was closed".into() }
}

fn gone() -> PeerError {
    PeerError::Unreachable { address: "the link".into(), why: "this node is closing".into() }
}

type Calls = Arc<Mutex<HashMap<u64, Waiting>>>;

/// The task of a link while it is not connected.
struct Way {
    dialer: Dialer,
    failures: u32,
    retry_at: Option<(Instant, PeerError)>,
}

impl Way {
    async fn run(mut self, mut queue: mpsc::Receiver<Outgoing>) {
        while let Some(first) = queue.recv().await {
            // Pieces of a conversation that broke with its connection.
            let Outgoing::Open { .. } = first else { continue };
            if let Some((_, error)) = self.retry_at.as_ref().filter(|(at, _)| Instant::now() < *at) {
                refuse(first, error.clone());
                continue;
            }
            match self.dialer.dial().await {
                Err(error) => {
                    let wait = (FIRST_WAIT * 2u32.saturating_pow(self.failures.min(10))).min(LONGEST_WAIT);
                    self.failures += 1;
                    self.retry_at = Some((Instant::now() + wait, error.clone()));
                    refuse(first, error);
                }
                Ok(socket) => {
                    (self.failures, self.retry_at) = (0, None);
                    let error = carry(socket, first, &mut queue).await;
                    tracing::debug!(address = self.dialer.address(), %error, "a connection to another node ended");
                }
            }
        }
    }
}

fn refuse(outgoing: Outgoing, error: PeerError) {
    if let Outgoing::Open { waiting, .. } = outgoing {
        waiting.fail(error);
    }
}

/// Carries calls over one connection until it breaks or nobody holds the link any more.
async fn carry(socket: Duplex, first: Outgoing, queue: &mut mpsc::Receiver<Outgoing>) -> PeerError {
    let address = socket.address.clone();
    let (reader, writer) = tokio::io::split(socket.stream);
    let (calls, heard) = (Calls::default(), Arc::new(Heard::new()));
    let mut reading = tokio::spawn(listen(reader, calls.clone(), heard.clone()));
    let mut writing = Writing { to: BufWriter::with_capacity(64 << 10, writer), calls: calls.clone() };
    let why = tokio::select! {
        why = writing.run(first, queue, &heard) => why,
        why = &mut reading => why.unwrap_or_else(|error| error.to_string()),
    };
    reading.abort();
    let error = PeerError::Lost { address, why };
    let waiting: Vec<_> = calls.lock().drain().collect();
    waiting.into_iter().for_each(|(_, waiting)| waiting.fail(error.clone()));
    error
}

/// When the other side was last heard.
struct Heard {
    start: Instant,
    last_ms: AtomicU64,
}

impl Heard {
    fn new() -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    fn now(&self) {
        self.last_ms.store(self.start.elapsed().as_millis() as u64, Relaxed);
    }

    fn ago(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last_ms.load(Relaxed)))
    }
}

/// The writing half of a connection.
struct Writing<W> {
    to: BufWriter<W>,
    calls: Calls,
}

impl Writing<WriteHalf<Box<dyn crate::peers::socket::Stream>>> {
    /// Writes until the queue ends or the connection does; says why it stopped.
    async fn run(&mut self, first: Outgoing, queue: &mut mpsc::Receiver<Outgoing>, heard: &Heard) -> String {
        let mut next = Some(first);
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // A pause of this process is not the other side's silence: an answer must have had a chance to be read.
        let mut silent_looks = 0;
        loop {
            let written = match next.take() {
                Some(outgoing) => timeout(DEAD, self.burst(outgoing, queue)).await,
                None => Ok(Ok(())),
            };
            match written {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error.to_string(),
                Err(_) => return "it takes no more bytes".into(),
            }
            tokio::select! {
                outgoing = queue.recv() => match outgoing {
                    Some(outgoing) => next = Some(outgoing),
                    None => return "it is not needed any more".into(),
                },
                _ = look.tick() => {
                    silent_looks = if heard.ago() < SILENCE { 0 } else { silent_looks + 1 };
                    if silent_looks > (DEAD.as_millis() / LOOK.as_millis()) {
                        return format!("it has been silent for {} s", heard.ago().as_secs());
                    }
                    if silent_looks > 0 {
                        let ping = Frame::bare(Kind::Ping, 0);
                        match timeout(DEAD, self.write_now(&ping)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => return error.to_string(),
                            Err(_) => return "it takes no more bytes".into(),
                        }
                    }
                }
            }
        }
    }

    async fn write_now(&mut self, frame: &Frame) -> std::io::Result<()> {
        use tokio::io::AsyncWriteExt;
        frame::write(&mut self.to, frame).await?;
        self.to.flush().await
    }

    /// Writes one, and whatever else waits by then, in one go.
    async fn burst(&mut self, first: Outgoing, queue: &mut mpsc::Receiver<Outgoing>) -> std::io::Result<()> {
        use tokio::io::AsyncWriteExt;
        let mut next = Some(first);
        for _ in 0..QUEUE {
            let Some(outgoing) = next.take() else { break };
            if let Some(frame) = self.frame(outgoing) {
                frame::write(&mut self.to, &frame).await?;
            }
            next = queue.try_recv().ok();
        }
        if let Some(last) = next.and_then(|outgoing| self.frame(outgoing)) {
            frame::write(&mut self.to, &last).await?;
        }
        self.to.flush().await
    }

    /// The frame to write, unless nobody would wait for the answer.
    fn frame(&self, outgoing: Outgoing) -> Option<Frame> {
        let mut calls = self.calls.lock();
        match outgoing {
            Outgoing::Open { method, exchange, payload, waiting } => {
                if calls.len() >= MAX_CALLS {
                    calls.retain(|_, waiting| !waiting.is_gone());
                }
                if waiting.is_gone() {
                    return None;
                }
                if calls.len() >= MAX_CALLS {
                    waiting.fail(PeerError::Busy);
                    return None;
                }
                let kind = if matches!(waiting, Waiting::One(_)) { Kind::Ask } else { Kind::Open };
                calls.insert(exchange, waiting);
                Some(Frame { kind, method, exchange, payload })
            }
            Outgoing::More { exchange, payload } => {
                calls.contains_key(&exchange).then(|| Frame::new(Kind::More, exchange, payload))
            }
            Outgoing::End { exchange } => calls.contains_key(&exchange).then(|| Frame::bare(Kind::End, exchange)),
        }
    }
}

/// Reads answers and hands them out until the connection ends; says why it did.
async fn listen<R: AsyncRead + Unpin>(from: R, calls: Calls, heard: Arc<Heard>) -> String {
    let mut from = BufReader::with_capacity(64 << 10, from);
    loop {
        let frame = match frame::read(&mut from).await {
            Ok(Some(frame)) => frame,
            Ok(None) => return "it closed the connection".into(),
            Err(error) => return error.to_string(),
        };
        heard.now();
        let mut calls = calls.lock();
        match frame.kind {
            Kind::Reply => {
                let goes_on = match calls.get(&frame.exchange) {
                    // More answers than were asked for, or nobody there: the conversation is over.
                    Some(Waiting::Many(answers)) => answers.try_send(Ok(frame.payload.clone())).is_ok(),
                    Some(Waiting::One(_)) | None => false,
                };
                if !goes_on && let Some(Waiting::One(answer)) = calls.remove(&frame.exchange) {
                    // Whoever asked may have gone.
                    drop(answer.send(Ok(frame.payload)));
                }
            }
            Kind::Done => drop(calls.remove(&frame.exchange)),
            Kind::Fail => {
                let error = rmp_serde::from_slice(&frame.payload);
                let error = error.unwrap_or_else(|error| PeerError::Garbled(error.to_string()));
                if let Some(waiting) = calls.remove(&frame.exchange) {
                    waiting.fail(error);
                }
            }
            Kind::Pong => {}
            Kind::Ask | Kind::Open | Kind::More | Kind::End | Kind::Ping => {
                return "it asks where it should answer".into();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speaker() -> (Speaker, mpsc::Receiver<Outgoing>) {
        let (outgoing, queue) = mpsc::channel(1);
        (Speaker { outgoing, exchange: 7, is_over: false }, queue)
    }

    #[tokio::test]
    async fn a_conversation_that_is_dropped_is_ended_once_also_behind_a_full_queue() {
        let (dropped, mut queue) = speaker();
        drop(dropped);
        assert!(matches!(queue.recv().await, Some(Outgoing::End { exchange: 7 })));
        assert!(queue.recv().await.is_none());
        let (full, mut queue) = speaker();
        full.say(Bytes::new()).await.unwrap();
        drop(full);
        assert!(matches!(queue.recv().await, Some(Outgoing::More { .. })));
        assert!(matches!(queue.recv().await, Some(Outgoing::End { exchange: 7 })));
        let (ended, mut queue) = speaker();
        ended.end().await.unwrap();
        assert!(matches!(queue.recv().await, Some(Outgoing::End { .. })) && queue.recv().await.is_none());
    }
}
