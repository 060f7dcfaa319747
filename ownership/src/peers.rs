//! The other nodes: their addresses, calls to them, and services that answer their calls, with the tasks that serve
//! them.

pub(crate) mod caller_identity;
mod caller_limiter;
pub(crate) mod certificate;
mod dial_failures;
pub(crate) mod error;
pub(crate) mod frame;
pub(crate) mod handshake;
mod listener;
pub(crate) mod log_throttle;
pub(crate) mod method;
mod peer_link;
mod refusal_log;
mod registry;
mod served_connection;
pub(crate) mod socket;
pub(crate) mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;
use vocabulary::NodeId;

pub use certificate::TlsFiles;
pub use error::{HandshakeRefusal, PeerError};
pub(crate) use handshake::Lane;
pub(crate) use listener::PeerListener;
pub(crate) use method::PeerMethod;
pub use method::RouterTopic;
pub(crate) use peer_link::{AwaitedReply, ExchangeReceiver, ExchangeSender, PeerLink};
pub(crate) use registry::PeerRegistry;
pub(crate) use served_connection::{ExchangeHandler, IncomingExchange, ReplySender};
pub(crate) use socket::DialTarget;
pub(crate) use tls::PeerTls;

/// Decodes another node's message.
pub(crate) fn decode<A: DeserializeOwned>(message: &[u8]) -> Result<A, PeerError> {
    rmp_serde::from_slice(message).map_err(|error| PeerError::Garbled(error.to_string()))
}

/// Maximum size of a call or its answer, in bytes.
pub const MAX_CALL_BYTES: usize = 8 << 20;

/// Timeout of a call.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// The other nodes of the cluster, as routers see them.
#[derive(Clone)]
pub struct ClusterPeers {
    pub(crate) registry: Arc<PeerRegistry>,
}

impl fmt::Debug for ClusterPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterPeers").field("others", &self.others()).finish()
    }
}

impl ClusterPeers {
    /// Returns all members but this node, by id, whether reachable or not.
    pub fn others(&self) -> Vec<NodeId> {
        self.registry.others()
    }

    /// Calls another node. At most `MAX_CALL_BYTES` bytes each way and `CALL_TIMEOUT` long; not retried.
    pub async fn call(&self, node: NodeId, topic: RouterTopic, question: Bytes) -> Result<Bytes, PeerError> {
        let bytes = question.len();
        if bytes > MAX_CALL_BYTES {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_CALL_BYTES as u64 });
        }
        let link = self.registry.link(node, Lane::Topic);
        link.call(PeerMethod::of_topic(topic), question, CALL_TIMEOUT).await
    }
}

/// Service that answers other nodes' calls on one topic.
pub trait PeerService: Send + Sync + 'static {
    /// Answers one call. `from` is the id that the caller claims; it belongs to this cluster.
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}

/// Task that is aborted when its handle is dropped, so that nothing outlives a closed node.
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
