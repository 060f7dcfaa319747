//! The other nodes: where they are, how they are called, and who answers when they call.

pub(crate) mod caller;
mod caller_limiter;
pub(crate) mod certificate;
mod dial_failures;
pub(crate) mod error;
pub(crate) mod frame;
pub(crate) mod handshake;
mod link;
mod listener;
pub(crate) mod log_throttle;
pub(crate) mod method;
mod refusal_log;
mod registry;
mod rejection_log;
mod served_connection;
pub(crate) mod socket;
mod task;
pub(crate) mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

pub use error::{HandshakeRefusal, PeerError};
pub(crate) use handshake::Lane;
pub(crate) use link::{ExchangeSender, PeerLink, PendingReply, ReplyReceiver};
pub(crate) use listener::PeerListener;
pub(crate) use method::PeerMethod;
pub(crate) use registry::PeerRegistry;
pub(crate) use served_connection::{ExchangeHandler, IncomingExchange, ReplySender};
pub(crate) use socket::DialTarget;
pub(crate) use task::AbortingTask;
pub(crate) use tls::PeerTls;
pub use tls::TlsFiles;

/// What another node said.
pub(crate) fn decode<A: DeserializeOwned>(said: &[u8]) -> Result<A, PeerError> {
    rmp_serde::from_slice(said).map_err(|error| PeerError::Garbled(error.to_string()))
}

/// The most bytes of a call or its answer.
pub const MAX_CALL_BYTES: usize = 8 << 20;

/// How long a call may take.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(5);

/// What routers talk about with each other, outside Raft.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, strum::VariantArray)]
pub enum Topic {
    /// What they dispatched and finished.
    Exchange,
    /// Which blocks they believe to lie where.
    Residency,
    /// Prompts by their token ids, without which no engine moves their blocks.
    Prompts,
}

/// Answers calls of other nodes on one topic.
pub trait PeerService: Send + Sync + 'static {
    /// Answers one call. `from` is who the caller says it is; it belongs to this cluster.
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}

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
    /// All members but this node, by id; whether they can be reached is another matter.
    pub fn others(&self) -> Vec<NodeId> {
        self.registry.others()
    }

    /// Asks another node. At most `MAX_CALL_BYTES` bytes each way, `CALL_TIMEOUT` long; not retried.
    pub async fn call(&self, node: NodeId, topic: Topic, question: Bytes) -> Result<Bytes, PeerError> {
        let bytes = question.len();
        if bytes > MAX_CALL_BYTES {
            return Err(PeerError::TooLarge { bytes: bytes as u64, most: MAX_CALL_BYTES as u64 });
        }
        let link = self.registry.link(node, Lane::Topic);
        link.call(PeerMethod::of_topic(topic), question, CALL_TIMEOUT).await
    }
}
