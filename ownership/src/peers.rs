//! The other nodes: their addresses, calls to them, and services that answer their calls.

pub(crate) mod caller;
mod caller_limiter;
pub(crate) mod certificate;
mod dial_failures;
pub(crate) mod error;
pub(crate) mod frame;
pub(crate) mod handshake;
mod link;
mod listener;
pub(crate) mod method;
mod refusal_log;
mod registry;
mod served_connection;
pub(crate) mod socket;
pub(crate) mod tls;

use std::fmt;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;
use vocabulary::NodeId;

pub use certificate::TlsFiles;
pub use error::{HandshakeRefusal, PeerError};
pub(crate) use handshake::Lane;
pub(crate) use link::{ExchangeSender, PeerLink, PendingReply, ReplyReceiver};
pub(crate) use listener::PeerListener;
pub(crate) use method::PeerMethod;
pub use method::Topic;
pub(crate) use registry::PeerRegistry;
pub(crate) use served_connection::{ExchangeHandler, IncomingExchange, ReplySender};
pub(crate) use socket::DialTarget;
pub(crate) use tls::PeerTls;

/// Decodes another node's message.
pub(crate) fn decode<A: DeserializeOwned>(said: &[u8]) -> Result<A, PeerError> {
    rmp_serde::from_slice(said).map_err(|error| PeerError::Garbled(error.to_string()))
}

/// Maximum size of a call or its answer, in bytes.
pub const MAX_CALL_BYTES: usize = 8 << 20;

/// Timeout of a call.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The other nodes of the cluster, as routers see them.
#[derive(Clone)]
pub struct Peers {
    pub(crate) registry: Arc<PeerRegistry>,
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peers").field("others", &self.others()).finish()
    }
}

impl Peers {
    /// Returns all members but this node, by id, whether reachable or not.
    pub fn others(&self) -> Vec<NodeId> {
        self.registry.others()
    }

    /// Calls another node. At most `MAX_CALL_BYTES` bytes each way and `CALL_TIMEOUT` long; not retried.
    pub async fn call(&self, node: NodeId, topic: Topic, question: Bytes) -> Result<Bytes, PeerError> {
        let bytes = question.len();
        if bytes > MAX_CALL_BYTES {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_CALL_BYTES as u64 });
        }
        let link = self.registry.link(node, Lane::Topic);
        link.call(PeerMethod::of_topic(topic), question, CALL_TIMEOUT).await
    }
}

/// Minimum time between two log lines.
pub(crate) const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Counter of an event that may happen at any rate.
#[derive(Debug, Default)]
pub(crate) struct LogThrottle {
    count: AtomicU64,
    /// When it was last logged, and the count at that time.
    last_logged: Mutex<Option<(Instant, u64)>>,
}

impl LogThrottle {
    /// Returns the number of events.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Relaxed)
    }

    /// Counts an event. If it should be logged, returns how many were not logged before it.
    pub(crate) fn record(&self, now: Instant) -> Option<u64> {
        let count = self.count.fetch_add(1, Relaxed) + 1;
        let mut told = self.last_logged.lock();
        let (at, before) = told.unzip();
        if at.is_some_and(|at| now.saturating_duration_since(at) < LOG_INTERVAL) {
            return None;
        }
        *told = Some((now, count));
        Some(count.saturating_sub(before.unwrap_or(0) + 1))
    }
}

/// Rejections for one reason.
#[derive(Debug)]
pub(crate) struct RejectionLog {
    /// Reason, for the log.
    reason: &'static str,
    throttle: LogThrottle,
}

impl RejectionLog {
    pub(crate) fn new(reason: &'static str) -> Self {
        Self { reason, throttle: LogThrottle::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.throttle.count()
    }

    pub(crate) fn record(&self, from: &impl Display, why: &str) {
        if let Some(suppressed) = self.throttle.record(Instant::now()) {
            tracing::warn!(%from, reason = why, suppressed, "{}", self.reason);
        }
    }
}

/// Service that answers other nodes' calls on one topic.
pub trait PeerService: Send + Sync + 'static {
    /// Answers one call. `from` is the id that the caller claims; it belongs to this cluster.
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}

#[derive(Debug)]
pub(crate) struct AbortingTask(pub(crate) JoinHandle<()>);

impl AbortingTask {
    /// Aborts the task and waits until it has released everything.
    pub(crate) async fn abort_and_wait(mut self) {
        self.0.abort();
        // It was aborted, or it panicked and logged that.
        drop((&mut self.0).await);
    }
}

impl Drop for AbortingTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_throttled_log_counts_every_event() {
        let (seldom, now) = (LogThrottle::default(), Instant::now());
        let told: Vec<_> = (0..5).map(|_| seldom.record(now)).collect();
        assert_eq!(told, [Some(0), None, None, None, None]);
        assert_eq!(seldom.record(now + LOG_INTERVAL), Some(4), "so many went by untold");
        assert_eq!(seldom.count(), 6);
    }
}
