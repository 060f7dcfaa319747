//! Link to one node on one lane: connects on demand, reconnects after a failure, and multiplexes calls.

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
use crate::peers::frame::{self, FrameKind, MAX_PAYLOAD, PeerFrame};
use crate::peers::method::PeerMethod;
use crate::peers::socket::{LaneDialer, PeerSocket};

/// Maximum number of frames that wait to be written.
const QUEUE_FRAMES: usize = 256;

/// Maximum number of unanswered calls.
const MAX_CALLS: usize = 1_024;

/// Wait after the first failed attempt; it doubles.
const MIN_BACKOFF: Duration = Duration::from_millis(50);

/// Maximum wait between two attempts.
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// How often a connection is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Silence after which the other side is pinged, while a call waits.
const PING_AFTER: Duration = Duration::from_secs(1);

/// Silence, or duration of a blocked write, after which a connection is given up.
const DEAD_AFTER: Duration = Duration::from_secs(4);

enum ReplyWaiter {
    One(oneshot::Sender<Result<Bytes, PeerError>>),
    /// A sequence of answers.
    Many(mpsc::Sender<Result<Bytes, PeerError>>),
}

impl ReplyWaiter {
    fn fail(self, error: PeerError) {
        match self {
            // The requester may be gone.
            ReplyWaiter::One(answer) => drop(answer.send(Err(error))),
            ReplyWaiter::Many(answers) => drop(answers.try_send(Err(error))),
        }
    }

    fn is_closed(&self) -> bool {
        match self {
            ReplyWaiter::One(answer) => answer.is_closed(),
            ReplyWaiter::Many(answers) => answers.is_closed(),
        }
    }
}

/// Message to a link's task.
enum OutgoingMessage {
    Open { method: u8, exchange: u64, payload: Bytes, waiting: ReplyWaiter },
    More { exchange: u64, payload: Bytes },
    End { exchange: u64 },
}

/// A link to a node. Dropping the last handle closes the connection.
#[derive(Clone)]
pub(crate) struct PeerLink {
    outgoing: mpsc::Sender<OutgoingMessage>,
    next: Arc<AtomicU64>,
}

impl PeerLink {
    /// Creates a link that dials when it is first used.
    pub(crate) fn new(dialer: LaneDialer) -> Self {
        let (outgoing, queue) = mpsc::channel(QUEUE_FRAMES);
        tokio::spawn(DisconnectedLink { dialer, failures: 0, retry_at: None }.run(queue));
        Self { outgoing, next: Arc::default() }
    }

    /// Sends one request and waits for its answer.
    pub(crate) async fn call(&self, method: PeerMethod, payload: Bytes, within: Duration) -> Result<Bytes, PeerError> {
        let call = async { self.start_call(method, payload).await?.answer().await };
        let late = |_| PeerError::TimedOut { millis: within.as_millis() as u64 };
        timeout(within, call).await.map_err(late)?
    }

    /// Sends one request. When this returns, the request has its place in the order of this link's requests.
    pub(crate) async fn start_call(&self, method: PeerMethod, payload: Bytes) -> Result<AwaitedReply, PeerError> {
        let (answer, answered) = oneshot::channel();
        self.open_call(method, payload, ReplyWaiter::One(answer)).await?;
        Ok(AwaitedReply(answered))
    }

    /// Opens an exchange. At most `expected` answers may wait to be taken.
    pub(crate) async fn open_exchange(
        &self,
        method: PeerMethod,
        payload: Bytes,
        expected: usize,
    ) -> Result<(ExchangeSender, ExchangeReceiver), PeerError> {
        let (answers, answered) = mpsc::channel(expected);
        let exchange = self.open_call(method, payload, ReplyWaiter::Many(answers)).await?;
        Ok((ExchangeSender { outgoing: self.outgoing.clone(), exchange, is_ended: false }, answered))
    }

    async fn open_call(&self, method: PeerMethod, payload: Bytes, waiting: ReplyWaiter) -> Result<u64, PeerError> {
        let bytes = payload.len();
        if bytes > MAX_PAYLOAD {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_PAYLOAD as u64 });
        }
        let exchange = self.next.fetch_add(1, Relaxed);
        let open = OutgoingMessage::Open { method: method as u8, exchange, payload, waiting };
        self.outgoing.send(open).await.map_err(|_| closing_error())?;
        Ok(exchange)
    }
}

/// A pending answer.
pub(crate) struct AwaitedReply(oneshot::Receiver<Result<Bytes, PeerError>>);

impl AwaitedReply {
    pub(crate) async fn answer(self) -> Result<Bytes, PeerError> {
        self.0.await.unwrap_or_else(|_| Err(lost_error()))
    }
}

pub(crate) type ExchangeReceiver = mpsc::Receiver<Result<Bytes, PeerError>>;

/// Request side of an exchange. Dropping it ends the request; otherwise the other side would keep waiting and hold its
/// resources.
pub(crate) struct ExchangeSender {
    outgoing: mpsc::Sender<OutgoingMessage>,
    exchange: u64,
    is_ended: bool,
}

