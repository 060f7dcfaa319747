//! What the cluster remembers about itself: its feature level, its nodes, its tenants' quotas. From level 2 on.

use std::sync::Arc;

use imbl::OrdMap;
use serde::{Deserialize, Serialize};
use vocabulary::{LedgerTime, NodeId, TenantId};

/// The node that every cluster begins with.
pub const FOUNDER: NodeId = NodeId(1);

/// Whether a node belongs to the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub enum MembershipStatus {
    /// It was given its id.
    Admitted {
        /// When.
        at: LedgerTime,
    },
    /// It was taken out, and never comes back under this id.
    Retired {
        /// When.
        at: LedgerTime,
    },
}

/// A node that was given an id.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// What it drew when its folder was made; 0 for the founder.
    pub nonce: u128,
    /// Where the others reach it; empty for the founder, which nobody admitted.
    pub address: Arc<str>,
    /// Whether it belongs to the cluster.
    pub membership: MembershipStatus,
}

impl Node {
    /// Whether it was not taken out.
    pub fn is_member(&self) -> bool {
        matches!(self.membership, MembershipStatus::Admitted { .. })
    }
}

/// What a ledger above level 1 holds besides the records of level 1.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub(crate) struct ClusterRecords {
    pub(crate) level: u32,
    pub(crate) last_node: NodeId,
    /// Nodes, retired ones included.
    pub(crate) nodes: OrdMap<NodeId, Arc<Node>>,
    /// Entries that a tenant may have.
    pub(crate) quotas: OrdMap<TenantId, u64>,
}

impl ClusterRecords {
    /// A cluster of its founder alone.
    pub(crate) fn with_founder(level: u32, at: LedgerTime) -> Self {
        let founder = Node { id: FOUNDER, nonce: 0, address: "".into(), membership: MembershipStatus::Admitted { at } };
        let nodes = OrdMap::unit(FOUNDER, Arc::new(founder));
        Self { level, last_node: FOUNDER, nodes, quotas: OrdMap::new() }
    }
}
