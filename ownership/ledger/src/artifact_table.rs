//! In-memory table of artifacts: packed bytes plus a shared chain descriptor.
//!
//! An unpacked artifact takes three times as much memory.

use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{ArtifactGroupId, ArtifactId, Blocks, Epoch, LedgerTime, Owner, PrefixChain, PrefixId, SessionId};
use xxhash_rust::xxh3::xxh3_128;

use crate::PrefixPoint;
use crate::artifact::{Artifact, ChainDescriptor, KvBlockSpec, ParentPoint, PrefixBoundary, Replica};
use crate::control::ArtifactPinFlag;
use crate::origin_interner::ChainDescriptorInterner;
use crate::packed_codec::{PackedReader, PackedWriter};
use crate::radix::RadixMap;
use crate::ref_set::RefSet;

const PARENT: u8 = 1;
const OWNER: u8 = 2;
const GROUP: u8 = 4;
const PINNED: u8 = 8;

/// Reference sets that are too large to be packed.
type LargeRefs = (RefSet<SessionId>, RefSet<ArtifactId>);

/// A packed artifact.
#[derive(Clone)]
pub(crate) struct PackedArtifact {
    origin: Arc<ChainDescriptor>,
    /// Small reference sets, then all other fields.
    bytes: Arc<[u8]>,
    large_refs: Option<Arc<LargeRefs>>,
}

impl PackedArtifact {
    pub(crate) fn pack(artifact: &Artifact) -> Self {
        let mut to = PackedWriter(Vec::with_capacity(96 + 24 * artifact.boundaries.len()));
        let many = artifact.sessions.is_tree() || artifact.children.is_tree();
        if many {
            to.0.extend([0, 0]);
        } else {
            to.number(artifact.sessions.len() as u64);
            artifact.sessions.iter().for_each(|session| to.id(session.0));
            to.number(artifact.children.len() as u64);
            artifact.children.iter().for_each(|child| to.id(child.0));
        }
        to.body(artifact);
        let large_refs = many.then(|| Arc::new((artifact.sessions.clone(), artifact.children.clone())));
        Self { origin: artifact.origin.clone(), bytes: to.0.into(), large_refs }
    }

    pub(crate) fn unpack(&self, id: ArtifactId) -> Artifact {
        let mut from = PackedReader(&self.bytes);
        let sessions: RefSet<_> = from.inline_refs().map(SessionId).collect();
        let children: RefSet<_> = from.inline_refs().map(ArtifactId).collect();
        let (sessions, children) = self.large_refs.as_ref().map_or((sessions, children), |many| (**many).clone());
        from.body(Artifact { sessions, children, ..Artifact::empty(id, self.origin.clone()) })
    }

    /// Returns the digest of the artifact and its id. Of a large reference set only the sum that the set maintains is
    /// hashed.
    fn digest(&self, id: ArtifactId) -> u128 {
        let mut from = PackedReader(&self.bytes);
        let mut few = [0u128; 2];
        for sum in &mut few {
            *sum = from.inline_refs().fold(0, |sum, id| sum.wrapping_add(crate::ref_set::digest(SessionId(id))));
        }
        let sums = self.large_refs.as_ref().map_or(few, |many| [many.0.digest(), many.1.digest()]);
        let origin = &*self.origin;
        let (tenant, model) = (origin.tenant.0.as_bytes(), origin.model.0.as_bytes());
        let mut all = Vec::with_capacity(160 + tenant.len() + model.len() + from.0.len());
        for number in [id.0, sums[0], sums[1], origin.root.0] {
            all.extend(number.to_le_bytes());
        }
        let KvBlockSpec { format, kinds, block, block_bytes } = origin.shape;
        for number in [format.0, kinds.0.into(), block.0, block_bytes.0, tenant.len() as u64, model.len() as u64] {
            all.extend(number.to_le_bytes());
        }
        for part in [tenant, model, from.0] {
            all.extend(part);
        }
        xxh3_128(&all)
    }

    pub(crate) fn origin(&self) -> &Arc<ChainDescriptor> {
        &self.origin
    }