impl ExchangeSender {
    pub(crate) async fn send(&self, payload: Bytes) -> Result<(), PeerError> {
        self.outgoing
            .send(OutgoingMessage::More { exchange: self.exchange, payload })
            .await
            .map_err(|_| closing_error())
    }

    /// Ends the request.
    pub(crate) async fn end(mut self) -> Result<(), PeerError> {
        self.outgoing.send(OutgoingMessage::End { exchange: self.exchange }).await.map_err(|_| closing_error())?;
        self.is_ended = true;
        Ok(())
    }
}

impl Drop for ExchangeSender {
    fn drop(&mut self) {
        if self.is_ended {
            return;
        }
        let (outgoing, end) = (self.outgoing.clone(), OutgoingMessage::End { exchange: self.exchange });
        // Sent after the queued frames; the task ends with the link at the latest. If the link is gone, the other side
        // knows already.
        if let Err(mpsc::error::TrySendError::Full(end)) = outgoing.try_send(end)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move { outgoing.send(end).await.is_ok() });
        }
    }
}

/// Error if the link was closed before the answer: the node was removed, or this one is closing.
fn lost_error() -> PeerError {
    PeerError::Lost { address: "the node".into(), why: "its link was closed".into() }
}

fn closing_error() -> PeerError {
    PeerError::Unreachable { address: "the link".into(), why: "this node is closing".into() }
}

type OpenCalls = Arc<Mutex<HashMap<u64, ReplyWaiter>>>;

/// Task of a link while it is not connected.
struct DisconnectedLink {
    dialer: LaneDialer,
    failures: u32,
    retry_at: Option<(Instant, PeerError)>,
}

impl DisconnectedLink {
    async fn run(mut self, mut queue: mpsc::Receiver<OutgoingMessage>) {
        while let Some(first) = queue.recv().await {
            // Drops pieces of an exchange whose connection broke.
            let OutgoingMessage::Open { .. } = first else { continue };
            if let Some((_, error)) = self.retry_at.as_ref().filter(|(at, _)| Instant::now() < *at) {
                fail_message(first, error.clone());
                continue;
            }
            match self.dialer.dial().await {
                Err(error) => {
                    let wait = (MIN_BACKOFF * 2u32.saturating_pow(self.failures.min(10))).min(MAX_BACKOFF);
                    self.failures += 1;
                    self.retry_at = Some((Instant::now() + wait, error.clone()));
                    fail_message(first, error);
                }
                Ok(socket) => {
                    (self.failures, self.retry_at) = (0, None);
                    let error = run_connection(socket, first, &mut queue).await;
                    tracing::debug!(address = self.dialer.address(), %error, "a connection to another node ended");
                }
            }
        }
    }
}

fn fail_message(outgoing: OutgoingMessage, error: PeerError) {
    if let OutgoingMessage::Open { waiting, .. } = outgoing {
        waiting.fail(error);
    }
}

