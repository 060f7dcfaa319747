//! Artifacts: sealed ranges of blocks as the ledger stores them.
//!
//! An artifact covers a range of blocks with one owner, one block spec and one set of replicas. Sealed blocks never
//! change. An artifact grows only at its end and only while a single session references it. It attaches to a boundary
//! of its parent artifact.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactGroupId, ArtifactId, Blocks, Bytes, Epoch, LedgerTime, ModelId, Owner, PrefixId, SessionId, TenantId,
    Tokens,
};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::PrefixPoint;
use crate::control::ArtifactPinFlag;
use crate::ref_set::RefSet;

/// Kind of KV state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[repr(u8)]
pub enum KvKind {
    /// Keys and values of dense, grouped-query or latent attention.
    DenseKv = 1,
    /// Main entries of compressed sparse attention.
    CompressedCsaMain = 2,
    /// Index entries of compressed sparse attention.
    CompressedCsaIndex = 4,
    /// Entries of heavily compressed attention.
    CompressedHca = 8,
    /// Sliding windows at the end of the range.
    WindowSwa = 16,
    /// State of the partial block at the end.
    TailState = 32,
}

/// A set of `KvKind`s.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(transparent)]
pub struct KvKinds(pub u8);

impl Default for KvKinds {
    /// Dense attention only.
    fn default() -> Self {
        Self(KvKind::DenseKv as u8)
    }
}

impl KvKinds {
    /// Returns the set with `kind` added.
    pub fn with(self, kind: KvKind) -> Self {
        Self(self.0 | kind as u8)
    }

    /// Returns whether the set contains `kind`.
    pub fn has(self, kind: KvKind) -> bool {
        self.0 & kind as u8 != 0
    }
}

/// Digest of attention spec and precision. KV of different formats is never shared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct KvFormatDigest(pub u64);

/// Format and size of sealed blocks.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct KvBlockSpec {
    /// Attention spec and precision.
    pub format: KvFormatDigest,
    /// Kinds of KV state that are kept.
    pub kinds: KvKinds,
    /// Tokens per block.
    pub block: Tokens,
    /// Bytes per block.
    pub block_bytes: Bytes,
}

/// Sharing scope of prefixes: one tenant and one KV format. Nothing is looked up across scopes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(transparent)]
pub struct Scope(u64);

impl Scope {
    /// Returns the scope of a tenant's KV of this format: xxh3-64 over the format and the tenant's name.
    pub fn of(tenant: &TenantId, format: KvFormatDigest) -> Self {
        let (name, mut short) = (tenant.0.as_bytes(), [0; 128]);
        short[..8].copy_from_slice(&format.0.to_le_bytes());
        // Every lookup needs the scope, so a name of usual length is assembled on the stack.
        if let Some(place) = short.get_mut(8..8 + name.len()) {
            place.copy_from_slice(name);
            return Self(xxh3_64(&short[..8 + name.len()]));
        }
        Self(xxh3_64(&[&short[..8], name].concat()))
    }

    pub(crate) fn from_hash(hash: u64) -> Self {
        Self(hash)
    }

    /// Returns the scope as an evenly distributed number.
    pub(crate) fn hash(self) -> u64 {
        self.0
    }

    /// Returns the id of the artifact that `epoch` created of blocks from `from` on, where `first` is its first
    /// boundary.
    ///
    /// The epoch is part of the id because the same blocks may be sealed again after they were forgotten.
    pub(crate) fn artifact_id(self, from: Blocks, first: PrefixId, epoch: Epoch) -> ArtifactId {
        let mut named = [0u8; 48];
        named[..8].copy_from_slice(&self.0.to_le_bytes());
        named[8..16].copy_from_slice(&from.0.to_le_bytes());
        named[16..32].copy_from_slice(&first.0.to_le_bytes());
        named[32..36].copy_from_slice(&epoch.generation.to_le_bytes());
        named[36..44].copy_from_slice(&epoch.index.to_le_bytes());
        named[44..].copy_from_slice(&epoch.position.to_le_bytes());
        ArtifactId(xxh3_128(&named))
    }
}

