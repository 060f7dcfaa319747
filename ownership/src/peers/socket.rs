//! Connections between nodes: dialled or accepted, greeted, plain or under TLS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use vocabulary::NodeId;

use crate::peers::certificate::complaint;
use crate::peers::error::{PeerError, Refusal};
use crate::peers::handshake::{self, Hello, Lane, Welcome};
use crate::peers::tls::Tls;

/// How long a connection may take to come up, greeting included.
const GREET_WITHIN: Duration = Duration::from_secs(3);

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
    /// A node could not be talked with.
    fn missed(&self, node: NodeId, missed: Missed) {
        let _ = (node, missed);
    }
}

/// Why a node could not be talked with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Missed {
    /// One of both did not trust the other: nothing but a hand mends that.
    Tls(String),
    /// Anything else; most of it passes.
    Other(String),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Whom {
    /// A node, wherever it is now.
    Node(NodeId),
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
        let missed = |missed: Missed| {
            let (Missed::Tls(why) | Missed::Other(why)) = &missed;
            let error = PeerError::Unreachable { address: address.clone(), why: why.clone() };
            to.into_iter().for_each(|node| self.directions.missed(node, missed.clone()));
            error
        };
        let (stream, greeted) = match timeout(GREET_WITHIN, self.greet(&address, to)).await {
            Err(_) => {
                let why = format!("no connection within {} s", GREET_WITHIN.as_secs());
                return Err(missed(Missed::Other(why)));
            }
            Ok(Err(error)) => return Err(missed(self.why(&error))),
            Ok(Ok(greeted)) => greeted,
        };
        self.directions.met(&greeted);
        match greeted {
            Ok(welcome) => match self.directions.objection(&welcome) {
                None => Ok(Duplex { stream, address }),
                Some(why) => Err(missed(Missed::Other(why))),
            },
            Err(refusal) => {
                to.into_iter().for_each(|node| self.directions.missed(node, Missed::Other(refusal.to_string())));
                Err(PeerError::Refused { address, refusal })
            }
        }
    }

    fn why(&self, error: &io::Error) -> Missed {
        match complaint(error) {
            Some(why) => Missed::Tls(why),
            // Who speaks no TLS hangs up at the first bytes of it.
            None if self.directions.tls().is_some() && error.kind() == io::ErrorKind::UnexpectedEof => {
                Missed::Tls("it hung up on TLS: cluster.tls is needed at every node or at none".into())
            }
            None => Missed::Other(error.to_string()),
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
