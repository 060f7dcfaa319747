//! Extents as they lie in memory: packed bytes beside a shared origin.
//!
//! An unpacked extent takes three times as much. Only what no extent may be without is fixed in width: ids. Everything
//! here was packed by this file, so a byte that does not fit is a bug and panics.

use std::sync::Arc;

use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use vocabulary::{
    ArtifactId, Blocks, DpRank, Epoch, GroupId, Incarnation, LedgerTime, Owner, PrefixId, SessionId, WorkerId,
};
use xxhash_rust::xxh3::xxh3_128;

use crate::Point;
use crate::artifact::{Artifact, Attached, Boundary, KvShape, Origin, Replica};
use crate::control::Pinned;
use crate::interned::Interned;
use crate::radix::Radix;
use crate::refs::Refs;

const PARENT: u8 = 1;
const OWNER: u8 = 2;
const GROUP: u8 = 4;
const PINNED: u8 = 8;

/// Reference sets that are too large to be packed.
type Many = (Refs<SessionId>, Refs<ArtifactId>);

/// A packed extent.
#[derive(Clone)]
pub(crate) struct Stored {
    origin: Arc<Origin>,
    /// Few references, then everything else.
    bytes: Arc<[u8]>,
    many: Option<Arc<Many>>,
}

impl Stored {
    pub(crate) fn pack(artifact: &Artifact) -> Self {
        let mut to = Writer(Vec::with_capacity(96 + 24 * artifact.boundaries.len()));
        let many = artifact.sessions.is_many() || artifact.children.is_many();
        if many {
            to.0.extend([0, 0]);
        } else {
            to.number(artifact.sessions.len() as u64);
            artifact.sessions.iter().for_each(|session| to.id(session.0));
            to.number(artifact.children.len() as u64);
            artifact.children.iter().for_each(|child| to.id(child.0));
        }
        to.body(artifact);
        let many = many.then(|| Arc::new((artifact.sessions.clone(), artifact.children.clone())));
        Self { origin: artifact.origin.clone(), bytes: to.0.into(), many }
    }

    pub(crate) fn unpack(&self, id: ArtifactId) -> Artifact {
        let mut from = Reader(&self.bytes);
        let sessions: Refs<_> = (0..from.number()).map(|_| SessionId(from.id())).collect();
        let children: Refs<_> = (0..from.number()).map(|_| ArtifactId(from.id())).collect();
        let (sessions, children) = self.many.as_ref().map_or((sessions, children), |many| (**many).clone());
        from.body(Artifact { sessions, children, ..Artifact::empty(id, self.origin.clone()) })
    }

    /// Of everything in it and its id: of a large set of references, only the sum that the set keeps.
    fn digest(&self, id: ArtifactId) -> u128 {
        let mut from = Reader(&self.bytes);
        let mut few = [0u128; 2];
        for sum in &mut few {
            for _ in 0..from.number() {
                *sum = sum.wrapping_add(crate::refs::digest(SessionId(from.id())));
            }
        }
        let sums = self.many.as_ref().map_or(few, |many| [many.0.digest(), many.1.digest()]);
        let origin = &*self.origin;
        let (tenant, model) = (origin.tenant.0.as_bytes(), origin.model.0.as_bytes());
        let mut all = Vec::with_capacity(160 + tenant.len() + model.len() + from.0.len());
        for number in [id.0, sums[0], sums[1], origin.root.0] {
            all.extend(number.to_le_bytes());
        }
        let KvShape { format, kinds, block, block_bytes } = origin.shape;
        for number in [format.0, kinds.0.into(), block.0, block_bytes.0, tenant.len() as u64, model.len() as u64] {
            all.extend(number.to_le_bytes());
        }
        for part in [tenant, model, from.0] {
            all.extend(part);
        }
        xxh3_128(&all)
    }

    pub(crate) fn origin(&self) -> &Arc<Origin> {
        &self.origin
    }

    /// Whether a point with this id is kept; cheaper than unpacking.
    pub(crate) fn keeps(&self, prefix: PrefixId) -> bool {
        let mut from = Reader(&self.bytes);
        for _ in 0..2 {
            let members = from.number() as usize;
            from.skip(16 * members);
        }
        from.head(&mut Artifact::empty(ArtifactId(0), self.origin.clone()));
        (0..from.number()).any(|_| {
            let step = from.number();
            let found = from.id() == prefix.0;
            if step & 1 == 1 {
                from.epoch();
            }
            found
        })
    }
}

/// Bytes that grow.
struct Writer(Vec<u8>);

