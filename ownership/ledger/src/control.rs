//! Commands of operators and of the cluster about itself. All but `RaiseLevel` belong to feature level 2 or
//! above.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{ArtifactId, Epoch, TenantId, WorkerId};

/// The highest feature level that this release works at.
///
/// A ledger at level 1 reads, writes and decides to the byte as the release before levels did.
pub const LEVEL: u32 = 2;

/// The level that is being made. Its commands are known here and behind the gate, but a node offers it only where it is
/// told to, so that no cluster comes to it by itself. What a level means is settled by the first release that ships it as its
/// `LEVEL`; until then words may still join it, as `RetireIncarnation` has joined level 2.
pub const NEXT_LEVEL: u32 = 3;

/// Gives a new node its id. The same nonce is given the same id, and its newest address counts.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct AdmitNode {
    /// What the node drew when its folder was made.
    pub nonce: u128,
    /// Where the others reach it.
    pub address: Arc<str>,
}

/// Whether an extent may be forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum PinFlag {
    /// Never, while it is pinned.
    Yes,
    /// Once nothing references it.
    #[default]
    No,
}

impl PinFlag {
    /// Whether it is not pinned.
    pub fn is_no(&self) -> bool {
        *self == Self::No
    }
}

/// Keeps an extent from being evicted or collected, or no longer.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PinArtifact {
    /// Which extent.
    pub artifact: ArtifactId,
    /// Pinned from now on or not.
    pub pinned: PinFlag,
}

/// Whether a worker is being emptied.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum DrainFlag {
    /// It keeps what it has and is granted nothing more.
    Yes,
    /// It serves as usual.
    #[default]
    No,
}

impl DrainFlag {
    /// Whether it serves as usual.
    pub fn is_no(&self) -> bool {
        *self == Self::No
    }
}

/// Stays with the worker over its lives, until it is taken back.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct DrainWorker {
    /// Which worker.
    pub worker: WorkerId,
    /// Draining from now on or not.
    pub draining: DrainFlag,
}

/// Takes a worker out as it was seen: one that was granted a lease anew meanwhile stays.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RetireIncarnation {
    /// Which worker.
    pub worker: WorkerId,
    /// The grant that was seen.
    pub seen: Epoch,
}

/// How many entries a tenant may have: so many extents, and so many sessions.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetQuota {
    /// Whose.
    pub tenant: TenantId,
    /// The bound; none lifts it. What is beyond it already stays.
    pub artifacts: Option<u64>,
}
