//! Handshake of a connection: identity, cluster and capabilities of both sides.
//!
//! Layout: 8 magic bytes that no other protocol begins with, then one message each way: length (4 bytes, little endian)
//! and MessagePack with field names, so that later releases can add fields.

use std::io;

use consensus::SupportedLevels;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use vocabulary::NodeId;

use crate::node_folder::ClusterId;
use crate::peers::error::HandshakeRefusal;

/// Protocol version between nodes. Raised if frames or methods change incompatibly.
pub(crate) const PROTOCOL: u32 = 1;

const MAGIC: &[u8; 8] = b"OWNPEER\x01";

/// Maximum size of a greeting, in bytes.
const MAX_HELLO_BYTES: u32 = 4 << 10;

/// Purpose of a connection. Each has its own connection, so that a snapshot never delays a heartbeat.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
pub(crate) enum Lane {
    /// Votes, heartbeats and log entries.
    Raft,
    Bulk,
    /// Commands for the leader, and other calls that wait for the quorum.
    Call,
    /// Calls between routers.
    Topic,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    /// `None` for a node that has no id yet and wants to join.
    pub(crate) cluster: Option<ClusterId>,
    /// `None` for a node that wants to join.
    pub(crate) node: Option<NodeId>,
    /// Node that the caller expects; `None` if it knows only an address.
    pub(crate) to: Option<NodeId>,
    pub(crate) levels: SupportedLevels,
    pub(crate) lane: Lane,
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) cluster: ClusterId,
    pub(crate) node: NodeId,
    pub(crate) levels: SupportedLevels,
}

pub(crate) async fn send_message<W: AsyncWrite + Unpin>(to: &mut W, message: &impl Serialize) -> io::Result<()> {
    let body = rmp_serde::to_vec_named(message).map_err(io::Error::other)?;
    let length = u32::try_from(body.len()).map_err(io::Error::other)?;
    let mut whole = Vec::with_capacity(MAGIC.len() + 4 + body.len());
    whole.extend_from_slice(MAGIC);
    whole.extend_from_slice(&length.to_le_bytes());
    whole.extend_from_slice(&body);
    to.write_all(&whole).await?;
    to.flush().await
}

pub(crate) async fn receive_message<T: DeserializeOwned, R: AsyncRead + Unpin>(from: &mut R) -> io::Result<T> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let mut magic = [0u8; 8];
    from.read_exact(&mut magic).await?;
    if &magic != MAGIC {
        return Err(invalid("what listens there is no node of this kind; check address and TLS settings".into()));
    }
    let length = from.read_u32_le().await?;
    if length > MAX_HELLO_BYTES {
        return Err(invalid(format!("a greeting of {length} bytes")));
    }
    let mut body = vec![0u8; length as usize];
    from.read_exact(&mut body).await?;
    rmp_serde::from_slice(&body).map_err(|error| invalid(format!("the greeting makes no sense: {error}")))
}

/// State of a called node that decides whether a caller is accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HelloCheckInputs<'a> {
    pub(crate) welcome: &'a Welcome,
    /// Feature level of the cluster.
    pub(crate) level: u32,
    /// Whether the caller was removed.
    pub(crate) is_retired: RemovalStatus,
}

/// Whether a node was removed from the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum RemovalStatus {
    Yes,
    No,
}

/// Decides whether the caller is accepted. Pure.
pub(crate) fn check_hello(hello: &Hello, callee: HelloCheckInputs<'_>) -> Result<(), HandshakeRefusal> {
    let Welcome { cluster, node, .. } = *callee.welcome;
    if hello.protocol != PROTOCOL {
        return Err(HandshakeRefusal::Protocol { spoken: PROTOCOL });
    }
    if hello.node.is_some() && hello.cluster.is_none() {
        return Err(HandshakeRefusal::Unproven);
    }
    if hello.cluster.is_some_and(|theirs| theirs != cluster) {
        return Err(HandshakeRefusal::OtherCluster { cluster });
    }
    if hello.to.is_some_and(|meant| meant != node) {
        return Err(HandshakeRefusal::OtherNode { node });
    }
    if hello.node == Some(node) {
        return Err(HandshakeRefusal::SameNode { node });
    }
    if let (Some(node), RemovalStatus::Yes) = (hello.node, callee.is_retired) {
        return Err(HandshakeRefusal::Retired { node });
    }
    if !hello.levels.contains(callee.level) {
        return Err(HandshakeRefusal::Level { level: callee.level, levels: hello.levels });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEVELS: SupportedLevels = SupportedLevels { lowest: 1, highest: 2 };

    fn hello() -> Hello {
        let (cluster, node, to) = (Some(ClusterId(7)), Some(NodeId(2)), Some(NodeId(1)));
        Hello { protocol: PROTOCOL, cluster, node, to, levels: LEVELS, lane: Lane::Raft }
    }

    fn check(hello: Hello, level: u32, is_retired: RemovalStatus) -> Result<(), HandshakeRefusal> {
        let welcome = Welcome { cluster: ClusterId(7), node: NodeId(1), levels: LEVELS };
        check_hello(&hello, HelloCheckInputs { welcome: &welcome, level, is_retired })
    }

    #[test]
    fn members_and_joining_nodes_are_accepted() {
        assert_eq!(check(hello(), 2, RemovalStatus::No), Ok(()));
        let joiner = Hello { cluster: None, node: None, to: None, ..hello() };
        assert_eq!(check(joiner, 2, RemovalStatus::No), Ok(()));
    }

    #[test]
    fn unknown_callers_are_refused_with_the_reason() {
        let refused = |hello| check(hello, 2, RemovalStatus::No).unwrap_err();
        let other = refused(Hello { cluster: Some(ClusterId(8)), ..hello() });
        assert_eq!(other, HandshakeRefusal::OtherCluster { cluster: ClusterId(7) });
        assert_eq!(refused(Hello { cluster: None, ..hello() }), HandshakeRefusal::Unproven);
        assert_eq!(refused(Hello { to: Some(NodeId(3)), ..hello() }), HandshakeRefusal::OtherNode { node: NodeId(1) });
        assert_eq!(refused(Hello { node: Some(NodeId(1)), ..hello() }), HandshakeRefusal::SameNode { node: NodeId(1) });
        assert_eq!(refused(Hello { protocol: 2, ..hello() }), HandshakeRefusal::Protocol { spoken: PROTOCOL });
        let old = SupportedLevels { lowest: 1, highest: 1 };
        assert_eq!(refused(Hello { levels: old, ..hello() }), HandshakeRefusal::Level { level: 2, levels: old });
        assert_eq!(check(hello(), 2, RemovalStatus::Yes), Err(HandshakeRefusal::Retired { node: NodeId(2) }));
    }

    #[tokio::test]
    async fn a_hello_round_trips_and_other_protocols_are_recognized() {
        let mut wire = Vec::new();
        send_message(&mut wire, &hello()).await.unwrap();
        assert_eq!(receive_message::<Hello, _>(&mut wire.as_slice()).await.unwrap(), hello());
        let http = receive_message::<Hello, _>(&mut b"GET / HTTP/1.1\r\n\r\n".as_slice()).await.unwrap_err();
        assert!(http.to_string().contains("no node of this kind"), "{http}");
        wire[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(receive_message::<Hello, _>(&mut wire.as_slice()).await.is_err());
    }
}