impl Writer {
    /// Seven bits a byte, the lowest first.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    fn id(&mut self, id: u128) {
        self.0.extend(id.to_le_bytes());
    }

    fn epoch(&mut self, epoch: Epoch) {
        self.number(u64::from(epoch.generation));
        self.number(epoch.index);
        self.number(u64::from(epoch.position));
    }

    fn owner(&mut self, owner: Owner) {
        self.0.extend(owner.worker.0.to_le_bytes());
        self.number(owner.incarnation.0);
        self.number(u64::from(owner.rank.0));
    }

    fn point(&mut self, point: Point) {
        self.number(point.blocks.0);
        self.id(point.id.0);
    }

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

/// What is left to be read.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn skip(&mut self, bytes: usize) {
        self.0 = &self.0[bytes..];
    }

    fn fixed<const N: usize>(&mut self) -> [u8; N] {
        let (fixed, rest) = self.0.split_first_chunk().expect("packed extents are whole");
        self.0 = rest;
        *fixed
    }

    fn number(&mut self) -> u64 {
        let (mut number, mut shift) = (0, 0);
        loop {
            let [byte] = self.fixed();
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return number;
            }
            shift += 7;
        }
    }

    fn id(&mut self) -> u128 {
        u128::from_le_bytes(self.fixed())
    }

    fn epoch(&mut self) -> Epoch {
        Epoch { generation: self.number() as u32, index: self.number(), position: self.number() as u32 }
    }

    fn owner(&mut self) -> Owner {
        let worker = WorkerId(u64::from_le_bytes(self.fixed()));
        Owner { worker, incarnation: Incarnation(self.number()), rank: DpRank(self.number() as u16) }
    }

    fn point(&mut self) -> Point {
        Point { blocks: Blocks(self.number()), id: PrefixId(self.id()) }
    }

    /// Everything of fixed number.
    fn head(&mut self, artifact: &mut Artifact) {
        let [flags] = self.fixed();
        let has = |flag| flags & flag != 0;
        artifact.touched = LedgerTime(self.number());
        artifact.epoch = self.epoch();
        artifact.owner = has(OWNER).then(|| self.owner());
        artifact.parent = has(PARENT).then(|| Attached { artifact: ArtifactId(self.id()), at: self.point() });
        artifact.group = has(GROUP).then(|| GroupId(self.id()));
        artifact.pinned = if has(PINNED) { Pinned::Yes } else { Pinned::No };
    }

    fn body(&mut self, mut artifact: Artifact) -> Artifact {
        self.head(&mut artifact);
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
            artifact.boundaries.push(Boundary { point: Point { blocks: Blocks(blocks), id }, epoch });
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

/// All extents, by id, and their digest, which is kept in step with every write.
#[derive(Clone, Default)]
pub(crate) struct Artifacts {
    table: Radix<u128, Stored, 16>,
    /// The sum of the records' digests: equal contents have equal sums, however they came about.
    pub(crate) digest: u128,
}

impl Artifacts {
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    pub(crate) fn get(&self, id: ArtifactId) -> Option<Artifact> {
        self.table.get(&id.0).map(|stored| stored.unpack(id))
    }

    /// An extent's origin, without unpacking the rest.
    pub(crate) fn origin(&self, id: ArtifactId) -> Option<&Arc<Origin>> {
        self.table.get(&id.0).map(Stored::origin)
    }

    pub(crate) fn insert(&mut self, artifact: &Artifact) {
        let stored = Stored::pack(artifact);
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

    /// All ids from one on, with what is packed there.
    pub(crate) fn from(&self, id: ArtifactId) -> impl Iterator<Item = (ArtifactId, &Stored)> {
        self.table.iter_from(&id.0).map(|(id, stored)| (ArtifactId(*id), stored))
    }
}

impl PartialEq for Artifacts {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().eq(other.iter())
    }
}

impl Eq for Artifacts {}

impl std::fmt::Debug for Artifacts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

impl FromIterator<Artifact> for Artifacts {
    fn from_iter<I: IntoIterator<Item = Artifact>>(artifacts: I) -> Self {
        let mut all = Self::default();
        artifacts.into_iter().for_each(|artifact| all.insert(&artifact));
        all
    }
}

impl Serialize for Artifacts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.len()))?;
        for artifact in self.iter() {
            map.serialize_entry(&artifact.id, &artifact)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Artifacts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Artifacts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("extents by id")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Artifacts, A::Error> {
                let (mut all, mut origins) = (Artifacts::default(), Interned::default());
                while let Some((_, mut artifact)) = map.next_entry::<ArtifactId, Artifact>()? {
                    origins.share(&mut artifact.origin);
                    all.insert(&artifact);
                }
                Ok(all)
            }
        }
        deserializer.deserialize_map(Visitor)
    }
}
