//! Services that answer other nodes' calls.

use bytes::Bytes;
use futures::future::BoxFuture;
use vocabulary::NodeId;

use crate::peers::error::PeerError;

/// Service that answers other nodes' calls on one topic.
pub trait PeerService: Send + Sync + 'static {
    /// Answers one call. `from` is the id that the caller claims; it belongs to this cluster.
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}
