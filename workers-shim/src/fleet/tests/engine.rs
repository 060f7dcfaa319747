//! Test doubles for engines that misbehave more than the simulated worker does.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use serde_json::json;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{broadcast, watch};

use crate::zmtp::{SocketType, ZmtpConnection, publish, serve};

/// An event publisher with a short replay buffer.
pub(super) struct ForgetfulPublisher {
    pub(super) address: SocketAddr,
    publisher: broadcast::Sender<Arc<[Bytes]>>,
    /// The replayable messages by sequence number.
    pub(super) buffer: watch::Sender<Vec<(u64, Bytes)>>,
    /// Number of replayed messages that are delivered; later ones are dropped, except the last one and the end marker.
    pub(super) replay_limit: Arc<AtomicUsize>,
    pub(super) started: Arc<AtomicU64>,
    /// Endpoints of the live stream and of the replay.
    pub(super) endpoints: (String, String),
    next: u64,
}

impl ForgetfulPublisher {
    pub(super) async fn start() -> Self {
        Self::with_metrics("").await
    }

    /// Adds lines to its metrics page, which otherwise only identifies the process.
    pub(super) async fn with_metrics(more: &'static str) -> Self {
        let (publisher, _) = broadcast::channel::<Arc<[Bytes]>>(1024);
        let (live, said) = (TcpListener::bind("127.0.0.1:0").await.unwrap(), publisher.clone());
        let replay = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoints = [&live, &replay].map(|listener| format!("tcp://{}", listener.local_addr().unwrap()));
        tokio::spawn(serve(live, SocketType::Pub, move |subscriber| publish(subscriber, said.subscribe())));
        let (buffer, buffered) = watch::channel(Vec::new());
        let room = Arc::new(AtomicUsize::new(usize::MAX));
        let places = room.clone();
        tokio::spawn(serve(replay, SocketType::Router, move |asking| {
            serve_replay(asking, buffered.clone(), places.clone())
        }));
        let started = Arc::new(AtomicU64::new(1_700_000_000));
        let endpoints = <(String, String)>::from(endpoints);
        let sources = json!([{"endpoint": endpoints.0, "replay_endpoint": endpoints.1}]).to_string();
        let process = started.clone();
        let metrics = move || async move {
            match process.load(Ordering::Relaxed) {
                0 => more.to_owned(),
                process => format!("process_start_time_seconds {process}\n{more}"),
            }
        };
        let server = Router::new()
            .route("/health", get(|| async {}))
            .route("/v1/models", get(|| async { r#"{"data":[{"id":"tiny"}]}"# }))
            .route("/metrics", get(metrics))
            .route("/kv_event_sources", get(move || async move { sources }));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, server).await });
        Self { address, publisher, buffer, replay_limit: room, started, endpoints, next: 0 }
    }

    /// Publishes a message, and optionally keeps it for replay.
    pub(super) async fn publish(&mut self, payload: Bytes, keep: bool) {
        if keep {
            self.buffer.send_modify(|buffer| buffer.push((self.next, payload.clone())));
        }
        let number = Bytes::copy_from_slice(&self.next.to_be_bytes());
        // There may be no subscriber.
        let _ = self.publisher.send(Arc::from([Bytes::from_static(b"kv"), number, payload]));
        self.next += 1;
    }
}

async fn serve_replay(
    mut asking: ZmtpConnection,
    buffered: watch::Receiver<Vec<(u64, Bytes)>>,
    room: Arc<AtomicUsize>,
) {
    while let Ok(frames) = asking.recv().await {
        let [empty, start] = frames.as_slice() else { panic!("{frames:?}") };
        assert!(empty.is_empty());
        let start = u64::from_be_bytes(start.as_ref().try_into().unwrap());
        let mut kept = buffered.borrow().iter().filter(|(sequence, _)| *sequence >= start).cloned().collect::<Vec<_>>();
        let room = room.load(Ordering::Relaxed);
        if kept.len() > room {
            kept.drain(room..kept.len() - 1);
        }
        for (sequence, payload) in kept.into_iter().chain([(u64::MAX, Bytes::new())]) {
            let number = Bytes::copy_from_slice(&sequence.to_be_bytes());
            let answer = [Bytes::new(), Bytes::from_static(b"kv"), number, payload];
            if asking.send(&answer).await.is_err() {
                return;
            }
        }
    }
}

/// An event that stores one engine block of eight tokens.
pub(super) fn stored(name: u64, tokens: &[u32]) -> Bytes {
    rmp_serde::to_vec(&(1.0, [("BlockStored", [name], (), tokens, 8)], 0)).unwrap().into()
}

/// Events that store one engine block each, with its parent block.
pub(super) fn stored_after(blocks: &[(u64, Option<u64>)]) -> Bytes {
    let event =
        |(name, parent): &(u64, Option<u64>)| ("BlockStored", [*name], *parent, super::prompt(*name as u32, 8), 8);
    rmp_serde::to_vec(&(1.0, blocks.iter().map(event).collect::<Vec<_>>(), 0)).unwrap().into()
}

pub(super) fn removed(name: u64) -> Bytes {
    rmp_serde::to_vec(&(1.0, [("BlockRemoved", [name])], 0)).unwrap().into()
}

pub(super) fn cleared() -> Bytes {
    rmp_serde::to_vec(&(1.0, [("AllBlocksCleared",)], 0)).unwrap().into()
}

/// How a proxy treats connections.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ProxyMode {
    Open,
    /// All connections are closed, new ones as well.
    Closed,
    /// Connections stay open without any traffic, as with an unplugged cable.
    Silent,
}

/// A TCP proxy in front of a publisher that can fail.
pub(super) struct FlakyProxy {
    pub(super) endpoint: String,
    mode: watch::Sender<ProxyMode>,
}

impl FlakyProxy {
    pub(super) async fn to(endpoint: &str) -> Self {
        let target = endpoint.strip_prefix("tcp://").unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        let (way, now) = watch::channel(ProxyMode::Open);
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(forward_connection(near, target.clone(), now.clone()));
            }
        });
        Self { endpoint, mode: way }
    }

    pub(super) fn set_mode(&self, way: ProxyMode) {
        self.mode.send_replace(way);
    }
}

/// Forwards one connection until the proxy is closed.
async fn forward_connection(mut near: TcpStream, target: String, mut way: watch::Receiver<ProxyMode>) {
    if *way.borrow_and_update() == ProxyMode::Open {
        let mut far = TcpStream::connect(target).await.unwrap();
        tokio::select! {
            _ = copy_bidirectional(&mut near, &mut far) => return,
            _ = way.wait_for(|way| *way != ProxyMode::Open) => {}
        }
    }
    // Nothing is read, written or closed meanwhile.
    let _ = way.wait_for(|way| *way != ProxyMode::Silent).await;
}
