//! Commands of operators and of the cluster about itself. All but `RaiseLevel` need feature level 2 or above.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{ArtifactId, Epoch, TenantId, WorkerId};

/// Highest feature level that this release supports.
///
/// A ledger at level 1 reads, writes and decides byte for byte like the release before levels.
pub const LEVEL: u32 = 2;

/// Feature level under development. This release knows its commands and gates them, but a node offers the level only if
/// configured to, so that no cluster reaches it by itself. The level is frozen by the first release that ships it as
/// its `LEVEL`; until then commands may be added to it, as `RetireIncarnation` was added to level 2.
pub const NEXT_LEVEL: u32 = 3;

/// Gives a new node its id. The same nonce always gets the same id; the latest address wins.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct AdmitNode {
    /// Random number that the node drew when its data folder was created.
    pub nonce: u128,
    /// Address at which the other nodes reach it.
    pub address: Arc<str>,
}

/// Whether an artifact is protected from being forgotten.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum ArtifactPinFlag {
    /// It is never forgotten while pinned.
    Yes,
    /// It may be forgotten once nothing references it.
    #[default]
    No,
}

impl ArtifactPinFlag {
    /// Returns whether it is not pinned.
    pub fn is_no(&self) -> bool {
        *self == Self::No
    }
}

/// Pins or unpins an artifact. A pinned artifact is neither evicted nor garbage-collected.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PinArtifact {
    /// Artifact.
    pub artifact: ArtifactId,
    /// Whether it is pinned from now on.
    pub pinned: ArtifactPinFlag,
}

/// Whether a worker is draining.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug, Default)]
pub enum DrainFlag {
    /// It keeps what it has and is granted nothing more.
    Yes,
    /// It serves normally.
    #[default]
    No,
}

impl DrainFlag {
    /// Returns whether it serves normally.
    pub fn is_no(&self) -> bool {
        *self == Self::No
    }
}

/// Starts or stops draining a worker. The flag stays across incarnations until it is removed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct DrainWorker {
    /// Worker.
    pub worker: WorkerId,
    /// Whether it is draining from now on.
    pub draining: DrainFlag,
}

/// Retires a worker as it was seen. If it was granted a new lease since, it stays.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct RetireIncarnation {
    /// Worker.
    pub worker: WorkerId,
    /// Grant that was seen.
    pub seen: Epoch,
}

/// Sets a tenant's quota, which applies to artifacts and to sessions separately.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct SetQuota {
    /// Tenant.
    pub tenant: TenantId,
    /// Maximum number of each; `None` removes the quota. Existing entries beyond it stay.
    pub artifacts: Option<u64>,
}