    /// Returns the boundary with this prefix id, if there is one.
    pub(crate) fn boundary(&self, id: ArtifactId, prefix: PrefixId) -> Option<BoundaryArtifactView<'_>> {
        let mut from = PackedReader(&self.bytes);
        from.skip_references();
        let ArtifactHeader { owner, epoch, parent, .. } = from.header();
        let mut points = from.points(parent);
        let at = points.find(|point| point.id == prefix)?;
        Some(BoundaryArtifactView { id, point: at, owner, epoch, packed: self })
    }

    /// Returns the deepest boundary on the chain. All boundaries up to `known` must be on it.
    fn last_on_chain(&self, chain: &PrefixChain, known: PrefixPoint) -> PrefixPoint {
        let mut from = PackedReader(&self.bytes);
        from.skip_references();
        let parent = from.header().parent;
        let deeper = from.points(parent).skip_while(|point| point.blocks <= known.blocks);
        deeper.take_while(|point| point.is_on_chain(chain)).last().unwrap_or(known)
    }

    fn has_children(&self) -> bool {
        let mut from = PackedReader(&self.bytes);
        let sessions = from.number() as usize;
        from.skip(16 * sessions);
        from.number() > 0 || self.large_refs.as_ref().is_some_and(|many| !many.1.is_empty())
    }
}

/// A boundary and the artifact that keeps it, read without unpacking the rest. Most lookups need no more.
#[derive(Clone, Copy)]
pub struct BoundaryArtifactView<'a> {
    /// Id of the artifact.
    pub id: ArtifactId,
    /// Prefix at the boundary.
    pub point: PrefixPoint,
    /// Owner of the artifact by decision; `None` if the owner released it.
    pub owner: Option<Owner>,
    /// When that owner was granted.
    pub epoch: Epoch,
    packed: &'a PackedArtifact,
}

impl BoundaryArtifactView<'_> {
    /// Unpacks the whole artifact.
    pub fn artifact(&self) -> Artifact {
        self.packed.unpack(self.id)
    }

    /// Returns whether artifacts attach to this one.
    pub(crate) fn has_children(&self) -> bool {
        self.packed.has_children()
    }

    /// Returns the artifact's deepest boundary on the chain. This boundary must be on the chain.
    pub(crate) fn last_on_chain(self, chain: &PrefixChain) -> Self {
        Self { point: self.packed.last_on_chain(chain, self.point), ..self }
    }
}

/// Fields of an artifact that are not lists.
struct ArtifactHeader {
    touched: LedgerTime,
    epoch: Epoch,
    owner: Option<Owner>,
    parent: Option<ParentPoint>,
    group: Option<ArtifactGroupId>,
    pinned: ArtifactPinFlag,
}

impl PackedWriter {
    fn body(&mut self, artifact: &Artifact) {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        self.0.push(
            flag(artifact.parent.is_some(), PARENT)
                | flag(artifact.owner.is_some(), OWNER)
                | flag(artifact.group.is_some(), GROUP)
                | flag(!artifact.pinned.is_no(), PINNED),
        );
        self.number(artifact.touched.0);
        self.epoch(artifact.epoch);
        artifact.owner.iter().for_each(|owner| self.owner(*owner));
        if let Some(parent) = artifact.parent {
            self.id(parent.artifact.0);
            self.point(parent.at);
        }
        artifact.group.iter().for_each(|group| self.id(group.0));
        self.number(artifact.boundaries.len() as u64);
        let (mut blocks, mut epoch) = (artifact.from().0, artifact.epoch);
        for boundary in &artifact.boundaries {
            let differs = boundary.epoch != epoch;
            self.number(boundary.point.blocks.0.wrapping_sub(blocks) << 1 | u64::from(differs));
            self.id(boundary.point.id.0);
            if differs {
                self.epoch(boundary.epoch);
            }
            (blocks, epoch) = (boundary.point.blocks.0, boundary.epoch);
        }
        self.number(artifact.replicas.len() as u64);
        for copy in &artifact.replicas {
            self.owner(copy.holder);
            self.point(copy.upto);
            self.number(copy.expires.0);
        }
    }
}

