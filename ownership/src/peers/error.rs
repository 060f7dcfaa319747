//! Errors of calls to other nodes, and what to do about them.

use consensus::SupportedLevels;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

use crate::node_folder::ClusterId;
use crate::peers::method::RouterTopic;

/// Why another node did not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PeerError {
    /// The node's address is unknown.
    #[error("node {0} is not a member, or its address is not known here yet")]
    Unknown(NodeId),
    /// No connection: nothing was sent. Can be retried.
    #[error("{address} cannot be reached: {why}")]
    Unreachable {
        /// Address that was dialled.
        address: String,
        /// Cause.
        why: String,
    },
    /// The connection broke before the answer; the outcome is unknown.
    #[error("the connection to {address} broke: {why}")]
    Lost {
        /// Address of the node.
        address: String,
        /// Cause.
        why: String,
    },
    /// The other node refused this one.
    #[error("{address} refused this node: {refusal}")]
    Refused {
        /// Address of the node that refused.
        address: String,
        /// Cause.
        refusal: HandshakeRefusal,
    },
    /// No answer in time; the outcome is unknown.
    #[error("no answer within {millis} ms")]
    TimedOut {
        /// Timeout in milliseconds.
        millis: u64,
    },
    /// The call or its answer is too large.
    #[error("{bytes} bytes, and a call carries {most} at most: ask for it in pieces")]
    TooLarge {
        /// Size in bytes.
        bytes: u64,
        /// Maximum size in bytes.
        most: u64,
    },
    /// Too many calls are in flight. Can be retried later.
    #[error("too many calls are under way; try again later")]
    Busy,
    /// The other node has no service for this method.
    #[error("nothing answers {0:?} on that node; its release may be older, or it is still starting")]
    NoService(RouterTopic),
    /// The message cannot be decoded: a bug, or the caller is not one of our nodes.
    #[error("the message could not be read: {0}")]
    #[strum(serialize = "malformed")]
    Garbled(String),
    /// The service on the other node failed.
    #[error("{0}")]
    Failed(String),
    /// The other node no longer takes part in the quorum; the text is its reason.
    #[error("it has stopped: {0}")]
    Stopped(String),
}

impl PeerError {
    /// Returns the label used in metrics.
    pub fn cause(&self) -> &'static str {
        self.into()
    }
}

/// Why a node refuses a connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum HandshakeRefusal {
    /// The protocol versions differ.
    #[error("it speaks protocol {spoken} between nodes, and this binary another; upgrade one release at a time")]
    Protocol {
        /// Version of the refusing node.
        spoken: u32,
    },
    /// The other side belongs to another cluster.
    #[error("it belongs to {cluster}; check the addresses of `join` and the data directory")]
    OtherCluster {
        /// Cluster of the refusing node.
        cluster: ClusterId,
    },
    /// The caller names its node id but not its cluster.
    #[error("whoever calls as a node must name its cluster, too; only a node without an id calls without one")]
    Unproven,
    /// Another node than expected listens at the address.
    #[error("node {node} listens there now; the address of the node that was meant is out of date")]
    OtherNode {
        /// Node that listens there.
        node: NodeId,
    },
    /// The caller claims to be the node that it calls.
    #[error("both are node {node}: a data directory was copied, or `join` names this node itself")]
    SameNode {
        /// Id that both claim.
        node: NodeId,
    },
    /// The caller was removed from the cluster.
    #[error(
        "node {node} was removed from the cluster, and ids never come back; to join again, start with an empty data \
         directory and `--join`"
    )]
    Retired {
        /// Node that was removed.
        node: NodeId,
    },
    /// The caller's release does not support the cluster's feature level.
    #[error("the cluster works at feature level {level}, and this binary at {levels}; install the newer release")]
    Level {
        /// Level of the cluster.
        level: u32,
        /// Levels that the caller supports.
        levels: SupportedLevels,
    },
}
