//! Why a call to another node failed, and what to do about it.

use consensus::SupportedLevels;
use serde::{Deserialize, Serialize};
use vocabulary::NodeId;

use crate::node_folder::ClusterId;
use crate::peers::Topic;

/// Why another node did not answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum PeerError {
    /// Nobody knows where it is.
    #[error("node {0} is not a member, or its address is not known here yet")]
    Unknown(NodeId),
    /// No connection: nothing was sent. Worth a retry.
    #[error("{address} cannot be reached: {why}")]
    Unreachable {
        /// Where it should be.
        address: String,
        /// What happened.
        why: String,
    },
    /// The connection broke before the answer; whether it was done is not known.
    #[error("the connection to {address} broke: {why}")]
    Lost {
        /// Where it was.
        address: String,
        /// What happened.
        why: String,
    },
    /// The other node does not want this one.
    #[error("{address} refused this node: {refusal}")]
    Refused {
        /// Who refused.
        address: String,
        /// Why.
        refusal: HandshakeRefusal,
    },
    /// No answer in time; whether it was done is not known.
    #[error("no answer within {millis} ms")]
    TimedOut {
        /// How long was waited.
        millis: u64,
    },
    /// More bytes than one call may carry, either way.
    #[error("{bytes} bytes, and a call carries {most} at most: ask for it in pieces")]
    TooLarge {
        /// How many there were.
        bytes: u64,
        /// How many may be.
        most: u64,
    },
    /// Too many calls are under way. Worth a retry, later.
    #[error("too many calls are under way; try again later")]
    Busy,
    /// The other node runs nothing that answers this.
    #[error("nothing answers {0:?} on that node; its release may be older, or it is still starting")]
    NoService(Topic),
    /// What arrived makes no sense. Somebody's bug, or no node of ours.
    #[error("the message could not be read: {0}")]
    Garbled(String),
    /// What answers there failed.
    #[error("{0}")]
    Failed(String),
    /// The other node takes no part in the quorum any more, and says why.
    #[error("it has stopped: {0}")]
    Stopped(String),
}

impl PeerError {
    /// The word for metrics.
    pub fn cause(&self) -> &'static str {
        self.into()
    }
}

/// Why a node refuses a connection.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
pub enum HandshakeRefusal {
    /// The protocols differ.
    #[error("it speaks protocol {spoken} between nodes, and this binary another; upgrade one release at a time")]
    Protocol {
        /// What the refusing node speaks.
        spoken: u32,
    },
    /// The other side belongs to another cluster.
    #[error("it belongs to {cluster}; check the addresses of `join` and the data directory")]
    OtherCluster {
        /// The refusing node's cluster.
        cluster: ClusterId,
    },
    /// The caller says which node it is, and not of which cluster.
    #[error("whoever calls as a node must name its cluster, too; only a node without an id calls without one")]
    Unproven,
    /// Another node than expected listens there.
    #[error("node {node} listens there now; the address of the node that was meant is out of date")]
    OtherNode {
        /// Who it is.
        node: NodeId,
    },
    /// The caller claims to be the node that it calls.
    #[error("both are node {node}: a data directory was copied, or `join` names this node itself")]
    SameNode {
        /// Who both claim to be.
        node: NodeId,
    },
    /// The caller was removed from the cluster.
    #[error(
        "node {node} was removed from the cluster, and ids never come back; to join again, start with an empty data \
         directory and `--join`"
    )]
    Retired {
        /// Who was removed.
        node: NodeId,
    },
    /// The caller's binary cannot work at the cluster's feature level.
    #[error("the cluster works at feature level {level}, and this binary at {levels}; install the newer release")]
    Level {
        /// The cluster's.
        level: u32,
        /// The caller's.
        levels: SupportedLevels,
    },
}