/// A prefix that an artifact keeps and that lookups can find.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct PrefixBoundary {
    /// Prefix that ends at the boundary.
    pub point: PrefixPoint,
    /// Grant that sealed it.
    pub epoch: Epoch,
}

/// Where an artifact attaches to its parent.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ParentPoint {
    /// Parent artifact.
    pub artifact: ArtifactId,
    /// Boundary of the parent at which the child attaches.
    pub at: PrefixPoint,
}

/// Read-only copy of a prefix.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Replica {
    /// Rank that holds the copy.
    pub holder: Owner,
    /// End of the copied prefix; its id is the digest of what was copied.
    pub upto: PrefixPoint,
    /// When the copy is forgotten.
    pub expires: LedgerTime,
}

/// What identifies an artifact's chain: tenant, model, root, and format and size of its blocks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ChainDescriptor {
    /// Tenant.
    pub tenant: TenantId,
    /// Model whose KV it is.
    pub model: ModelId,
    /// Root of the chain.
    pub root: PrefixId,
    /// Format and size of the blocks.
    pub shape: KvBlockSpec,
}

impl ChainDescriptor {
    /// Returns the scope in which the artifact's prefixes can be looked up.
    pub fn scope(&self) -> Scope {
        Scope::of(&self.tenant, self.shape.format)
    }
}

/// A range of sealed blocks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Artifact {
    /// Id; does not change when the artifact grows.
    pub id: ArtifactId,
    /// Tenant, model, root and block spec of its chain.
    pub origin: Arc<ChainDescriptor>,
    /// Where it attaches; `None` if it starts at the root.
    pub parent: Option<ParentPoint>,
    /// Boundaries in ascending order; the last one is the artifact's end.
    pub boundaries: Vec<PrefixBoundary>,
    /// Owner by decision, live or not; `None` if the owner released it.
    pub owner: Option<Owner>,
    /// When that owner was granted.
    pub epoch: Epoch,
    /// Sessions with a head in this artifact.
    pub sessions: RefSet<SessionId>,
    /// Artifacts that attach to this one.
    pub children: RefSet<ArtifactId>,
    /// Read-only copies, by holder.
    pub replicas: Vec<Replica>,
    /// Group (repository or document) that it belongs to.
    pub group: Option<ArtifactGroupId>,
    /// When it was last written.
    pub touched: LedgerTime,
    /// Whether it is pinned.
    #[serde(default, skip_serializing_if = "ArtifactPinFlag::is_no")]
    pub pinned: ArtifactPinFlag,
}

impl Artifact {
    /// Creates an artifact without blocks.
    pub(crate) fn empty(id: ArtifactId, origin: Arc<ChainDescriptor>) -> Self {
        Self {
            id,
            origin,
            parent: None,
            boundaries: Vec::new(),
            owner: None,
            epoch: Epoch::default(),
            sessions: RefSet::default(),
            children: RefSet::default(),
            replicas: Vec::new(),
            group: None,
            touched: LedgerTime::default(),
            pinned: ArtifactPinFlag::No,
        }
    }

    /// Returns the number of blocks before it.
    pub fn from(&self) -> Blocks {
        self.parent.map_or(Blocks::ZERO, |parent| parent.at.blocks)
    }

    /// Returns its end.
    pub fn end(&self) -> PrefixPoint {
        let root = PrefixPoint { blocks: Blocks::ZERO, id: self.origin.root };
        self.boundaries.last().map_or(root, |last| last.point)
    }

    /// Returns the bytes of its own blocks.
    pub fn bytes(&self) -> Bytes {
        self.origin.shape.block_bytes * (self.end().blocks - self.from()).0
    }

    /// Returns whether nothing references it and it is not pinned.
    pub fn is_idle(&self) -> bool {
        self.pinned.is_no() && self.sessions.is_empty() && self.children.is_empty()
    }

    /// Returns the deepest boundary at or before `blocks`.
    pub fn boundary_at_or_before(&self, blocks: Blocks) -> Option<&PrefixBoundary> {
        let after = self.boundaries.partition_point(|b| b.point.blocks <= blocks);
        self.boundaries[..after].last()
    }
}
