//! Extents: how the ledger stores sealed artifacts.
//!
//! An extent covers a range of blocks that have one owner, one shape and one set of replicas. Sealed blocks never
//! change; an extent only grows at its end, while a single session references it, and hangs on a kept point of its
//! parent.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vocabulary::{
    ArtifactId, Blocks, Bytes, Epoch, GroupId, LedgerTime, ModelId, Owner, PrefixId, SessionId, TenantId, Tokens,
};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use crate::PrefixPoint;
use crate::control::PinFlag;
use crate::ref_set::RefSet;

/// A kind of KV state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Debug)]
#[repr(u8)]
pub enum KvKind {
    /// Keys and values of dense, grouped or latent attention.
    DenseKv = 1,
    /// Main entries of compressed sparse attention.
    CompressedCsaMain = 2,
    /// Index entries of compressed sparse attention.
    CompressedCsaIndex = 4,
    /// Entries of heavily compressed attention.
    CompressedHca = 8,
    /// Sliding windows at the end of the range.
    WindowSwa = 16,
    /// State of the partial block.
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
    /// With one kind more.
    pub fn with(self, kind: KvKind) -> Self {
        Self(self.0 | kind as u8)
    }

    /// Whether `kind` is in it.
    pub fn has(self, kind: KvKind) -> bool {
        self.0 & kind as u8 != 0
    }
}

/// Digest of attention spec and precision: KV of different formats is never shared.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug, Default)]
#[serde(transparent)]
pub struct KvFormat(pub u64);

/// What sealed blocks are made of.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct KvShape {
    /// Attention spec and precision.
    pub format: KvFormat,
    /// Which state is kept.
    pub kinds: KvKinds,
    /// Tokens a block.
    pub block: Tokens,
    /// Bytes a block.
    pub block_bytes: Bytes,
}

/// Within which prefixes are shared: one tenant and one KV format. Nothing is looked up across scopes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Debug)]
#[serde(transparent)]
pub struct Scope(u64);

impl Scope {
    /// The scope of a tenant's KV of this format: xxh3-64 over the format and the tenant's name.
    pub fn of(tenant: &TenantId, format: KvFormat) -> Self {
        let (name, mut short) = (tenant.0.as_bytes(), [0; 128]);
        short[..8].copy_from_slice(&format.0.to_le_bytes());
        // Asked with every lookup, so a name of usual length is put together in place.
        if let Some(place) = short.get_mut(8..8 + name.len()) {
            place.copy_from_slice(name);
            return Self(xxh3_64(&short[..8 + name.len()]));
        }
        Self(xxh3_64(&[&short[..8], name].concat()))
    }

    pub(crate) fn from_hash(hash: u64) -> Self {
        Self(hash)
    }

    /// As a number, evenly spread.
    pub(crate) fn hash(self) -> u64 {
        self.0
    }

    /// The id of the extent that `epoch` made of blocks from `from` on, `first` being its first kept point. The
    /// epoch is in it because the same blocks may be sealed again after they were forgotten.
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

/// A kept point of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Boundary {
    /// The prefix that ends there.
    pub point: PrefixPoint,
    /// The grant that sealed it.
    pub epoch: Epoch,
}

/// Where an extent hangs on.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct ParentPoint {
    /// The extent before it.
    pub artifact: ArtifactId,
    /// The kept point of that extent.
    pub at: PrefixPoint,
}

/// A read-only copy.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Replica {
    /// Who has it.
    pub holder: Owner,
    /// How far it reaches; its id is the digest that was copied.
    pub upto: PrefixPoint,
    /// When it is forgotten.
    pub expires: LedgerTime,
}

/// Whose an extent is and what it is made of.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct KvOrigin {
    /// Whose traffic.
    pub tenant: TenantId,
    /// Which model's KV.
    pub model: ModelId,
    /// The chain's root.
    pub root: PrefixId,
    /// What the blocks are made of.
    pub shape: KvShape,
}

impl KvOrigin {
    /// Within which its prefixes are found.
    pub fn scope(&self) -> Scope {
        Scope::of(&self.tenant, self.shape.format)
    }
}

/// A range of sealed blocks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
pub struct Artifact {
    /// Its id; stays when the extent grows.
    pub id: ArtifactId,
    /// Whose it is and what it is made of.
    pub origin: Arc<KvOrigin>,
    /// What it extends; none when it starts at the root.
    pub parent: Option<ParentPoint>,
    /// Kept points in rising order; the last is the end.
    pub boundaries: Vec<Boundary>,
    /// Who has it by decision; none when the owner gave it back.
    pub owner: Option<Owner>,
    /// When that owner was granted.
    pub epoch: Epoch,
    /// Sessions with a head in it.
    pub sessions: RefSet<SessionId>,
    /// Extents that hang on it.
    pub children: RefSet<ArtifactId>,
    /// Read-only copies, by holder.
    pub replicas: Vec<Replica>,
    /// The repository or document it belongs to.
    pub group: Option<GroupId>,
    /// When it was last written.
    pub touched: LedgerTime,
    /// Whether it may be forgotten.
    #[serde(default, skip_serializing_if = "PinFlag::is_no")]
    pub pinned: PinFlag,
}

impl Artifact {
    /// An extent of nothing.
    pub(crate) fn empty(id: ArtifactId, origin: Arc<KvOrigin>) -> Self {
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
            pinned: PinFlag::No,
        }
    }

    /// Blocks before it.
    pub fn from(&self) -> Blocks {
        self.parent.map_or(Blocks::ZERO, |parent| parent.at.blocks)
    }

    /// Its end.
    pub fn end(&self) -> PrefixPoint {
        let root = PrefixPoint { blocks: Blocks::ZERO, id: self.origin.root };
        self.boundaries.last().map_or(root, |last| last.point)
    }

    /// Bytes of its own blocks.
    pub fn bytes(&self) -> Bytes {
        self.origin.shape.block_bytes * (self.end().blocks - self.from()).0
    }

    /// Whether nothing references it and nobody keeps it.
    pub fn is_idle(&self) -> bool {
        self.pinned.is_no() && self.sessions.is_empty() && self.children.is_empty()
    }

    /// The deepest kept point at or before `blocks`.
    pub fn boundary_at_or_before(&self, blocks: Blocks) -> Option<&Boundary> {
        let after = self.boundaries.partition_point(|b| b.point.blocks <= blocks);
        self.boundaries[..after].last()
    }
}
