//! Records of the cluster about itself, from level 2 on: feature level, nodes, and quotas of tenants.

use std::sync::Arc;

use imbl::OrdMap;
use serde::{Deserialize, Serialize};
use vocabulary::{LedgerTime, NodeId, TenantId};

/// Node that every cluster begins with.
pub const FOUNDER: NodeId = NodeId(1);

/// Lifecycle of a node: admitted, and at last retired.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum NodeLifecycle {
    /// The node was given its id.
    Admitted {
        /// When it was admitted.
        at: LedgerTime,
    },
    /// The node was retired and never comes back under this id.
    Retired {
        /// When it was retired.
        at: LedgerTime,
    },
}

/// A node that was given an id.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Node {
    /// Id of the node.
    pub id: NodeId,
    /// Random number that it drew when its data folder was created; 0 for the founder.
    pub nonce: u128,
    /// Address at which the others reach it; empty for the founder, which was not admitted.
    pub address: Arc<str>,
    /// Whether it is admitted or retired.
    pub membership: NodeLifecycle,
}

impl Node {
    /// Returns whether it was not retired.
    pub fn is_member(&self) -> bool {
        matches!(self.membership, NodeLifecycle::Admitted { .. })
    }
}

/// Records of a ledger above level 1, in addition to those of level 1.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct ClusterRecords {
    pub(crate) level: u32,
    pub(crate) last_node: NodeId,
    /// Nodes, including retired ones.
    pub(crate) nodes: OrdMap<NodeId, Arc<Node>>,
    /// Maximum number of artifacts, and of sessions, per tenant.
    pub(crate) quotas: OrdMap<TenantId, u64>,
}

impl ClusterRecords {
    /// Creates the records of a cluster with only its founder.
    pub(crate) fn with_founder(level: u32, at: LedgerTime) -> Self {
        let founder = Node { id: FOUNDER, nonce: 0, address: "".into(), membership: NodeLifecycle::Admitted { at } };
        let nodes = OrdMap::unit(FOUNDER, Arc::new(founder));
        Self { level, last_node: FOUNDER, nodes, quotas: OrdMap::new() }
    }
}
