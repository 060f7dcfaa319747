//! The way to the other routers.

use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use vocabulary::NodeId;

/// What routers talk about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Topic {
    /// What they have in flight.
    Exchange,
    /// What they know of the engines.
    Residency,
}

/// Why a neighbour did not answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    /// No way to it, or no answer in time.
    #[error("{0}")]
    Unreachable(String),
    /// What came makes no sense here.
    #[error("the message could not be read")]
    Garbled,
}

/// The other routers of the cluster.
pub trait Neighbours: Send + Sync + 'static {
    /// All of them, whether they can be reached or not.
    fn others(&self) -> Vec<NodeId>;
    /// Asks one of them. Bounded in time by whoever implements it.
    fn call(&self, node: NodeId, topic: Topic, question: Bytes) -> BoxFuture<'static, Result<Bytes, CallError>>;
}

/// Nobody else is there.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Neighbours for Alone {
    fn others(&self) -> Vec<NodeId> {
        Vec::new()
    }

    fn call(&self, node: NodeId, _topic: Topic, _question: Bytes) -> BoxFuture<'static, Result<Bytes, CallError>> {
        let nobody = CallError::Unreachable(format!("there is no router {node}"));
        std::future::ready(Err(nobody)).boxed()
    }
}
