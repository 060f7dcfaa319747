//! The event and replay sockets. The engine never waits for them: what does not fit into the queue is lost to live
//! subscribers, who see the gap in the sequence and ask for a replay.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use engine_model::KvEvent;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::error::SimError;
use super::event_frames;
use super::options::{EventFault, EventOptions};

/// Batches that may wait for the socket.
const QUEUE: usize = 4096;
/// A replay's last message has this sequence and no payload.
const END: i64 = -1;

/// Where the sockets listen.
#[derive(Clone, Debug)]
pub(crate) struct Endpoints {
    pub(crate) events: String,
    pub(crate) replay: String,
    pub(crate) topic: Arc<str>,
}

/// Numbers batches and hands them to the socket.
#[derive(Clone)]
pub(crate) struct Publisher {
    outbox: Arc<Mutex<Outbox>>,
    block_tokens: u32,
}

struct Outbox {
    live: mpsc::Sender<Batch>,
    /// The latest batches, oldest first.
    kept: VecDeque<Batch>,
    keep: usize,
    next: u64,
    fault: EventFault,
}

#[derive(Clone)]
struct Batch {
    sequence: u64,
    payload: Bytes,
}

/// The sockets' side of a publisher.
pub(crate) struct Sockets {
    live: mpsc::Receiver<Batch>,
    events: PubSocket,
    replay: RouterSocket,
    outbox: Arc<Mutex<Outbox>>,
    topic: Arc<str>,
}

impl Publisher {
    /// Bind the sockets. `topic` is used where the options name none.
    pub(crate) async fn bind(
        options: &EventOptions,
        block_tokens: u32,
        topic: Arc<str>,
    ) -> Result<(Self, Sockets, Endpoints), SimError> {
        let topic = options.topic.as_deref().map(Arc::from).unwrap_or(topic);
        let (mut events, mut replay) = (PubSocket::new(), RouterSocket::new());
        let endpoints = Endpoints {
            events: bind(&mut events, options.listen).await?,
            replay: bind(&mut replay, options.replay).await?,
            topic: topic.clone(),
        };
        let (sender, live) = mpsc::channel(QUEUE);
        let keep = options.buffer.max(1);
        let outbox = Outbox { live: sender, kept: VecDeque::new(), keep, next: 0, fault: options.fault };
        let outbox = Arc::new(Mutex::new(outbox));
        let sockets = Sockets { live, events, replay, outbox: outbox.clone(), topic };
        Ok((Self { outbox, block_tokens }, sockets, endpoints))
    }

    /// One batch. Never waits.
    pub(crate) fn publish(&self, events: Vec<KvEvent>) {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let payload = event_frames::encode(time, &events, self.block_tokens).into();
        self.outbox.lock().push(payload);
    }
}

impl Outbox {
    fn push(&mut self, payload: Bytes) {
        let batch = Batch { sequence: self.next, payload };
        self.next += 1;
        if self.kept.len() == self.keep {
            self.kept.pop_front();
        }
        self.kept.push_back(batch.clone());
        let struck = |every: Option<NonZeroU64>| every.is_some_and(|every| self.next.is_multiple_of(every.get()));
        if struck(self.fault.gap) {
            return;
        }
        if struck(self.fault.duplicate) {
            let _ = self.live.try_send(batch.clone());
        }
        let _ = self.live.try_send(batch);
    }

    fn since(&self, sequence: u64) -> Vec<Batch> {
        self.kept.iter().filter(|batch| batch.sequence >= sequence).cloned().collect()
    }
}

impl Sockets {
    /// Publish and replay. Ends only by being aborted.
    pub(crate) async fn run(self) {
        let Sockets { mut live, mut events, replay, outbox, topic } = self;
        let publish = async {
            while let Some(batch) = live.recv().await {
                let message = frames([topic_frame(&topic), number(batch.sequence as i64), batch.payload]);
                if let Err(error) = events.send(message).await {
                    tracing::debug!(%error, "event not sent");
                }
            }
        };
        tokio::join!(publish, answer_replays(replay, outbox, topic.clone()));
    }
}

async fn answer_replays(mut socket: RouterSocket, outbox: Arc<Mutex<Outbox>>, topic: Arc<str>) {
    while let Ok(message) = socket.recv().await {
        // Identity, an empty delimiter, the first sequence that is wanted.
        let asked = message.into_vec();
        let [peer, delimiter, start] = asked.as_slice() else { continue };
        let (true, Ok(start)) = (delimiter.is_empty(), <[u8; 8]>::try_from(start.as_ref())) else { continue };
        let batches = outbox.lock().since(u64::from_be_bytes(start));
        let end = (END, Bytes::new());
        for (sequence, payload) in batches.into_iter().map(|b| (b.sequence as i64, b.payload)).chain([end]) {
            let reply = [peer.clone(), Bytes::new(), topic_frame(&topic), number(sequence), payload];
            if socket.send(frames(reply)).await.is_err() {
                break;
            }
        }
    }
}

async fn bind(socket: &mut impl Socket, address: SocketAddr) -> Result<String, SimError> {
    let endpoint = format!("tcp://{address}");
    match socket.bind(&endpoint).await {
        Ok(bound) => Ok(bound.to_string()),
        Err(source) => Err(SimError::Bind { endpoint, source }),
    }
}

fn topic_frame(topic: &str) -> Bytes {
    Bytes::copy_from_slice(topic.as_bytes())
}

fn number(sequence: i64) -> Bytes {
    Bytes::copy_from_slice(&sequence.to_be_bytes())
}

fn frames<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(Vec::from(frames)).expect("a message of at least one frame")
}
