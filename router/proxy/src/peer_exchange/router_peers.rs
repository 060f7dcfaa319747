//! Access to the other routers, which are the other nodes of the cluster.

use std::sync::Weak;

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use ownership::{PeerError, PeerService, Peers, Topic};
use vocabulary::NodeId;

use super::PeerExchange;

/// The other routers of the cluster.
pub trait RouterPeers: Send + Sync + 'static {
    /// Returns all of them, reachable or not.
    fn peers(&self) -> Vec<NodeId>;
    /// Sends a question to one of them. The implementation bounds the time.
    fn call(&self, node: NodeId, topic: Topic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>>;
}

impl RouterPeers for Peers {
    fn peers(&self) -> Vec<NodeId> {
        Peers::others(self)
    }

    fn call(&self, node: NodeId, topic: Topic, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        let peers = self.clone();
        async move { Peers::call(&peers, node, topic, question).await }.boxed()
    }
}

/// Answers the other nodes on one topic, as long as the exchange exists.
pub(super) struct TopicService {
    pub(super) exchange: Weak<PeerExchange>,
    pub(super) topic: Topic,
}

impl PeerService for TopicService {
    fn answer(&self, from: NodeId, question: Bytes) -> BoxFuture<'static, Result<Bytes, PeerError>> {
        match self.exchange.upgrade() {
            Some(exchange) => exchange.answer(self.topic, from, question),
            None => std::future::ready(Err(PeerError::NoService(self.topic))).boxed(),
        }
    }
}
