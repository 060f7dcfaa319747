//! Connections between nodes: dialled or accepted, greeted, plain or over TLS.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;
use vocabulary::NodeId;

use crate::peers::certificate::tls_complaint;
use crate::peers::error::{HandshakeRefusal, PeerError};
use crate::peers::handshake::{self, Hello, Lane, Welcome};
use crate::peers::tls::{ByteStream, PeerTls};

/// Timeout for connecting, including the handshake.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A greeted connection.
pub(crate) struct PeerSocket {
    pub(crate) stream: Box<dyn ByteStream>,
    /// Address of the other side, for messages.
    pub(crate) address: String,
}

/// Answer of a called node to a greeting.
pub(crate) type HandshakeResult = Result<Welcome, HandshakeRefusal>;

/// What a dialer asks of its node, and reports to it.
pub(crate) trait DialDelegate: Send + Sync {
    fn address(&self, node: NodeId) -> Option<String>;
    /// Returns this node's greeting.
    fn hello(&self, to: Option<NodeId>, lane: Lane) -> Hello;
    /// Returns the TLS settings; `None` for plain connections.
    fn tls(&self) -> Option<&PeerTls>;
    /// Returns why this node must not talk with a node that accepted it.
    fn objection(&self, welcome: &Welcome) -> Option<String> {
        let _ = welcome;
        None
    }
    /// Called with the other node's greeting, or its refusal.
    fn on_greeted(&self, handshake: &HandshakeResult);
    /// Called when a connection to a node failed.
    fn on_dial_failed(&self, node: NodeId, error: DialError) {
        let _ = (node, error);
    }
}

/// Why a connection to a node failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DialError {
    /// One side did not trust the other; an operator must fix that.
    Tls(String),
    /// Any other cause; most are temporary.
    Other(String),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum DialTarget {
    /// A node at its current address.
    Node(NodeId),
    Address(String),
}

/// Dials one node on one lane.
#[derive(Clone)]
pub(crate) struct LaneDialer {
    pub(crate) target: DialTarget,
    pub(crate) lane: Lane,
    pub(crate) policy: Arc<dyn DialDelegate>,
}

impl LaneDialer {
    /// Returns the address, for messages.
    pub(crate) fn address(&self) -> String {
        match &self.target {
            DialTarget::Address(address) => address.clone(),
            DialTarget::Node(node) => self.policy.address(*node).unwrap_or_else(|| format!("node {node}")),
        }
    }

    /// Connects and greets.
    pub(crate) async fn dial(&self) -> Result<PeerSocket, PeerError> {
        let (address, to) = match &self.target {
            DialTarget::Address(address) => (address.clone(), None),
            DialTarget::Node(node) => {
                let address = self.policy.address(*node).filter(|address| !address.is_empty());
                (address.ok_or(PeerError::Unknown(*node))?, Some(*node))
            }
        };
        let missed = |missed: DialError| {
            let (DialError::Tls(why) | DialError::Other(why)) = &missed;
            let error = PeerError::Unreachable { address: address.clone(), why: why.clone() };
            to.into_iter().for_each(|node| self.policy.on_dial_failed(node, missed.clone()));
            error
        };
        let (stream, greeted) = match timeout(CONNECT_TIMEOUT, self.greet(&address, to)).await {
            Err(_) => {
                let why = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
                return Err(missed(DialError::Other(why)));
            }
            Ok(Err(error)) => return Err(missed(self.dial_error(&error))),
            Ok(Ok(greeted)) => greeted,
        };
        self.policy.on_greeted(&greeted);
        match greeted {
            Ok(welcome) => match self.policy.objection(&welcome) {
                None => Ok(PeerSocket { stream, address }),
                Some(why) => Err(missed(DialError::Other(why))),
            },
            Err(refusal) => {
                to.into_iter().for_each(|node| self.policy.on_dial_failed(node, DialError::Other(refusal.to_string())));
                Err(PeerError::Refused { address, refusal })
            }
        }
    }

    fn dial_error(&self, error: &io::Error) -> DialError {
        match tls_complaint(error) {
            Some(why) => DialError::Tls(why),
            // A side without TLS closes the connection at its first bytes.
            None if self.policy.tls().is_some() && error.kind() == io::ErrorKind::UnexpectedEof => {
                DialError::Tls("it hung up on TLS: cluster.tls is needed at every node or at none".into())
            }
            None => DialError::Other(error.to_string()),
        }
    }

    async fn greet(&self, address: &str, to: Option<NodeId>) -> io::Result<(Box<dyn ByteStream>, HandshakeResult)> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut stream: Box<dyn ByteStream> = Box::new(stream);
        if let Some(tls) = self.policy.tls() {
            stream = tls.connect(address, stream).await?;
        }
        handshake::send_message(&mut stream, &self.policy.hello(to, self.lane)).await?;
        let greeted = handshake::receive_message(&mut stream).await?;
        Ok((stream, greeted))
    }
}