impl PackedReader<'_> {
    /// Reads a reference set that is packed inline.
    fn inline_refs(&mut self) -> impl Iterator<Item = u128> {
        (0..self.number()).map(|_| self.id())
    }

    fn skip_references(&mut self) {
        for _ in 0..2 {
            let members = self.number() as usize;
            self.skip(16 * members);
        }
    }

    fn header(&mut self) -> ArtifactHeader {
        let [flags] = self.array();
        let has = |flag| flags & flag != 0;
        ArtifactHeader {
            touched: LedgerTime(self.number()),
            epoch: self.epoch(),
            owner: has(OWNER).then(|| self.owner()),
            parent: has(PARENT).then(|| ParentPoint { artifact: ArtifactId(self.id()), at: self.point() }),
            group: has(GROUP).then(|| ArtifactGroupId(self.id())),
            pinned: if has(PINNED) { ArtifactPinFlag::Yes } else { ArtifactPinFlag::No },
        }
    }

    /// Iterates over the boundaries of an artifact that attaches to `parent`, without epochs. Decodes lazily.
    fn points(mut self, parent: Option<ParentPoint>) -> impl Iterator<Item = PrefixPoint> {
        let mut blocks = parent.map_or(0, |parent| parent.at.blocks.0);
        (0..self.number()).map(move |_| {
            let step = self.number();
            blocks = blocks.wrapping_add(step >> 1);
            let id = PrefixId(self.id());
            if step & 1 == 1 {
                self.epoch();
            }
            PrefixPoint { blocks: Blocks(blocks), id }
        })
    }

    fn body(&mut self, mut artifact: Artifact) -> Artifact {
        let ArtifactHeader { touched, epoch, owner, parent, group, pinned } = self.header();
        artifact = Artifact { touched, epoch, owner, parent, group, pinned, ..artifact };
        let (mut blocks, mut epoch) = (artifact.from().0, artifact.epoch);
        let boundaries = self.number();
        artifact.boundaries.reserve_exact(boundaries as usize);
        for _ in 0..boundaries {
            let step = self.number();
            blocks = blocks.wrapping_add(step >> 1);
            let id = PrefixId(self.id());
            if step & 1 == 1 {
                epoch = self.epoch();
            }
            artifact.boundaries.push(PrefixBoundary { point: PrefixPoint { blocks: Blocks(blocks), id }, epoch });
        }
        let copies = self.number();
        artifact.replicas.extend((0..copies).map(|_| Replica {
            holder: self.owner(),
            upto: self.point(),
            expires: LedgerTime(self.number()),
        }));
        artifact
    }
}

/// All artifacts by id, and their digest, which every write updates.
#[derive(Clone, Default)]
pub(crate) struct ArtifactTable {
    table: RadixMap<u128, PackedArtifact, 16>,
    /// Sum of the records' digests: tables with equal contents have equal sums, whatever their history.
    pub(crate) digest: u128,
}

impl ArtifactTable {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn get(&self, id: ArtifactId) -> Option<Artifact> {
        self.table.get(&id.0).map(|stored| stored.unpack(id))
    }

    /// Returns an artifact's chain descriptor without unpacking the rest.
    pub(crate) fn origin(&self, id: ArtifactId) -> Option<&Arc<ChainDescriptor>> {
        self.table.get(&id.0).map(PackedArtifact::origin)
    }

    pub(crate) fn insert(&mut self, artifact: &Artifact) {
        let stored = PackedArtifact::pack(artifact);
        self.digest = self.digest.wrapping_add(stored.digest(artifact.id));
        if let Some(old) = self.table.insert(artifact.id.0, stored) {
            self.digest = self.digest.wrapping_sub(old.digest(artifact.id));
        }
    }

    pub(crate) fn remove(&mut self, id: ArtifactId) -> Option<Artifact> {
        let stored = self.table.remove(&id.0)?;
        self.digest = self.digest.wrapping_sub(stored.digest(id));
        Some(stored.unpack(id))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Artifact> {
        self.table.iter().map(|(id, stored)| stored.unpack(ArtifactId(*id)))
    }

    /// Returns the first artifact with an id at or above `id`, still packed.
    pub(crate) fn at_or_after(&self, id: ArtifactId) -> Option<(ArtifactId, &PackedArtifact)> {
        self.table.at_or_after(&id.0).map(|(id, stored)| (ArtifactId(*id), stored))
    }

    /// Iterates over all artifacts from `id` on, still packed.
    pub(crate) fn iter_from(&self, id: ArtifactId) -> impl Iterator<Item = (ArtifactId, &PackedArtifact)> {
        self.table.iter_from(&id.0).map(|(id, stored)| (ArtifactId(*id), stored))
    }
}

impl PartialEq for ArtifactTable {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for ArtifactTable {}

impl std::fmt::Debug for ArtifactTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<Artifact> for ArtifactTable {
    fn from_iter<I: IntoIterator<Item = Artifact>>(artifacts: I) -> Self {
        let mut all = Self::default();
        artifacts.into_iter().for_each(|artifact| all.insert(&artifact));
        all
    }
}

impl Serialize for ArtifactTable {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        for artifact in self.iter() {
            map.serialize_entry(&artifact.id, &artifact)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for ArtifactTable {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ArtifactTableVisitor;
        impl<'de> serde::de::Visitor<'de> for ArtifactTableVisitor {
            type Value = ArtifactTable;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("extents by id")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<ArtifactTable, A::Error> {
                let (mut all, mut origins) = (ArtifactTable::default(), ChainDescriptorInterner::default());
                while let Some((_, mut artifact)) = map.next_entry::<ArtifactId, Artifact>()? {
                    origins.intern(&mut artifact.origin);
                    all.insert(&artifact);
                }
                Ok(all)
            }
        }
        deserializer.deserialize_map(ArtifactTableVisitor)
    }
}
