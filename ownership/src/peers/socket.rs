//! Connections between nodes: dialled or accepted, greeted, plain or under TLS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use vocabulary::NodeId;

use crate::peers::error::{PeerError, Refusal};
use crate::peers::handshake::{self, Hello, Lane, Welcome};
use crate::peers::tls::Tls;

/// How long a connection may take to come up, greeting included.
pub(crate) const GREET_WITHIN: Duration = Duration::from_secs(3);

/// A byte stream both ways.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A greeted connection.
pub(crate) struct Duplex {
    pub(crate) stream: Box<dyn Stream>,
    /// The other side's, for people.
    pub(crate) address: String,
}

/// What a callee answers to a greeting.
pub(crate) type Greeted = Result<Welcome, Refusal>;

/// What a link needs to know to dial.
pub(crate) trait Directions: Send + Sync {
    /// Where the node is now.
    fn address(&self, node: NodeId) -> Option<String>;
    /// What this node says first.
    fn hello(&self, to: Option<NodeId>, lane: Lane) -> Hello;
    /// How connections are protected; none where they are not.
    fn tls(&self) -> Option<&Tls>;
    /// Why a node that welcomes this one is not to be talked with.
    fn objection(&self, welcome: &Welcome) -> Option<String> {
        let _ = welcome;
        None
    }
    /// What a node said of itself, or why it refused.
    fn met(&self, greeted: &Greeted);
}

/// Whom to dial.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Whom {
    /// A node, wherever it is now.
    Node(NodeId),
    /// Whoever is there.
    Address(String),
}

/// Dials one node on one lane.
#[derive(Clone)]
pub(crate) struct Dialer {
    pub(crate) whom: Whom,
    pub(crate) lane: Lane,
    pub(crate) directions: Arc<dyn Directions>,
}

impl Dialer {
    /// Where it is, for people.
    pub(crate) fn address(&self) -> String {
        match &self.whom {
            Whom::Address(address) => address.clone(),
            Whom::Node(node) => self.directions.address(*node).unwrap_or_else(|| format!("node {node}")),
        }
    }

    /// Connects and greets.
    pub(crate) async fn dial(&self) -> Result<Duplex, PeerError> {
        let (address, to) = match &self.whom {
            Whom::Address(address) => (address.clone(), None),
            Whom::Node(node) => {
                let address = self.directions.address(*node).filter(|address| !address.is_empty());
                (address.ok_or(PeerError::Unknown(*node))?, Some(*node))
            }
        };
        let unreachable = |why: String| PeerError::Unreachable { address: address.clone(), why };
        let (stream, greeted) = match timeout(GREET_WITHIN, self.greet(&address, to)).await {
            Err(_) => return Err(unreachable(format!("no connection within {} s", GREET_WITHIN.as_secs()))),
            Ok(Err(error)) => return Err(unreachable(error.to_string())),
            Ok(Ok(greeted)) => greeted,
        };
        self.directions.met(&greeted);
        match greeted {
            Ok(welcome) => match self.directions.objection(&welcome) {
                None => Ok(Duplex { stream, address }),
                Some(why) => Err(unreachable(why)),
            },
            Err(refusal) => Err(PeerError::Refused { address, refusal }),
        }
    }

    async fn greet(&self, address: &str, to: Option<NodeId>) -> io::Result<(Box<dyn Stream>, Greeted)> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut stream: Box<dyn Stream> = Box::new(stream);
        if let Some(tls) = self.directions.tls() {
            stream = tls.connect(address, stream).await?;
        }
        handshake::say(&mut stream, &self.directions.hello(to, self.lane)).await?;
        let greeted = handshake::hear(&mut stream).await?;
        Ok((stream, greeted))
    }
}
