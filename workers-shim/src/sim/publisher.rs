//! The event and replay sockets. The engine never waits for them: messages that do not fit into the queue are lost to
//! live subscribers, which see the gap in the sequence and request a replay.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use engine_model::PrefixCacheChange;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::broadcast;

use super::SimStartError;
use super::event_frames;
use super::sim_options::{EventFault, EventOptions};
use crate::zmtp::{SocketType, ZmtpConnection, publish, serve};

/// Maximum number of batches queued for a subscriber.
const QUEUE_LENGTH: usize = 4096;
/// Sequence number (-1) of a replay's last message, which has no payload.
const END_SEQUENCE: u64 = u64::MAX;

/// Addresses of the sockets.
#[derive(Clone, Debug)]
pub(crate) struct EventEndpoints {
    pub(crate) events: String,
    pub(crate) replay: String,
    pub(crate) topic: Arc<str>,
}

/// Numbers batches and passes them to the socket.
#[derive(Clone)]
pub(crate) struct EventPublisher {
    outbox: Arc<Mutex<PublisherState>>,
    block_tokens: u32,
}

struct PublisherState {
    live: broadcast::Sender<Arc<[Bytes]>>,
    topic: Bytes,
    /// The latest batches, oldest first.
    replay_buffer: VecDeque<PublishedBatch>,
    buffer_limit: usize,
    next: u64,
    fault: EventFault,
}

#[derive(Clone)]
struct PublishedBatch {
    sequence: u64,
    payload: Bytes,
}

pub(crate) struct PublisherSockets {
    events: TcpListener,
    replay: TcpListener,
    live: broadcast::Sender<Arc<[Bytes]>>,
    outbox: Arc<Mutex<PublisherState>>,
}

impl EventPublisher {
    /// Binds the sockets. `topic` is the default for options without one.
    pub(crate) async fn bind(
        options: &EventOptions,
        block_tokens: u32,
        topic: Arc<str>,
    ) -> Result<(Self, PublisherSockets, EventEndpoints), SimStartError> {
        let topic = options.topic.as_deref().map(Arc::from).unwrap_or(topic);
        let (events, replay) = (bind(options.listen).await?, bind(options.replay).await?);
        let endpoints = EventEndpoints {
            events: endpoint(&events, options.listen)?,
            replay: endpoint(&replay, options.replay)?,
            topic,
        };
        let (live, _) = broadcast::channel(QUEUE_LENGTH);
        let outbox = PublisherState {
            live: live.clone(),
            topic: Bytes::copy_from_slice(endpoints.topic.as_bytes()),
            replay_buffer: VecDeque::new(),
            buffer_limit: options.buffer.max(1),
            next: 0,
            fault: options.fault,
        };
        let outbox = Arc::new(Mutex::new(outbox));
        let sockets = PublisherSockets { events, replay, live, outbox: outbox.clone() };
        Ok((Self { outbox, block_tokens }, sockets, endpoints))
    }

    /// Publishes one batch without waiting.
    pub(crate) fn publish(&self, events: Vec<PrefixCacheChange>) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let payload = event_frames::encode(time, &events, self.block_tokens).into();
        self.outbox.lock().push(payload);
    }
}

impl PublisherState {
    fn push(&mut self, payload: Bytes) {
        let batch = PublishedBatch { sequence: self.next, payload };
        self.next += 1;
        if self.replay_buffer.len() == self.buffer_limit {
            self.replay_buffer.pop_front();
        }
        self.replay_buffer.push_back(batch.clone());
        let struck = |every: Option<NonZeroU64>| every.is_some_and(|every| self.next.is_multiple_of(every.get()));
        if struck(self.fault.gap) {
            return;
        }
        // Sending fails if there are no subscribers.
        let message: Arc<[Bytes]> = Arc::from(self.frames(batch));
        if struck(self.fault.duplicate) {
            let _ = self.live.send(message.clone());
        }
        let _ = self.live.send(message);
    }

    fn frames(&self, batch: PublishedBatch) -> [Bytes; 3] {
        [self.topic.clone(), number(batch.sequence), batch.payload]
    }

    /// Returns the messages of a replay, each after a delimiter, and the end marker.
    fn replay(&self, from: u64) -> Vec<[Bytes; 4]> {
        let batches = self.replay_buffer.iter().filter(|batch| batch.sequence >= from).cloned();
        let end = PublishedBatch { sequence: END_SEQUENCE, payload: Bytes::new() };
        let delimited = |batch| {
            let [topic, number, payload] = self.frames(batch);
            [Bytes::new(), topic, number, payload]
        };
        batches.chain([end]).map(delimited).collect()
    }
}

impl PublisherSockets {
    /// Serves live events and replays until the task is aborted.
    pub(crate) async fn run(self) {
        let PublisherSockets { events, replay, live, outbox } = self;
        tokio::join!(
            serve(events, SocketType::Pub, move |connection| publish(connection, live.subscribe())),
            serve(replay, SocketType::Router, move |connection| answer_replays(connection, outbox.clone())),
        );
    }
}

async fn answer_replays(mut connection: ZmtpConnection, outbox: Arc<Mutex<PublisherState>>) {
    while let Ok(request) = connection.recv().await {
        // An empty delimiter, and the first requested sequence number.
        let [delimiter, start] = request.as_slice() else { continue };
        let (true, Ok(start)) = (delimiter.is_empty(), <[u8; 8]>::try_from(start.as_ref())) else { continue };
        let answers = outbox.lock().replay(u64::from_be_bytes(start));
        for answer in answers {
            if connection.send(&answer).await.is_err() {
                return;
            }
        }
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, SimStartError> {
    TcpListener::bind(address).await.map_err(|source| bind_error(address, source))
}

fn endpoint(listener: &TcpListener, asked: SocketAddr) -> Result<String, SimStartError> {
    listener.local_addr().map(|bound| format!("tcp://{bound}")).map_err(|source| bind_error(asked, source))
}

fn bind_error(address: SocketAddr, source: io::Error) -> SimStartError {
    SimStartError::Bind { endpoint: format!("tcp://{address}"), source }
}

fn number(sequence: u64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}