/// Carries calls over one connection until it breaks or the last handle of the link is dropped.
async fn run_connection(
    socket: PeerSocket,
    first: OutgoingMessage,
    queue: &mut mpsc::Receiver<OutgoingMessage>,
) -> PeerError {
    let address = socket.address.clone();
    let (reader, writer) = tokio::io::split(socket.stream);
    let (calls, heard) = (OpenCalls::default(), Arc::new(LastContact::new()));
    let mut reading = tokio::spawn(read_answers(reader, calls.clone(), heard.clone()));
    let mut writing = LinkWriter { to: BufWriter::with_capacity(64 << 10, writer), calls: calls.clone() };
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
struct LastContact {
    start: Instant,
    last_ms: AtomicU64,
}

impl LastContact {
    fn new() -> Self {
        Self { start: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    fn touch(&self) {
        self.last_ms.store(self.start.elapsed().as_millis() as u64, Relaxed);
    }

    fn idle_time(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last_ms.load(Relaxed)))
    }
}

/// Write half of a connection.
struct LinkWriter<W> {
    to: BufWriter<W>,
    calls: OpenCalls,
}

impl LinkWriter<WriteHalf<Box<dyn crate::peers::tls::ByteStream>>> {
    /// Writes until the queue or the connection ends; returns why it stopped.
    async fn run(
        &mut self,
        first: OutgoingMessage,
        queue: &mut mpsc::Receiver<OutgoingMessage>,
        activity: &LastContact,
    ) -> String {
        let mut next = Some(first);
        let mut look = tokio::time::interval(CHECK_INTERVAL);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        // Counts checks, because a pause of this process must not count as silence: answers need a chance to be read.
        let mut silent_looks = 0;
        loop {
            let written = match next.take() {
                Some(outgoing) => timeout(DEAD_AFTER, self.write_queued(outgoing, queue)).await,
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
                    silent_looks = if activity.idle_time() < PING_AFTER { 0 } else { silent_looks + 1 };
                    if silent_looks > (DEAD_AFTER.as_millis() / CHECK_INTERVAL.as_millis()) {
                        return format!("it has been silent for {} s", activity.idle_time().as_secs());
                    }
                    if silent_looks > 0 {
                        let ping = PeerFrame::without_payload(FrameKind::Ping, 0);
                        match timeout(DEAD_AFTER, self.write_now(&ping)).await {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => return error.to_string(),
                            Err(_) => return "it takes no more bytes".into(),
                        }
                    }
                }
            }
        }
    }

    async fn write_now(&mut self, frame: &PeerFrame) -> std::io::Result<()> {
        use tokio::io::AsyncWriteExt;
        frame::write(&mut self.to, frame).await?;
        self.to.flush().await
    }

    /// Writes a frame and all others that wait, then flushes once.
    async fn write_queued(
        &mut self,
        first: OutgoingMessage,
        queue: &mut mpsc::Receiver<OutgoingMessage>,
    ) -> std::io::Result<()> {
        use tokio::io::AsyncWriteExt;
        let mut next = Some(first);
        for _ in 0..QUEUE_FRAMES {
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

    /// Returns the frame to write, unless nobody waits for its answer any more.
    fn frame(&self, outgoing: OutgoingMessage) -> Option<PeerFrame> {
        let mut calls = self.calls.lock();
        match outgoing {
            OutgoingMessage::Open { method, exchange, payload, waiting } => {
                if calls.len() >= MAX_CALLS {
                    calls.retain(|_, waiting| !waiting.is_closed());
                }
                if waiting.is_closed() {
                    return None;
                }
                if calls.len() >= MAX_CALLS {
                    waiting.fail(PeerError::Busy);
                    return None;
                }
                let kind = if matches!(waiting, ReplyWaiter::One(_)) { FrameKind::Ask } else { FrameKind::Open };
                calls.insert(exchange, waiting);
                Some(PeerFrame { kind, method, exchange, payload })
            }
            OutgoingMessage::More { exchange, payload } => {
                calls.contains_key(&exchange).then(|| PeerFrame::new(FrameKind::More, exchange, payload))
            }
            OutgoingMessage::End { exchange } => {
                calls.contains_key(&exchange).then(|| PeerFrame::without_payload(FrameKind::End, exchange))
            }
        }
    }
}

/// Reads answers and dispatches them until the connection ends; returns why it ended.
async fn read_answers<R: AsyncRead + Unpin>(from: R, calls: OpenCalls, activity: Arc<LastContact>) -> String {
    let mut from = BufReader::with_capacity(64 << 10, from);
    loop {
        let frame = match frame::read(&mut from).await {
            Ok(Some(frame)) => frame,
            Ok(None) => return "it closed the connection".into(),
            Err(error) => return error.to_string(),
        };
        activity.touch();
        let mut calls = calls.lock();
        match frame.kind {
            FrameKind::Reply => {
                let goes_on = match calls.get(&frame.exchange) {
                    // More answers than expected, or no receiver: the exchange is over.
                    Some(ReplyWaiter::Many(answers)) => answers.try_send(Ok(frame.payload.clone())).is_ok(),
                    Some(ReplyWaiter::One(_)) | None => false,
                };
                if !goes_on && let Some(ReplyWaiter::One(answer)) = calls.remove(&frame.exchange) {
                    // The requester may be gone.
                    drop(answer.send(Ok(frame.payload)));
                }
            }
            FrameKind::Done => drop(calls.remove(&frame.exchange)),
            FrameKind::Fail => {
                let error = rmp_serde::from_slice(&frame.payload);
                let error = error.unwrap_or_else(|error| PeerError::Garbled(error.to_string()));
                if let Some(waiting) = calls.remove(&frame.exchange) {
                    waiting.fail(error);
                }
            }
            FrameKind::Pong => {}
            FrameKind::Ask | FrameKind::Open | FrameKind::More | FrameKind::End | FrameKind::Ping => {
                return "it asks where it should answer".into();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exchange_sender() -> (ExchangeSender, mpsc::Receiver<OutgoingMessage>) {
        let (outgoing, queue) = mpsc::channel(1);
        (ExchangeSender { outgoing, exchange: 7, is_ended: false }, queue)
    }

    #[tokio::test]
    async fn dropping_an_exchange_sender_ends_it_once_even_with_a_full_queue() {
        let (dropped, mut queue) = exchange_sender();
        drop(dropped);
        assert!(matches!(queue.recv().await, Some(OutgoingMessage::End { exchange: 7 })));
        assert!(queue.recv().await.is_none());
        let (full, mut queue) = exchange_sender();
        full.send(Bytes::new()).await.unwrap();
        drop(full);
        assert!(matches!(queue.recv().await, Some(OutgoingMessage::More { .. })));
        assert!(matches!(queue.recv().await, Some(OutgoingMessage::End { exchange: 7 })));
        let (ended, mut queue) = exchange_sender();
        ended.end().await.unwrap();
        assert!(matches!(queue.recv().await, Some(OutgoingMessage::End { .. })) && queue.recv().await.is_none());
    }
}
